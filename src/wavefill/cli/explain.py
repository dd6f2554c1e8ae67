"""`wavefill explain`: which schedule a shape gets and why, with the timeline of each schedule."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wavefill import cost, hardware
from wavefill.cli._output import print_json, written
from wavefill.spec import MAX_INT, MAX_LENGTH, MAX_TILE, SCHEDULES, Fixed, Invariant, Schedule, StreamK, invalid, whole

if TYPE_CHECKING:
    from wavefill.reference import Emulation
    from wavefill.select import Choice

#: Most tiles of `--emulate`, which runs a few small tensor operations for each: about a minute's work.
EMULATE_TILES = 50_000
#: Most bytes of float32 keys and values that `--emulate` makes up.
EMULATE_BYTES = 2 << 30
#: Read bandwidths that --read-gbs takes, in GB/s: from far below those of any machine to far above.
LEAST_GBS, MOST_GBS = 1e-6, 1e9
#: Most requests that --lens and --batch may count.
MAX_REQUESTS = 1 << 20


def explain(
    lens: Annotated[str | None, typer.Option(
        help="Keys of each request: lengths or COUNTxLENGTH, with commas, as in 131072,65536,14x4096.")] = None,
    batch: Annotated[int | None, typer.Option(
        help="Requests of --context keys each, instead of --lens; 1 if not given.")] = None,
    context: Annotated[int | None, typer.Option(help="Keys of each of the --batch requests.")] = None,
    hq: Annotated[int, typer.Option(help="Query heads.")] = 32,
    kh: Annotated[int, typer.Option(help="KV heads.")] = 8,
    d: Annotated[int, typer.Option(help="Head size of Q and K.")] = 128,
    dv: Annotated[int | None, typer.Option(help="Head size of V and the output; --d if not given.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the KV cache: bfloat16, float16 or float32.")] = "bfloat16",
    q_lens: Annotated[str | None, typer.Option(
        help="Query tokens of each request, as --lens: 1 each if not given; all: whole prompts.")] = None,
    page_size: Annotated[int, typer.Option(help="Tokens of a page.")] = 16,
    contiguous: Annotated[bool, typer.Option("--contiguous", help="The cache has no pages.")] = False,
    window: Annotated[int | None, typer.Option(help="Keys a query sees; all if not given.")] = None,
    latent: Annotated[bool, typer.Option(
        "--latent", help="V is the first --dv columns of K, as in MLA, and is not read a second time.")] = False,
    schedule: Annotated[str, typer.Option(
        help="auto, stream_k, fixed or invariant; with a number: fixed:splits=8, fixed:chunk=512, "
             "fixed:flashdecoding, invariant:chunk=4096.")] = "auto",
    device: Annotated[str, typer.Option(
        help=f"Where: {', '.join(hardware.device_names())}. cpu is the processor here.")] = "cpu",
    workers: Annotated[int | None, typer.Option(help="CTAs or threads; the device's own if not given.")] = None,
    tile: Annotated[int | None, typer.Option(help="Tokens of a tile; the device's own if not given.")] = None,
    read_gbs: Annotated[float | None, typer.Option(
        help="Read bandwidth in GB/s for the floor time, as `wavefill bench` measures it.")] = None,
    timeline: Annotated[bool, typer.Option(help="Draw the timeline of each schedule here.")] = True,
    panels: Annotated[int | None, typer.Option(
        min=1, help="Draw this many timelines, that of the choice first; all if not given.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the timelines to this HTML file.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the timelines to this PNG (needs the bench extra).")] = None,
    emulate: Annotated[bool, typer.Option(
        "--emulate", help="Replay the schedule tile by tile on random data and compare its merge with one softmax "
                          "(needs the torch extra).")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Show which schedule a decode-attention shape gets and why: tiles, workers, waves, bytes, floor time."""
    from wavefill.select import explain as choose

    seq_lens = _lengths(lens, batch, context)
    if read_gbs is not None and not LEAST_GBS <= read_gbs <= MOST_GBS:
        raise invalid("--read-gbs", f"must be {LEAST_GBS:g} to {MOST_GBS:g}", read_gbs, "Give GB/s.")
    queries = seq_lens if q_lens == "all" else None if q_lens is None else _counted("--q-lens", q_lens)
    choice = choose(
        seq_lens, HQ=hq, KH=kh, D=d, DV=dv, dtype=dtype, page_size=None if contiguous else page_size,
        q_lens=queries, window=window, latent=latent, schedule=_schedule(schedule), device=device, workers=workers,
        tile=tile, read_bandwidth=None if read_gbs is None else read_gbs * 1e9,
    )
    replay = _emulate(choice, seq_lens, quiet=json) if emulate else None
    drawn = choice if panels is None else replace(choice, considered=choice.considered[:panels - 1])
    _write_files(drawn, html, png)
    if json:
        print_json(choice.to_dict() | ({"emulation": replay.to_dict()} if replay else {}))
        return
    _print(drawn, timeline)
    if replay:
        typer.echo("\n" + "\n".join(replay.summary()))
    for path in (html, png):
        if path is not None:
            typer.echo(f"wrote {path}")


def _lengths(lens: str | None, batch: int | None, context: int | None) -> list[int]:
    if (lens is None) == (context is None):
        raise invalid("--lens", "is needed, or --context with --batch, and not both",
                      "neither" if lens is None else "both", "For example --lens 131072,65536,14x4096.")
    if context is not None:
        return [whole("--context", context, 0, MAX_LENGTH)] * whole("--batch", 1 if batch is None else batch, 0,
                                                                    MAX_REQUESTS)
    if batch is not None:
        raise invalid("--batch", "goes with --context, and must be left out with --lens", batch,
                      "Write COUNTxLENGTH in --lens.")
    return _counted("--lens", lens or "")


def _counted(option: str, text: str) -> list[int]:
    """The numbers that LENGTH and COUNTxLENGTH with commas between stand for."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(?:(\d{1,18})x)?(\d{1,18})", part.strip())
        if match is None:
            raise invalid(option, "must be lengths or COUNTxLENGTH with commas between", repr(part[:40]),
                          "For example 131072,65536,14x4096.")
        count = int(match[1] or 1)
        if len(found) + count > MAX_REQUESTS:
            raise invalid(option, f"may count at most {MAX_REQUESTS:,} requests", f"{len(found) + count:,}",
                          "Give fewer.")
        found += [whole(option, int(match[2]), 0, MAX_LENGTH)] * count
    return found


def _schedule(text: str) -> Schedule | str:
    """`NAME`, or `NAME:FIELD=NUMBER`, or `fixed:flashdecoding`."""
    name, _, option = text.partition(":")
    if not option and name in SCHEDULES:
        return name
    if name == "fixed" and option in ("flashdecoding", "rule=flashdecoding"):
        return Fixed(rule="flashdecoding")
    field, _, number = option.partition("=")
    kinds: dict[tuple[str, str], Any] = {
        ("fixed", "splits"): Fixed, ("fixed", "chunk"): Fixed, ("invariant", "chunk"): Invariant,
        ("stream_k", "tile"): StreamK,
    }
    kind = kinds.get((name, field))
    if kind is None or not number.isdecimal() or len(number) > 19:
        raise invalid("--schedule", f"takes {', '.join(SCHEDULES)}, fixed:splits=N, fixed:chunk=N, "
                      "fixed:flashdecoding, invariant:chunk=N or stream_k:tile=N", repr(text[:60]), "Use one of these.")
    made: Schedule = kind(**{field: whole("--schedule", int(number), 1, MAX_TILE if kind is StreamK else MAX_INT)})
    return made


def _write_files(choice: Choice, html: Path | None, png: Path | None) -> None:
    if html is None and png is None:
        return
    from wavefill.timeline import write_html, write_png

    for option, path, write in (("--html", html, write_html), ("--png", png, write_png)):
        if path is not None:
            with written(option, path):
                write(choice, path)


def _emulate(choice: Choice, seq_lens: list[int], *, quiet: bool) -> Emulation:
    spec = choice.spec
    if spec.q_len > 1:
        raise invalid("--emulate", "replays one query token a request", f"up to {spec.q_len:,}", "Leave --q-lens out.")
    page = min(spec.page_size or 16, max([1, *seq_lens]))  # a page past every request's end holds no more
    pages = [-(-n // page) for n in seq_lens]
    nbytes = (sum(pages) * page * spec.KH + len(seq_lens) * spec.HQ) * (spec.D + spec.DV) * 4
    for got, most, unit in ((choice.tiles, EMULATE_TILES, "tiles"), (nbytes, EMULATE_BYTES, "bytes of KV and queries")):
        if got > most:
            raise invalid("--emulate", f"replays at most {most:,} {unit}", f"{got:,}",
                          "Give shorter --lens or fewer --kh; a larger --tile also makes fewer tiles.")
    import torch
    from rich.console import Console

    from wavefill import reference

    generator = torch.Generator().manual_seed(0)
    table = torch.zeros(len(seq_lens), max([1, *pages]), dtype=torch.int32)
    order = torch.randperm(sum(pages), generator=generator, dtype=torch.int32)
    taken = 0
    for request, count in enumerate(pages):
        table[request, :count] = order[taken:taken + count]
        taken += count
    status = nullcontext() if quiet else Console(stderr=True).status(f"replaying {choice.tiles:,} tiles")
    with status:
        return reference.emulate(
            torch.randn(len(seq_lens), spec.HQ, spec.D, generator=generator),
            torch.randn(taken, page, spec.KH, spec.D, generator=generator),
            None if spec.latent else torch.randn(taken, page, spec.KH, spec.DV, generator=generator),
            torch.tensor(seq_lens, dtype=torch.int32), table,
            schedule=choice.schedule, workers=choice.workers, tile=choice.tile, window=spec.window,
            scale=spec.D**-0.5, head_dim_v=spec.DV,
        )


def _print(choice: Choice, timeline: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    spec, moved = choice.spec, choice.traffic
    target = hardware.lookup(choice.device)
    where = f"cpu ({target.model}, {target.isa})" if isinstance(target, hardware.Cpu) else choice.device
    floor = (f"{choice.floor_us:,.1f} us {choice.floor_note}" if choice.floor_us is not None
             else f"unknown: {choice.floor_note}")
    facts = {
        "schedule": choice.label,
        "why": choice.reason,
        "device": where,
        "kernel": choice.kernel,
        "tiles": f"{choice.tiles:,} of {choice.tile} tokens ({_size(cost.tile_bytes(spec, choice.tile))} each)",
        "workers": f"{choice.workers:,}",
        "work items": f"{choice.segments:,}, {choice.partials:,} of them with a partial state to merge",
        "waves": f"{choice.waves:,}",
        "makespan": f"{choice.makespan:,} tiles, {choice.fill:.1%} filled",
        "bytes": f"{_size(moved.total)}: KV {_size(moved.kv)}, query and output {_size(moved.query + moved.output)}, "
                 f"partial states {_size(moved.partials)} written and read",
        "FLOPs": f"{choice.flops / 1e9:,.3g} G, {choice.flops / max(moved.least, 1):.1f} a byte",
        "floor time": floor,
    }
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for name, words in facts.items():
        grid.add_row(name, Text(words, style="bold" if name == "schedule" else ""))
    console.print(grid)
    if timeline and choice.tiles:
        from wavefill.timeline import to_text

        console.print()
        console.print(to_text(choice, width=console.width, ascii_only=console.options.ascii_only))


def _size(nbytes: float) -> str:
    for unit in ("B", "KB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:,.4g} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.2f} GB"

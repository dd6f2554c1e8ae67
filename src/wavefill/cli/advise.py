"""`wavefill advise`: what a model's attention costs on a GPU, in decoding and in reading prompts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wavefill import hardware
from wavefill.cli._output import print_json
from wavefill.spec import MAX_LENGTH, invalid, whole

if TYPE_CHECKING:
    from wavefill.advise import Component, Report

#: Linear layers whose shapes are printed, those with the most FLOPs; --json has all.
LINEARS = 4


def advise(
    config: Annotated[str, typer.Argument(help="A Hugging Face config.json, a model's folder, or a shipped shape such "
                                               "as llama-3.1-8b; a wrong name lists them.")],
    gpu: Annotated[str, typer.Option(
        help=f"{', '.join(each.name for each in hardware.GPUS)}, or a .json file that describes another.")] = "H200",
    gpus: Annotated[int, typer.Option(
        help="So many of them, sharing all work evenly at no cost of communication.")] = 1,
    context: Annotated[str, typer.Option(help="Tokens of a request, as 131072 or 128k.")] = "128k",
    batch: Annotated[int, typer.Option(help="Requests at a time.")] = 1,
    kv: Annotated[str, typer.Option(help="Format of the KV cache: bf16, fp8, int8 or int4.")] = "bf16",
    weights: Annotated[str, typer.Option(help="Format of the weights: bf16 or fp8.")] = "bf16",
    phase: Annotated[str, typer.Option(help="decode, prefill or both.")] = "both",
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Show what a model's attention costs on a GPU: time by component, what binds, and what memory holds."""
    from wavefill.advise import advise as compute

    device = hardware.gpu_file(Path(gpu).expanduser()) if gpu.lower().endswith(".json") else gpu
    report = compute(config, device, gpus=gpus, context=_tokens(context), batch=batch, kv=kv, weights=weights,
                     phase=phase)
    if json:
        print_json(report.to_dict())
    else:
        _print(report)


def _tokens(text: str) -> int:
    """A number of tokens: 131072, 128k (of 1,024) or 1m."""
    match = re.fullmatch(r"(\d{1,12})([km]?)", text.strip().lower())
    if match is None:
        raise invalid("context", "must be a number of tokens", repr(text[:40]), "For example 131072 or 128k.")
    return whole("context", int(match[1]) * {"": 1, "k": 1 << 10, "m": 1 << 20}[match[2]], 1, MAX_LENGTH)


def _print(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for name, words in _facts(report).items():
        grid.add_row(name, words)
    console.print(grid)
    for phase, parts in report.phases.items():
        console.print(f"\n{_title(report, phase)}")
        unit, scale = ("GFLOP", 1e9) if phase == "decode" else ("TFLOP", 1e12)
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
        for column in ("component", "layers", unit, "GB", "FLOP/B", "bound by", "ms", "share"):
            table.add_column(column, justify="left" if column in ("component", "bound by") else "right", no_wrap=True)
        for part in parts:
            table.add_row(part.name, f"{part.layers}", *_amounts(part, scale), part.limit, _figure(part.seconds * 1e3),
                          f"{part.seconds / report.seconds(phase):.1%}")
        console.print(table)
    console.print()
    console.print(_shapes(report))


def _facts(report: Report) -> dict[str, str]:
    from wavefill.advise.models import Attention, Latent

    model, machine, held = report.model, report.machine, report.memory
    kinds = []
    for mixer, count in model.mixers().items():
        if isinstance(mixer, Attention):
            window = f" of {mixer.window:,}" if mixer.window else ""
            kinds.append(f"{count} {mixer.kind}{window} (HQ {mixer.HQ}, KH {mixer.KH}, G {mixer.G}, D {mixer.D})")
        elif isinstance(mixer, Latent):
            kinds.append(f"{count} latent (HQ {mixer.HQ}, {mixer.rank} + {mixer.rope})")
        else:
            kinds.append(f"{count} Mamba-2 ({mixer.heads} x {mixer.head_dim} x {mixer.state})")
    gpus = f"{machine.gpus} x {machine.gpu.name}" if machine.gpus > 1 else machine.gpu.name
    even = "; shared evenly, no communication counted" if machine.gpus > 1 else ""
    read = f"{machine.read / 1e12:.2f} TB/s {'measured' if machine.gpu.measured_read else 'taken as read bandwidth'}"
    fit = f"{'fits' if held.holds(report.batch) else 'does not fit'}; room for {held.requests:,}"
    parameters = f"{model.parameters / 1e9:,.2f} B parameters, {model.active / 1e9:,.2f} B of them a token"
    return {
        "model": f"{model.name}: {parameters}",
        "layers": "; ".join(kinds),
        "GPU": f"{gpus}: {read}{even}",
        "memory": f"weights {_gb(held.weights)} ({report.formats.weights}) and {report.batch:,} x {_gb(held.request)} "
                  f"of KV ({report.formats.kv}), of {_gb(held.usable)}: {fit}",
        "KV": f"{held.token / 1e3:,.4g} KB a token past every window, context {report.context:,}",
    }


def _title(report: Report, phase: str) -> str:
    seconds, share, batch = report.seconds(phase), report.share(phase), report.batch
    ridge = next(report.machine.ridge(each.fp8) for each in report.phases[phase])
    what = (f"decode: {_figure(seconds * 1e3)} ms a step, {batch / seconds:,.0f} tokens/s" if phase == "decode" else
            f"prefill: {_figure(seconds)} s a batch, {batch * report.context / seconds:,.0f} tokens/s")
    return f"{what}; attention {share:.0%}; ridge {ridge:.0f} FLOP/B"


def _amounts(part: Component, scale: float) -> tuple[str, str, str]:
    if not part.bytes:
        return "", "", ""
    return (_figure(part.layers * part.flops / scale), _figure(part.layers * part.bytes / 1e9), _figure(part.intensity))


def _shapes(report: Report) -> object:
    """The GEMMs of every attention, and the largest of linear layers, side by side where there are two phases."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    table.add_column("batch x M x N x K", no_wrap=True)
    columns: list[dict[str, str]] = []
    attention: list[str] = []
    sizes: dict[str, float] = {}
    for phase, parts in report.phases.items():
        table.add_column(phase, justify="right", no_wrap=True)
        column: dict[str, str] = {}
        for part in parts:
            for gemm in part.gemms:
                inside = part.kind == "attention"
                name = f"{gemm.name}, {part.name.partition(', ')[2]}" if inside else gemm.name
                column[name] = f"{gemm.batch:.0f} x {gemm.M:.0f} x {gemm.N} x {gemm.K}"
                if inside and name not in attention:
                    attention.append(name)
                elif not inside:
                    sizes[name] = max(sizes.get(name, 0.0), part.layers * gemm.flops)
        columns.append(column)
    largest = sorted(sizes, key=lambda name: -sizes[name])[:LINEARS]
    for name in [*attention, *largest]:
        table.add_row(name, *(column.get(name, "") for column in columns))
    return table


def _figure(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.2f} GB"

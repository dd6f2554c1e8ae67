"""`wavefill bench kernels | overhead`: the kernel suite against its peers, and the cost of a call."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wavefill.cli._output import Threads, print_json, progress, save_json
from wavefill.spec import invalid

if TYPE_CHECKING:
    from wavefill.bench.report import Cells

app = typer.Typer(help="Measure kernels (the default) and calls on this machine.", invoke_without_command=True,
                  pretty_exceptions_enable=False)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Output = Annotated[Path | None, typer.Option(
    help="Write the results to this file: Markdown if it ends in .md, else JSON.")]


@app.callback()
def _default(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        kernels()


@app.command()
def kernels(
    rows: Annotated[str | None, typer.Option(
        help="Rows of the suite, or beginnings of their names, with commas between. Without it: those for a CPU.",
    )] = None,
    dtype: Annotated[str, typer.Option(help="Of q and the KV cache: bfloat16, float16 or float32.")] = "bfloat16",
    layout: Annotated[str, typer.Option(
        help="KV as wavefill reads it: paged (pages in a random order) or contiguous.")] = "paged",
    order: Annotated[str, typer.Option(
        help="HND: the tokens of a KV head side by side, as in PagedKVCache; NHD: the heads of a token.")] = "HND",
    page_size: Annotated[int | None, typer.Option(
        min=1, max=1 << 16, help="Tokens of a page; the suite's own if not given.")] = None,
    schedules: Annotated[str, typer.Option(
        help="auto, stream_k, fixed, invariant, with commas between, or all; the first is the main column.")] = "auto",
    peers: Annotated[bool, typer.Option(help="Run torch sdpa and flex_attention too.")] = True,
    seconds: Annotated[float, typer.Option(min=0.0, help="To spend on timing each row, at least five rounds.")] = 8.0,
    threads: Threads = None,
    output: Output = None,
    json: Json = False,
) -> None:
    """Run the suite's rows against torch sdpa and flex_attention, beside the read floor of the same run."""
    from wavefill.bench import suites

    suite = suites.load()
    chosen = suite.select([name.strip() for name in rows.split(",")] if rows else None)
    wanted = _schedules(schedules)

    from wavefill.bench import cpu, report

    used = _threads(threads)
    with progress(json) as bar:
        results = cpu.run(chosen, dtype=dtype, layout=layout, page_size=page_size or suite.page_size, order=order,
                          schedules=wanted, peers=peers, seconds=seconds, report=bar)
    facts = {"layout": layout, "order": order, "page_size": page_size or suite.page_size if layout == "paged" else None,
             "schedule": wanted[0]}
    _emit(used, facts, results, report.kernel_table(results), report.kernel_notes(results), output, json)
    if not all(result.correct for result in results):
        typer.echo("error: wavefill gave a wrong result", err=True)
        raise typer.Exit(1)


@app.command()
def overhead(threads: Threads = None, output: Output = None, json: Json = False) -> None:
    """Measure the host cost of calls on inputs too small to take time themselves, of large tables and of the import."""
    from wavefill.bench import overhead as measure
    from wavefill.bench import report

    used = _threads(threads)
    with progress(json) as bar:
        results = measure.run(bar)
    _emit(used, {}, results, report.overhead_table(results), [], output, json)


def _schedules(text: str) -> list[str]:
    from wavefill.bench.cpu import SCHEDULES

    names = list(SCHEDULES) if text == "all" else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in SCHEDULES:
            raise invalid("--schedules", f"takes all, or some of {', '.join(SCHEDULES)}", repr(name),
                          "Use these names.")
    return list(dict.fromkeys(names))


def _threads(threads: int | None) -> int:
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    return torch.get_num_threads()


def _emit(threads: int, facts: dict[str, Any], results: list[Any], table: tuple[list[str], Cells], notes: list[str],
          output: Path | None, json: bool) -> None:
    from wavefill.bench import probing, report

    whole = {**probing.provenance(threads), **facts, "results": [result.to_dict() for result in results],
             "notes": notes}
    title = (f"{whole['cpu']} ({whole['isa']}), {threads} threads, torch {whole['versions']['torch']}, wavefill "
             f"{whole['versions']['wavefill']} ({whole['commit'] or 'commit unknown'})")
    if output is not None and output.suffix == ".md":
        output.parent.mkdir(parents=True, exist_ok=True)
        bullets = "".join(f"- {note}\n" for note in notes)
        output.write_text(f"{title}. Command: `{whole['command']}`\n\n{report.markdown(*table)}"
                          + (f"\n{bullets}" if bullets else ""), encoding="utf-8")
    elif output is not None:
        save_json(output, whole)
    if json:
        print_json(whole)
        return
    console = report.wide_console()
    console.print(report.terminal_table(*table))
    for line in (*notes, title):
        console.print(line, highlight=False)
    if output is not None:
        typer.echo(f"wrote {output}", err=True)

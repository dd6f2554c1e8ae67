"""What `wavefill advise` prints: the report, all findings, parallel plans, a sweep. Each fits a screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from wavefill.advise.models import Attention, Latent
from wavefill.advise.sweeps import sweep
from wavefill.advise.words import figure, gb, size
from wavefill.spec import invalid

if TYPE_CHECKING:
    from wavefill.advise import Component, Report
    from wavefill.advise.plans import Comparison, Step
    from wavefill.advise.rules import Finding
    from wavefill.advise.tiles import Tiles

#: Linear layers whose shapes are printed, those with the most FLOPs, findings of the report, and plans of each order.
LINEARS, FINDINGS, PLANS = 2, 3, 10


def print_report(report: Report) -> None:
    console = Console(highlight=False)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for name, words in _facts(report).items():
        grid.add_row(name, words)
    console.print(grid)
    for phase, parts in report.phases.items():
        console.print(f"\n{_title(report, phase)}")
        console.print(_components(parts))
    console.print()
    console.print(_shapes(report))
    if report.findings:
        console.print()
        table = Table.grid(padding=(0, 2))
        for finding in report.findings[:FINDINGS]:
            table.add_row(finding.rule, _change(finding), finding.change)
        console.print(table)


def print_findings(report: Report) -> None:
    """All of them: what was seen, what it costs, the change and the gain."""
    console = Console(highlight=False)
    if not report.findings:
        console.print("Nothing that would save 1 %.")
    for finding in report.findings:
        console.print(f"[bold]{finding.rule}[/] ({finding.phase}): {finding.saved:.0%} less with {finding.change}")
        console.print(f"  {finding.seen}; {finding.cost}; {finding.gain}", style="dim", soft_wrap=False)


def print_plans(report: Report, comparison: Comparison) -> None:
    """The best plans at the target, and the most interactive ones at the batch."""
    console = Console(highlight=False)
    console.print(f"{report.model.name} on {report.machine.gpus} x {report.machine.gpu.name}, context "
                  f"{report.context:,}, KV {report.formats.kv}, weights {report.formats.weights}; decoding")
    for title, steps in ((f"most tokens/s/GPU at {comparison.target:g} tokens/s a user or more, each plan's largest "
                          "batch", comparison.by_throughput()),
                         (f"most tokens/s a user, batch {report.batch:,}", comparison.by_interactivity())):
        console.print(f"\n{title}" + ("" if steps else ": none"))
        if steps:
            console.print(_plans(steps[:PLANS]))
    left = len(comparison.choices) - len(comparison.by_interactivity())
    console.print(f"\n{len(comparison.choices)} plans, {left} without room for batch {report.batch:,}; --json has all "
                  "of them and the Pareto front", style="dim")


def _plans(steps: list[Step]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for column in ("attention | FFN", "batch", "GB/GPU", "KV x", "ms", "exch.", "t/s/user", "t/s/GPU"):
        table.add_column(column, justify="left" if "|" in column else "right", no_wrap=True)
    for step in steps:
        table.add_row(step.plan.name, f"{step.batch:,}", figure((step.weights + step.kv) / 1e9), f"{step.copies:.3g}",
                      figure(step.seconds * 1e3), figure(step.exchanging * 1e3), figure(step.per_user),
                      figure(step.per_gpu))
    return table


def print_sweep(report: Report, over: str) -> None:
    points = sweep(report.setup, over)
    if not points:
        raise invalid("--sweep", "g and hsz need layers of grouped-query attention", report.model.name,
                      "Sweep length or kv.")
    console = Console(highlight=False)
    fixed = {"g": "query heads", "hsz": "head counts", "length": "batch", "kv": "shape"}[over]
    console.print(f"{report.model.name} on {report.machine.gpus} x {report.machine.gpu.name}, batch {report.batch:,}, "
                  f"context {report.context:,}, KV {report.formats.kv}; the same {fixed}; * the model's own")
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for column in ({"g": "G", "hsz": "D"}.get(over, over), "KV GB/request", "step ms", "attention", "FLOP/B",
                   "prompts s", "attention"):
        table.add_column(column, justify="right", no_wrap=True)
    for each in points:
        table.add_row(f"{'* ' if each.here else ''}{each.value}", figure(each.request / 1e9), figure(each.step * 1e3),
                      f"{each.step_attention / each.step:.0%}", figure(each.intensity), figure(each.prompts),
                      f"{each.prompt_attention / each.prompts:.0%}")
    console.print(table)


def _change(finding: Finding) -> str:
    unit, scale = {"memory": ("GB", 1e-9), "prefill": ("s", 1.0), "decode": ("ms", 1e3)}[finding.phase]
    return f"{figure(finding.before * scale)} -> {figure(finding.after * scale)} {unit}"


def _facts(report: Report) -> dict[str, str]:
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
    even = "; even shares, no exchanges" if machine.gpus > 1 else ""
    read = f"reads {figure(machine.read / 1e12)} TB/s ({'measured' if machine.gpu.measured_read else 'derived'})"
    fit = f"{'fits' if held.holds(report.batch) else 'does not fit'}; room for {held.requests:,}"
    parameters = f"{model.parameters / 1e9:,.2f} B parameters, {model.active / 1e9:,.2f} B of them a token"
    facts = {
        "model": f"{model.name}: {parameters}",
        "layers": "; ".join(kinds),
        "GPU": f"{gpus}: {read}{even}",
        "memory": f"weights {gb(held.weights)} ({report.formats.weights}) and {report.batch:,} x {gb(held.request)} "
                  f"of KV ({report.formats.kv}), of {gb(held.usable)}: {fit}",
        "KV": f"{held.token / 1e3:,.4g} KB a token past every window, context {report.context:,}",
    }
    if report.tiles:
        facts["tiles"] = _tiles(max(report.tiles, key=lambda each: each.tiles))
    return facts


def _tiles(found: Tiles) -> str:
    """Useful rows and columns of one kind of attention, and how full its schedules are."""
    words = f"rows {found.rows[0]} of {found.rows[1]}, columns {found.columns[0]} of {found.columns[1]}"
    if found.tensor_memory and found.tensor_memory[0] > found.tensor_memory[1]:
        words += f", tensor memory {found.tensor_memory[0]} of {found.tensor_memory[1]}"
    fill = {each.schedule: f"{each.fill:.0%}" for each in found.schedules}
    return words + (f"; stream_k {fill['stream_k']} full, FlashDecoding {fill['flashdecoding']}" if fill else "")


def _title(report: Report, phase: str) -> str:
    seconds, share, batch = report.seconds(phase), report.share(phase), report.batch
    ridge = next(report.machine.ridge(each.fp8) for each in report.phases[phase])
    what = (f"decode: {figure(seconds * 1e3)} ms a step, {batch / seconds:,.0f} tokens/s" if phase == "decode" else
            f"prefill: {figure(seconds)} s a batch, {batch * report.context / seconds:,.0f} tokens/s")
    return f"{what}; attention {share:.0%}; ridge {ridge:.0f} FLOP/B"


def _components(parts: tuple[Component, ...]) -> Table:
    """In units in which the largest number has at most five digits before the point."""
    flops, flop = _unit("FLOP", max(part.layers * part.flops for part in parts))
    nbytes, byte = _unit("B", max(part.layers * part.bytes for part in parts))
    took, second = ("s", 1.0) if max(part.seconds for part in parts) >= 100 else ("ms", 1e-3)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for column in ("component", "layers", flops, nbytes, "FLOP/B", "bound by", took, "share"):
        table.add_column(column, justify="left" if column in ("component", "bound by") else "right", no_wrap=True)
    total = sum(part.seconds for part in parts)
    for part in parts:
        moved = (figure(part.layers * part.flops / flop), figure(part.layers * part.bytes / byte),
                 figure(part.intensity)) if part.bytes else ("", "", "")
        table.add_row(part.name, f"{part.layers}", *moved, part.limit, figure(part.seconds / second),
                      f"{part.seconds / total:.1%}")
    return table


def _unit(name: str, most: float) -> tuple[str, float]:
    return next(((prefix + name, scale) for prefix, scale in (("G", 1e9), ("T", 1e12), ("P", 1e15))
                 if most < 1e5 * scale), (f"E{name}", 1e18))


def _shapes(report: Report) -> Table:
    """The GEMMs of every attention, and the largest of linear layers, side by side where there are two phases."""
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
                column[name] = " x ".join(size(each) for each in (gemm.batch, gemm.M, gemm.N, gemm.K))
                if inside and name not in attention:
                    attention.append(name)
                elif not inside:
                    sizes[name] = max(sizes.get(name, 0.0), part.layers * gemm.flops)
        columns.append(column)
    largest = sorted(sizes, key=lambda name: -sizes[name])[:LINEARS]
    for name in [*attention, *largest]:
        table.add_row(name, *(column.get(name, "") for column in columns))
    return table

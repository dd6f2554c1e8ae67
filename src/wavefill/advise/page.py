"""The report as one HTML page: SVG inside, no script, nothing fetched; one column on a phone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from wavefill.advise import charts
from wavefill.advise.charts import Series, axis
from wavefill.advise.components import Component
from wavefill.advise.plans import Comparison, Step
from wavefill.advise.report import Report
from wavefill.advise.rules import Finding
from wavefill.advise.setups import seconds
from wavefill.advise.sources import sources
from wavefill.advise.sweeps import Point, sweep
from wavefill.advise.words import figure, gb, ms

_STYLE = """
:root { color-scheme: light dark; --line: #d5dae2; --dim: #5b6675; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 1.5rem auto; max-width: 1100px; padding: 0 1rem; }
h1 { font-size: 1.3rem; margin: 0 0 .3rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .3rem; }
h3 { font-size: 1rem; margin: .6rem 0 .2rem; } p { margin: .3rem 0; } .note { color: var(--dim); font-size: .9rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); gap: 1rem 2rem; }
svg { display: block; width: 100%; max-width: 560px; height: auto; }
svg text { fill: currentColor; } .grid { stroke: var(--line); }
.key { display: inline-block; width: .9em; height: .9em; vertical-align: -.1em; margin-right: .3em; }
.item { display: inline-block; margin-right: .8em; }
.wide { overflow-x: auto; } table { border-collapse: collapse; margin: .5rem 0; font-size: .92rem; }
td, th { padding: .2rem 1rem .2rem 0; text-align: left; vertical-align: top; }
th, td.n, td:first-child { white-space: nowrap; } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
th { border-bottom: 1px solid var(--line); } li { margin: .5rem 0; } ol { padding-left: 1.4rem; }
@media (prefers-color-scheme: dark) { :root { --line: #3a4350; --dim: #a3adba; } }
"""
#: Parts of a step that the bars distinguish.
_PARTS = ("attention", "projections", "MLP, experts", "states", "head", "fixed costs")
_LENGTHS = tuple(1 << i for i in range(10, 21, 2))


def write_html(report: Report, path: Path) -> None:
    """Write `to_html(report)` to `path`."""
    path.write_text(to_html(report), encoding="utf-8")


def to_html(report: Report) -> str:
    """Roofline, time by component over context, sweeps, plans where the report has them, findings and sources."""
    model, machine = report.model, report.machine
    title = f"{model.name} on {f'{machine.gpus} x ' if machine.gpus > 1 else ''}{machine.gpu.name}"
    held = report.memory
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{report.batch:,} request{'s' if report.batch > 1 else ''} of {report.context:,} tokens, KV in "
        f"{report.formats.kv}, weights in {report.formats.weights}. {model.parameters / 1e9:,.2f} B parameters, "
        f"{model.active / 1e9:,.2f} B of them a token. Weights take {gb(held.weights)} and a request's KV "
        f"{gb(held.request)} of {gb(held.usable)}, which leaves room for {held.requests:,}.</p>",
        *(f"<p>{_phase(report, name)}</p>" for name in report.phases),
        _findings(report.findings), _roofline(report), _bars(report), _sweeps(report),
        *([_plans(report.plans)] if report.plans else []), _components(report), _sources(report),
    ]
    if machine.gpus > 1:
        body.insert(2, '<p class="note">All but the parallel plans: work shared evenly, no communication counted.</p>')
    return (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
            f'content="width=device-width, initial-scale=1"><title>wavefill: {escape(title)}</title>'
            f"<style>{_STYLE}</style></head><body>\n" + "\n".join(body) + "\n</body></html>\n")


def _phase(report: Report, name: str) -> str:
    took, share = report.seconds(name), report.share(name)
    if name == "decode":
        return f"Decoding: <b>{ms(took)}</b> a step, attention {share:.0%} of it."
    return f"Prompts: <b>{ms(took)}</b> for all, attention {share:.0%} of it."


def _findings(findings: Sequence[Finding]) -> str:
    rows = "".join(
        f"<li><b>{escape(each.rule)}</b>: {escape(each.change)} saves {each.saved:.0%} ({_arrows(each.gain)}).<br>"
        f'<span class="note">{escape(each.seen)}; {escape(each.cost)}.</span></li>' for each in findings)
    return f"<h2>What to change</h2><ol>{rows}</ol>" if rows else "<h2>What to change</h2><p>Nothing saves 1 %.</p>"


def _arrows(words: str) -> str:
    return escape(words.replace("->", "\N{RIGHTWARDS ARROW}"))


def _roofline(report: Report) -> str:
    """Components against the roofs of their number formats, by the data sheet."""
    machine, bandwidth = report.machine, report.machine.gpus * report.machine.gpu.bandwidth
    dots = []
    for color, (phase, parts) in enumerate(report.phases.items()):
        dots.append(Series(phase, [
            (part.intensity, part.layers * part.flops / part.seconds / 1e12,
             f"{phase}, {part.name}: {figure(part.intensity)} FLOP/B, "
             f"{figure(part.layers * part.flops / part.seconds / 1e12)} TFLOP/s, bound by {part.limit}")
            for part in parts if part.bytes and part.flops], line=False, color=color))
    shown = [point for one in dots for point in one.points]
    x = axis("FLOPs a byte", [1.0, 1000.0, *(point[0] for point in shown)], True)
    roofs = []
    for fp8 in sorted({part.fp8 for parts in report.phases.values() for part in parts}):
        peak, ridge = machine.peak(fp8), machine.ridge(fp8)
        roofs.append(Series("fp8 roof" if fp8 else "16-bit roof", [
            (x.low, x.low * bandwidth / 1e12), (ridge, peak / 1e12), (x.high, peak / 1e12)], dots=False,
            color=6 if fp8 else 7, dashed=fp8))
    y = axis("TFLOP/s", [point[1] for one in (*dots, *roofs) for point in one.points], True)
    series = [*roofs, *dots]
    return ("<h2>Roofline</h2><div class=charts><div>" + charts.lines("roofline", x, y, series)
            + charts.legend([one.name for one in series], [one.color for one in series]) +
            '</div></div><p class="note">Roofs are the data sheet\'s; a dot is a component of a step, with its name in '
            "the tooltip. The table at the end has the numbers.</p>")


def _bars(report: Report) -> str:
    made = []
    names = [name for name in _PARTS if any(_part(each) == name for parts in report.phases.values() for each in parts)]
    for phase in report.phases:
        bars = []
        for length in sorted({*_LENGTHS, report.context}):
            parts = report.setup.changed(context=length).phase(phase)
            bars.append((charts.short(length), _time(seconds(parts)), [
                sum(each.seconds for each in parts if _part(each) == name) for name in names]))
        made.append(f"<div><h3>{'Decoding' if phase == 'decode' else 'Prompts'}</h3>"
                    + charts.shares(f"shares of {phase} by context", "context", bars, names) + "</div>")
    return ("<h2>Time by component over the context</h2><div class=charts>" + "".join(made) + "</div>"
            + charts.legend(names) + '<p class="note">Above a bar: a step, or all prompts of the batch.</p>')


def _part(part: Component) -> str:
    kinds = {"attention": "attention", "state": "states", "rest": "fixed costs"}
    if part.kind in kinds:
        return kinds[part.kind]
    return "head" if part.name == "head" else "projections" if part.name.startswith("proj") else "MLP, experts"


def _sweeps(report: Report) -> str:
    made = []
    for over, title, unit in (("g", "Query heads a KV head (G)", "G"), ("hsz", "Head size", "D"),
                              ("length", "Context", "tokens")):
        points = sweep(report.setup, over)
        if len(points) < 2:
            continue
        made.append(f"<div><h3>{title}</h3>{_sweep(points, unit)}</div>")
    rows = [[("* " if each.here else "") + each.value, gb(each.request), f"{figure(each.step * 1e3)}",
             f"{each.step_attention / each.step:.0%}", f"{figure(each.prompts)}"] for each in sweep(report.setup, "kv")]
    table = _table(["KV", "a request", "step, ms", "attention", "prompts, s"], rows)
    return ("<h2>Sweeps</h2><div class=charts>" + "".join(made) + f"<div><h3>KV format</h3>{table}</div></div>"
            + charts.legend(["attention of a step", "attention of prompts"]) +
            '<p class="note">Time of attention over that of the model as it is (1), everything else the same.</p>')


def _sweep(points: Sequence[Point], unit: str) -> str:
    own = next(each for each in points if each.here)
    values = [float(each.value.replace(",", "")) for each in points]
    steps = [each.step_attention / own.step_attention for each in points]
    prompts = [each.prompt_attention / own.prompt_attention for each in points]
    x = axis(unit, values, True, values if len(values) < 8 else values[::2])
    y = axis("times the model's own", [*steps, *prompts], True)
    return charts.lines(f"attention over {unit}", x, y, [
        Series("a step", list(zip(values, steps, strict=True)), color=0),
        Series("prompts", list(zip(values, prompts, strict=True)), color=1)])


def _plans(found: Comparison) -> str:
    """The Pareto front over all plans, and the two orders."""
    kinds = ("Helix", "Wide EP", None)
    series = [Series("front", [_point(step) for step in found.pareto], dots=False, color=7)]
    for color, kind in enumerate(kinds):
        steps = [step for step in found.pareto if step.plan.named == kind]
        if steps:
            series.append(Series(kind or "other plans", [_point(step) for step in steps], line=False, color=color))
    if not found.pareto:
        return "<h2>Parallel plans</h2><p>No plan has room for one request.</p>"
    x = axis("tokens/s a user", [step.per_user for step in found.pareto], False)
    y = axis("tokens/s a GPU", [step.per_gpu for step in found.pareto], False)
    if found.target <= x.high:
        line = [(found.target, 0.0), (found.target, y.high)]
        series.insert(0, Series("target", line, dots=False, color=6, dashed=True))
    head = ["attention | FFN", "batch", "GB a GPU", "KV copies", "step, ms", "exchanges, ms", "tokens/s a user",
            "tokens/s a GPU"]
    tables = "".join(
        f"<h3>{title}</h3>" + _table(head, [_row(step) for step in steps[:10]]) for title, steps in (
            (f"Most tokens/s a GPU at {found.target:g} tokens/s a user or more", found.by_throughput()),
            ("Most tokens/s a user at the batch", found.by_interactivity())))
    return ("<h2>Parallel plans for decoding</h2><div class=charts><div>" + charts.lines("Pareto front", x, y, series)
            + charts.legend([one.name for one in series], [one.color for one in series]) + "</div></div>"
            '<p class="note">Plans that no other beats in both, any batch that fits; the plan is in the tooltip. '
            f"Plans were not measured.</p>{tables}")


def _point(step: Step) -> tuple[float, float, str]:
    speed = f"{figure(step.per_user)} tokens/s a user, {figure(step.per_gpu)} a GPU"
    return (step.per_user, step.per_gpu, f"{step.plan.name}, batch {step.batch:,}: {speed}")


def _row(step: Step) -> list[str]:
    return [step.plan.name, f"{step.batch:,}", f"{(step.weights + step.kv) / 1e9:,.0f}", f"{step.copies:.3g}",
            f"{figure(step.seconds * 1e3)}", f"{figure(step.exchanging * 1e3)}", f"{figure(step.per_user)}",
            f"{figure(step.per_gpu)}"]


def _components(report: Report) -> str:
    made = []
    for phase, parts in report.phases.items():
        rows = [[part.name, f"{part.layers}", f"{figure(part.layers * part.flops / 1e12)}",
                 f"{figure(part.layers * part.bytes / 1e9)}", f"{figure(part.intensity)}", part.limit,
                 f"{figure(part.seconds * 1e3)}", f"{part.seconds / report.seconds(phase):.1%}"] for part in parts]
        made.append(f"<h2>Components, {phase}</h2>" + _table(
            ["component", "layers", "TFLOP", "GB", "FLOP/B", "bound by", "ms", "share"], rows))
    return "".join(made)


def _sources(report: Report) -> str:
    rows = [[each.what, each.value, each.kind, each.where] for each in sources(report.machine)]
    return "<h2>Where the numbers come from</h2>" + _table(["what", "value", "kind", "where"], rows, numbers=False)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: bool = True) -> str:
    def cells(tag: str, words: Sequence[str]) -> str:
        return "".join(f'<{tag}{" class=n" if numbers and i else ""}>{escape(word)}</{tag}>'
                       for i, word in enumerate(words))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<div class=wide><table><tr>{cells('th', head)}</tr>{body}</table></div>"


def _time(value: float) -> str:
    return f"{value * 1e3:,.2g} ms" if value < 0.0995 else f"{value * 1e3:,.0f} ms" if value < 0.9995 else (
        f"{value:,.2g} s" if value < 99.5 else f"{value:,.0f} s")

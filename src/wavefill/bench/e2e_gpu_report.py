"""Lines and tables of `wavefill bench e2e`."""

from __future__ import annotations

from collections.abc import Sequence

from wavefill.bench.e2e_gpu import Outcome, Request
from wavefill.bench.e2e_gpu_cases import IN_PLACE
from wavefill.bench.report import Cells


def line(outcome: Outcome) -> str:
    """An outcome in a line, for who waits for the table."""
    if outcome.absent:
        return f"{outcome.case}, {outcome.way}: {outcome.absent}"
    return (f"{outcome.case}, {outcome.way}: first token {outcome.first:.2f} s, a token {outcome.p50 * 1e3:.2f} ms "
            f"(P99 {outcome.p99 * 1e3:.2f}), {outcome.tokens_per_s:,.0f} tokens/s, {_share(outcome.roofline)} of "
            "roofline")


def table(outcomes: Sequence[Outcome]) -> tuple[list[str], Cells]:
    """Header and rows: a row for each outcome with times, empty columns left out."""
    header = ["case", "way", "TTFT", "ITL P50", "P99", "tokens/s", "GB/s", "of roofline", "stock / this",
              "TTFT: stock / this", "J/token",
              "peak memory", "attention of step", "GPU busy"]
    cells = [_cells(outcome, outcomes) for outcome in outcomes if not outcome.absent]
    used = [i for i in range(len(header)) if i < 3 or any(row[i] != "-" for row in cells)]
    return [header[i] for i in used], [[row[i] for i in used] for row in cells]


def _cells(outcome: Outcome, outcomes: Sequence[Outcome]) -> list[str]:
    profile = outcome.profile
    stock = next((o for o in outcomes if o.case == outcome.case and o.way in ("sdpa", "eager") and not o.absent), None)
    compared = stock is not None and outcome.way in (*IN_PLACE, "static", "flash")
    return [str(outcome.case), outcome.way, f"{outcome.first:.3g} s", f"{outcome.p50 * 1e3:.2f} ms",
            f"{outcome.p99 * 1e3:.2f} ms", f"{outcome.tokens_per_s:,.1f}", f"{outcome.rate / 1e9:,.0f}",
            _share(outcome.roofline), f"{stock.p50 / outcome.p50:.2f}x" if stock and compared else "-",
            f"{stock.first / outcome.first:.2f}x" if stock and compared else "-",
            "-" if outcome.joules is None else f"{outcome.joules:.3g}",
            "-" if outcome.peak is None else f"{outcome.peak / 1e9:.1f} GB",
            "-" if profile is None else _share(profile.attention / profile.step),
            "-" if profile is None else _share(profile.busy / profile.step)]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def request_table(requests: Sequence[Request]) -> tuple[list[str], Cells]:
    """A row for each request and batch, a column for each way; a * marks what was put together."""
    ways = list(dict.fromkeys(r.way for r in requests))
    by_place = {(r.prompt, r.output, r.batch, r.way): r for r in requests}
    cells: Cells = []
    for prompt, output, batch in dict.fromkeys((r.prompt, r.output, r.batch) for r in requests):
        row = [f"{prompt:,}+{output:,}", str(batch)]
        for way in ways:
            found = by_place.get((prompt, output, batch, way))
            row.append("-" if found is None else f"{found.seconds:.2f} s{'*' if found.composed else ''}")
        cells.append(row)
    return ["prompt+output", "batch", *ways], cells


def notes(outcomes: Sequence[Outcome], requests: Sequence[Request]) -> list[str]:
    """Why outcomes are missing, each reason with its cases; and what a * means."""
    found: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.absent:
            found.setdefault(f"{outcome.way}: {outcome.absent}", []).append(str(outcome.case))
    lines = [f"{why} ({'; '.join(cases)})" for why, cases in found.items()]
    lines += [note for outcome in outcomes for note in outcome.notes]
    if any(request.composed for request in requests):
        lines.append("*: the prompt and the first and last steps were measured, those between taken to grow evenly")
    return lines

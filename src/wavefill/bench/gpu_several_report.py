"""Tables and bars of a run with several query tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from wavefill.bench.bars import Bar
from wavefill.bench.gpu_report import microseconds
from wavefill.bench.gpu_several import Outcome
from wavefill.bench.gpu_several_peers import Probe
from wavefill.bench.report import Cells
from wavefill.bench.results import READ

#: A draft may take this multiple of one token's time, and must leave the best library this multiple behind.
OVER_ONE, OVER_PEERS = 1.15, 1.05
#: TFLOP/s that FlashAttention-3 is known to reach on one prompt of so many tokens, and the share of it to reach.
PROMPTS, PROMPT_SHARE = {8192: 703.0, 32768: 645.0}, 0.75
#: The least that FlashAttention-3's time over wavefill's on a chunk may be, by window.
CHUNKS: dict[int | None, float] = {None: 0.85, 4096: 1.1}
#: The most that a window's time may be, over that of as many keys in all.
OVER_FEW = 1.2


def evaluate(outcomes: Sequence[Outcome]) -> list[tuple[Outcome, Bar]]:
    """Every bar of every case; see the limits above."""
    return [(outcome, bar) for outcome in outcomes for bar in _bars(outcome, outcomes)]


def _bars(outcome: Outcome, outcomes: Sequence[Outcome]) -> Iterator[Bar]:
    def bar(name: str, value: float | None, limit: float, unit: str, *, least: bool) -> Bar:
        where = f"{outcome.case}, {outcome.q_len} tokens"
        ok = None if value is None else value >= limit if least else value <= limit
        if ok is None and "wavefill" in outcome.absent:  # without a right result it meets nothing
            ok = False
        return Bar(name, where, value, limit, unit, ok)

    if outcome.section == "drafts" and outcome.q_len > 1:
        yield bar("over one token", over_first(outcome, outcomes), OVER_ONE, "x", least=False)
        yield bar("best peer / ours", outcome.best_ratio(), OVER_PEERS, "x", least=True)
    if outcome.section == "prompts":
        own = "wavefill:own" if "wavefill:own" in outcome.times else "wavefill"
        yield bar("TFLOP/s", outcome.rate(own, "TFLOP/s"), PROMPT_SHARE * PROMPTS[outcome.q_len], "TFLOP/s",
                  least=True)
    if outcome.section == "chunks":
        yield bar("fa3 / ours", outcome.best_ratio(), CHUNKS[outcome.window], "x", least=True)
    if outcome.section == "windows" and outcome.window is not None:
        yield bar("over as many keys", over_first(outcome, outcomes), OVER_FEW, "x", least=False)


def over_first(outcome: Outcome, outcomes: Sequence[Outcome]) -> float | None:
    """wavefill's time over that of its group's first case, None for that one."""
    first = next(o for o in outcomes if (o.section, o.group) == (outcome.section, outcome.group))
    a, b = outcome.seconds("wavefill"), first.seconds("wavefill")
    return None if first is outcome or a is None or b is None else a / b


def table(outcomes: Sequence[Outcome], found: Sequence[tuple[Outcome, Bar]], unit: str) -> tuple[list[str], Cells]:
    """Header and rows of one section, empty columns left out; every time has its rate in `unit` beside it.

    found: the bars of the section's cases; the last column names those that a case misses.
    """
    others = list(dict.fromkeys(name for o in outcomes for name in (*o.times, *o.absent)
                                if name not in ("wavefill", READ)))
    header = ["case", "layout", "tokens", "window", "KV", "read floor", f"wavefill ({unit})", "of read", "over first",
              *(f"{name} ({unit})" for name in others), "best peer / ours", "error", "bars"]
    cells = [_cells(outcome, outcomes, others, unit, [bar for o, bar in found if o is outcome]) for outcome in outcomes]
    used = [i for i in range(len(header)) if any(line[i] != "-" for line in cells)]
    return [header[i] for i in used], [[line[i] for i in used] for line in cells]


def _cells(outcome: Outcome, outcomes: Sequence[Outcome], others: Sequence[str], unit: str,
           found: Sequence[Bar]) -> list[str]:
    def cell(name: str) -> str:
        taken, rate = outcome.seconds(name), outcome.rate(name, unit)
        if taken is None or rate is None:
            return "WRONG" if "wrong result" in outcome.absent.get(name, "") else "-"
        return f"{microseconds(taken)} ({rate:,.0f})"

    def ratio(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}x"

    ours, floor = outcome.seconds("wavefill"), outcome.floor
    missed = [f"{bar.name} {'not measured' if bar.value is None else 'FAIL'}" for bar in found if not bar.ok]
    return [outcome.case, outcome.layout, str(outcome.q_len), str(outcome.window or "-"),
            f"{outcome.kv_bytes / 1e6:,.1f} MB", microseconds(floor) if floor else "-", cell("wavefill"),
            f"{floor / ours:.0%}" if floor and ours else "-", ratio(over_first(outcome, outcomes)),
            *map(cell, others), ratio(outcome.best_ratio()),
            f"{outcome.errors['wavefill']:.1e}" if "wavefill" in outcome.errors else "-",
            ", ".join(missed) or ("pass" if found else "-")]


def line(outcome: Outcome) -> str:
    """A case in a line, for who waits for the table."""
    times = [f"{name} {microseconds(samples.median)}" for name, samples in outcome.times.items()]
    wrong = [f"wavefill {outcome.absent['wavefill']}"] if "wavefill" in outcome.absent else []
    return f"{outcome.case}, {outcome.layout}, {outcome.q_len} tokens: {', '.join(times + wrong) or 'none'}"


def reasons(outcomes: Sequence[Outcome]) -> list[str]:
    """Why times are missing, each with the cases that it is true of."""
    found: dict[str, list[str]] = {}
    for outcome in outcomes:
        for name, why in outcome.absent.items():
            found.setdefault(f"{name}: {why}", []).append(f"{outcome.case}, {outcome.q_len} tokens")
    return [f"{why} ({len(cases)} of {len(outcomes)} cases, first {cases[0]})" for why, cases in found.items()]


def probe_table(probes: Sequence[Probe]) -> tuple[list[str], Cells]:
    """A row a library and a column a head size: what becomes of NaN past the end in V alone, and in K and V."""
    sizes = list(dict.fromkeys(probe.D for probe in probes))
    by_place = {(probe.library, probe.holds, probe.D): probe.found for probe in probes}
    lines = list(dict.fromkeys((probe.library, probe.holds) for probe in probes))
    return ["NaN past the end", "in", *(f"D {D}" for D in sizes)], [
        [library, holds, *(by_place.get((library, holds, D), "-") for D in sizes)] for library, holds in lines]

"""What a GPU run must show: each class's geometric means, and bars that a run passes or fails, with the numbers.

The best paged peer is the fastest, row by row, of those that read the same pages. Ratios are its time over wavefill's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from wavefill.bench.results import READ, RowResult

CLASSES = ("S", "M", "L", "R")
#: Peers that read paged KV.
PAGED = ("fa3", "flashinfer", "batch_attention", "xqa")
#: The geometric mean of the best paged peer's time over wavefill's that a class must reach.
RATIOS = {"S": 1.2, "M": 1.1, "R": 1.02}
#: The most that `invariant` may take, as a multiple of auto.
INVARIANT = {"S": 1.3, "L": 1.10}
#: No row may take more than this multiple of the best paged peer's time; an R row, of an even batch's.
BEHIND, UNEVEN = 1.02, 1.05
HOST_SECONDS = 25e-6


@dataclass(frozen=True)
class Bar:
    """One requirement and how it was met.

    value, limit: of the worst row, or of the class; in `unit`.
    ok: None where nothing was measured that could tell.
    """

    name: str
    where: str
    value: float | None
    limit: float | None
    unit: str
    ok: bool | None

    def to_dict(self) -> dict[str, Any]:
        return {"bar": self.name, "where": self.where, "value": self.value, "limit": self.limit, "unit": self.unit,
                "ok": self.ok}


def seconds(result: RowResult, name: str) -> float | None:
    return result.times[name].median if name in result.times else None


def best_peer(result: RowResult, names: Iterable[str] = PAGED) -> str | None:
    """The fastest of some peers on this row, None where none of them ran."""
    ran = [name for name in names if name in result.times]
    return min(ran, key=lambda name: result.times[name].median) if ran else None


def ratio(result: RowResult, names: Iterable[str] = PAGED) -> float | None:
    """The best peer's time over wavefill's."""
    best = best_peer(result, names)
    return None if best is None else result.speedup(best)


def over(result: RowResult, name: str, base: str) -> float | None:
    """Time of `name` over that of `base`."""
    a, b = seconds(result, name), seconds(result, base)
    return None if a is None or b is None else a / b


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Of those that are there, None where there are none."""
    there = [value for value in values if value is not None]
    return math.exp(sum(map(math.log, there)) / len(there)) if there else None


def row_limit(result: RowResult) -> float | None:
    """The most seconds that a row may take, from its class and its read floor."""
    floor = seconds(result, READ)
    if floor is None:
        return None
    limits = {"S": floor + 2.5e-6, "M": max(1.12 * floor, floor + 3.5e-6), "R": 1.06 * floor,
              "L": floor * (1.10 if result.row.D == 64 else 1.05)}
    return limits[result.row.size]


def summary(results: Sequence[RowResult]) -> list[dict[str, Any]]:
    """A line a class, of geometric means; a mean is over the rows that have both its times."""
    lines = []
    for size in CLASSES:
        rows = [r for r in results if r.row.size == size]
        if rows:
            lines.append({
                "class": size, "rows": len(rows),
                "read_share": geometric_mean(r.read_share() for r in rows),
                "best_paged_ratio": geometric_mean(map(ratio, rows)),
                "fixed_over_stream_k": _mean(rows, "wavefill:fixed", "wavefill:stream_k"),
                "flashdecoding_over_stream_k": _mean(rows, "wavefill:flashdecoding", "wavefill:stream_k"),
                "invariant_over_first": _mean(rows, "wavefill:invariant", "wavefill"),
            })
    return lines


def _mean(rows: Sequence[RowResult], name: str, base: str) -> float | None:
    return geometric_mean(over(r, name, base) for r in rows)


def evaluate(results: Sequence[RowResult], host: dict[str, float] | None = None) -> list[Bar]:
    """Every bar, in the order of the classes. host: row -> seconds of host time of one call."""
    bars = []
    for size in CLASSES:
        rows = [r for r in results if r.row.size == size]
        if not rows:
            continue
        bars.append(_worst(f"{size}: each row near its read floor", rows, lambda r: seconds(r, "wavefill"), row_limit,
                           "s"))
        if size == "R":
            bars.append(_worst("R: each row near an even batch", [r for r in rows if r.row.ragged],
                               lambda r: over(r, "wavefill", "wavefill:even"), lambda r: UNEVEN, "x"))
        if size in RATIOS:
            mean = geometric_mean(map(ratio, rows))
            bars.append(Bar(f"{size}: best paged peer over wavefill, mean", f"{len(rows)} rows", mean, RATIOS[size],
                            "x", None if mean is None else mean >= RATIOS[size]))
        if size in INVARIANT:
            bars.append(_worst(f"{size}: invariant over the first schedule", rows,
                               lambda r: over(r, "wavefill:invariant", "wavefill"), lambda r: INVARIANT[r.row.size],
                               "x"))
    bars.append(_worst("no row behind the best paged peer", results, _behind, lambda r: BEHIND, "x"))
    if host:
        slowest = max(host, key=host.__getitem__)
        bars.append(Bar("host time of a call", slowest, host[slowest], HOST_SECONDS, "s",
                        host[slowest] < HOST_SECONDS))
    return bars


def _behind(result: RowResult) -> float | None:
    ahead = ratio(result)
    return None if ahead is None else 1 / ahead


def _worst(name: str, rows: Sequence[RowResult], value: Callable[[RowResult], float | None],
           limit: Callable[[RowResult], float | None], unit: str) -> Bar:
    """A bar that every row must meet, shown by the row that is furthest over, or nearest to, its limit."""
    found = [(v / most, r.row.name, v, most) for r in rows
             if (v := value(r)) is not None and (most := limit(r)) is not None]
    wrong = [r.row.name for r in rows if "wavefill" in r.absent]
    if wrong:  # a row without a right result meets nothing
        return Bar(name, wrong[0], None, None, unit, False)
    if not found:
        return Bar(name, "nothing measured", None, None, unit, None)
    share, where, worst, most = max(found)
    return Bar(name, where, worst, most, unit, share <= 1)

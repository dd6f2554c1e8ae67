"""What the schedules on a device are held to: tables of `wavefill.schedule`, and the batches that both are made for."""

from __future__ import annotations

from hypothesis import strategies as st

from wavefill import schedule as sch
from wavefill.spec import Fixed, Invariant, Schedule, StreamK

SCHEDULES: tuple[Schedule, ...] = (
    StreamK(), Fixed(), Fixed(splits=1), Fixed(splits=7), Fixed(chunk=100), Fixed(rule="flashdecoding"),
    Invariant(), Invariant(chunk=64),
)
#: No length is cut.
LIMIT = 2**31 - 1

windows = st.none() | st.integers(1, 40) | st.integers(1, 2500)


def lengths(most: int) -> st.SearchStrategy[list[int]]:
    """Up to `most` lengths, many of them short or 0."""
    return st.lists(st.integers(0, 60) | st.just(0) | st.integers(0, 2000), min_size=1, max_size=most)


def table_of(schedule: Schedule, lens: list[int], window: int | None, KH: int, workers: int, tile: int,
             opening: int = 0) -> sch.Table:
    """opening: tiles that a unit counts beyond its own; the table is that of so much longer requests."""
    starts = [0 if window is None else max(n - window, 0) for n in lens]
    stops = [n + opening * tile if n else 0 for n in lens]
    return sch.make_table(schedule, starts, stops, KH=KH, workers=workers, tile=tile, grown=True)

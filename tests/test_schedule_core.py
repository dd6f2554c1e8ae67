"""The compiled core derives its segments itself; here it is held to schedule.py."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavefill import schedule as sch
from wavefill import select
from wavefill.spec import Fixed, Invariant, StreamK

core = pytest.importorskip("wavefill.backends.cpu._core")

SCHEDULES = [
    StreamK(), Fixed(), Fixed(splits=1), Fixed(splits=7), Fixed(chunk=100), Fixed(rule="flashdecoding"),
    Invariant(), Invariant(chunk=64),
]


def from_core(plan, starts, stops, KH, workers, tile):
    columns = core.schedule(starts, stops, KH, tile, plan.kind, plan.param, workers)
    return [list(column) for column in columns]


def agree(schedule, starts, stops, KH, workers, tile):
    table = sch.make_table(schedule, starts, stops, KH=KH, workers=workers, tile=tile)
    row, head, begin, end, worker = from_core(table.plan, starts, stops, KH, workers, tile)
    assert row == table.row.tolist()
    assert head == table.head.tolist()
    assert begin == table.begin.tolist()
    assert end == table.end.tolist()
    if table.plan.kind == sch.STREAM_K:  # the others are claimed by whichever thread is free
        assert worker == table.worker.tolist()


@given(st.sampled_from(SCHEDULES),
       st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 5000)).map(sorted)
                | st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12),
       st.sampled_from([1, 2, 3, 8, 9]), st.integers(1, 200), st.sampled_from([1, 16, 63, 64, 128]))
def test_core_makes_the_same_segments(schedule, rows, KH, workers, tile):
    agree(schedule, [r[0] for r in rows], [r[1] for r in rows], KH, workers, tile)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
@pytest.mark.parametrize("length", [1_000_003, 3 * 2**31])
def test_core_makes_the_same_segments_of_long_contexts(schedule, length):
    tile = 64 if length < 2**31 else 2**16
    agree(schedule, [0, 5, 70_000], [length, 5, 131_072], 9, 264, tile)


@pytest.mark.parametrize("KH", [1, 8, 1024, 1500])
def test_core_bounds_the_pieces_of_invariant(KH):
    agree(Invariant(chunk=64), [0, 0], [500_000, 64], KH, 3, 64)


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 40)), max_size=5), st.sampled_from([1, 3, 8, 64, 100]),
       st.none() | st.integers(1, 200))
def test_core_makes_the_same_rows(batch, group, window):
    lens, queries = [n for n, _ in batch], [n for _, n in batch]
    offsets = list(itertools.accumulate(queries, initial=0))
    rows = sch.row_ranges(lens, queries, window=window, q_block=max(select.QUERY_ROWS // group, 1))
    mine = [(r, offsets[r] + a, offsets[r] + b, start, stop) for r, a, b, start, stop in zip(
        *(column.tolist() for column in (rows.request, rows.q_begin, rows.q_end, rows.start, rows.stop)), strict=True)]
    theirs = [tuple(row) for row in core.rows(lens, offsets, group, True, window or 0)]
    assert [row[:3] for row in theirs] == [row[:3] for row in mine]
    # An empty range may be written in more than one way.
    assert [row[3:] for row in theirs if row[4] > row[3]] == [row[3:] for row in mine if row[4] > row[3]]
    assert [row[4] > row[3] for row in theirs] == [row[4] > row[3] for row in mine]

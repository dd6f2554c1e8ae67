"""The compiled core derives its segments itself; here it is held to schedule.py."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavefill import schedule as sch
from wavefill.spec import Fixed, Invariant, StreamK

core = pytest.importorskip("wavefill.backends.cpu._core")

SCHEDULES = [
    StreamK(), Fixed(), Fixed(splits=1), Fixed(splits=7), Fixed(chunk=100), Fixed(rule="flashdecoding"),
    Invariant(), Invariant(chunk=64),
]


def from_core(plan, starts, stops, KH, workers, tile):
    starts, stops = np.array(starts, dtype=np.int64), np.array(stops, dtype=np.int64)
    columns = core.schedule(starts.ctypes.data, stops.ctypes.data, len(starts), KH, tile, plan.kind, plan.param,
                            workers)
    return [np.asarray(column).tolist() for column in columns]


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

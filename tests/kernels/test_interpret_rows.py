"""Rows of several query tokens on the device are those of `wavefill.schedule`, and so is how they are cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tables import LIMIT, SCHEDULES
from test_interpret_schedule import on_device, same

from wavefill import schedule as sch
from wavefill.backends.gpu import launch, rows
from wavefill.spec import Schedule, StreamK

#: Keys and query tokens of each request: none of either, more queries than keys, and the usual.
batches = st.lists(st.tuples(st.integers(0, 300) | st.just(0), st.integers(0, 20) | st.sampled_from([0, 1])),
                   max_size=9)
windows = st.none() | st.integers(1, 40) | st.just(2**31 - 1)
blocks = st.sampled_from([1, 2, 4, 16])


def expand(lens: list[int], starts: list[int], tokens: int, block: int, causal: bool, window: int | None,
           limit: int = LIMIT, chunk: int = 4, size: int = 8, gate: int | None = None) -> tuple[torch.Tensor, int]:
    """ROWS, and the entries of a plane; a worker looks at few requests at once and fills few rows."""
    R = launch.most_rows(tokens, len(lens), block)
    found = torch.full((7 * R + 3 + 8,), -77, dtype=torch.int32)
    rows.expand[(-(-R // size),)](torch.tensor(starts, dtype=torch.int32), torch.tensor(lens, dtype=torch.int32), found,
                                  torch.tensor([gate or 0], dtype=torch.int32), int(gate is not None), len(lens),
                                  R, tokens, block, int(causal), window or 0, limit, chunk, size, False)
    assert (found[7 * R + 3 :] == -77).all()
    return found, R


def ranges_of(batch: list[tuple[int, int]], block: int, causal: bool, window: int | None) -> sch.Rows:
    return sch.row_ranges([n for n, _ in batch], [m for _, m in batch], causal=causal, window=window, q_block=block)


@settings(max_examples=80)
@given(batches, blocks, st.booleans(), windows, st.integers(0, 5))
@example([(5, 9), (0, 3), (7, 0)], 2, True, 3, 0)
@example([], 1, True, None, 3)
@example([(0, 5)], 4, True, 2**31 - 1, 0)
def test_rows_are_those_of_the_schedule(batch: list[tuple[int, int]], block: int, causal: bool, window: int | None,
                                        padding: int) -> None:
    q_lens = [m for _, m in batch]
    starts = [0, *np.cumsum(q_lens, dtype=int).tolist()]
    found, R = expand([n for n, _ in batch], starts, starts[-1] + padding, block, causal, window)
    planes = found[: 7 * R].view(7, R).tolist()
    expected = ranges_of(batch, block, causal, window)
    used = len(expected)
    assert used <= R
    assert found[7 * R : 7 * R + 3].tolist() == [starts[-1], used, 0]
    empty = expected.stop <= expected.start
    request = expected.request
    shift = np.array([n - m for n, m in batch], dtype=int)[request]
    for plane, values in zip(planes, (
        np.where(empty, 0, expected.start), np.where(empty, 0, expected.stop), request,
        np.array(starts)[request] + expected.q_begin, expected.q_end - expected.q_begin, shift + expected.q_begin,
        shift,
    ), strict=True):
        assert plane == [*values.tolist(), *[0] * (R - used)]


@pytest.mark.parametrize(("starts", "tokens", "cleaned"), [
    ([0, 5, 3, 8], 8, [0, 5, 5, 8]), ([-4, 2, 2**31 - 1, 9], 6, [0, 2, 6, 6]), ([0, -3, -2, 1], 4, [0, 0, 0, 1]),
    ([2, 9, 0, 0], 4, [2, 4, 4, 4]),
])
def test_wrong_offsets_stay_within_the_query_tokens(starts: list[int], tokens: int, cleaned: list[int]) -> None:
    """They are undefined without WAVEFILL_CHECK=1, but nothing may be written past the tensors."""
    for block, chunk in ((1, 4), (2, 2), (4, 16)):
        wrong, R = expand([9, 9, 9], starts, tokens, block, True, None, chunk=chunk)
        right, _ = expand([9, 9, 9], cleaned, tokens, block, True, None)
        assert torch.equal(wrong, right)
        assert wrong[7 * R + 2] == cleaned[0]
        first, count = wrong[3 * R : 4 * R], wrong[4 * R : 5 * R]
        assert (first >= 0).all()
        assert (first + count <= tokens).all()


def test_a_gate_lets_all_rows_through_or_none() -> None:
    batch = [9, 0, 30], [1, 4, 4, 6], 8, 2, True, None
    free, R = expand(*batch)
    opened, _ = expand(*batch, gate=1)
    closed, _ = expand(*batch, gate=0)
    assert torch.equal(free, opened)
    assert free[7 * R : 7 * R + 3].tolist() == [6, 3, 1]
    assert closed[: 7 * R + 3].tolist() == [*[0] * (7 * R), 8, 0, 0]


def test_lengths_are_cut_to_what_there_is() -> None:
    wrong, _ = expand([2**31 - 1, -5, 30], [0, 3, 4, 6], 6, 2, True, 20, limit=48)
    right, _ = expand([48, 0, 30], [0, 3, 4, 6], 6, 2, True, 20, limit=48)
    assert torch.equal(wrong, right)


@given(st.lists(st.integers(0, 40), max_size=12), blocks)
def test_rows_have_room(q_lens: list[int], block: int) -> None:
    expected = len(sch.row_ranges(q_lens, q_lens, q_block=block))
    assert expected <= launch.most_rows(sum(q_lens), len(q_lens), block)


@pytest.mark.parametrize("scanned", [False, True], ids=["own scan", "scanned before"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_workers_find_the_segments_of_the_table(schedule: Schedule, scanned: bool) -> None:
    @settings(max_examples=10)
    @given(batches, blocks, st.booleans(), windows, st.sampled_from([1, 3]), st.integers(1, 9))
    @example([(300, 7), (3, 9), (0, 2), (200, 1)], 2, True, 50, 3, 7)
    def any_batch(batch: list[tuple[int, int]], block: int, causal: bool, window: int | None, KH: int,
                  workers: int) -> None:
        q_lens = [m for _, m in batch]
        starts = [0, *np.cumsum(q_lens, dtype=int).tolist()]
        found, R = expand([n for n, _ in batch], starts, starts[-1], block, causal, window)
        ranges = ranges_of(batch, block, causal, window)
        table = sch.make_table(schedule, ranges.start, np.maximum(ranges.stop, 0), KH=KH, workers=workers, tile=16,
                               grown=True)
        most = max(len(table), 1)
        same(table, on_device(schedule, found, R, most, window, KH, workers, 16, scanned, True))
        if not isinstance(schedule, StreamK):
            slots = launch.partial_slots(launch.cut_of(schedule, 16), R, KH, workers, 300 // 16 + 1)
            assert slots >= len(table)

    any_batch()

"""The schedules on the device are those of `wavefill.schedule`: segments, owners and places of partial states."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tables import LIMIT, SCHEDULES, lengths, table_of, windows

from wavefill import schedule as sch
from wavefill.backends.gpu import cursor, launch, merge
from wavefill.backends.gpu.cursor import cut_at, divide, next_segment, start, totals
from wavefill.spec import Fixed, Invariant, Schedule

tiles = st.sampled_from([16, 32, 64])


@triton.jit
def list_segments(SEQ, BEFORE, SEGMENTS, COUNTS, B, KH, window, limit, param, rule, most,
                  CHUNK: tl.constexpr, T: tl.constexpr, KIND: tl.constexpr, SCANNED: tl.constexpr,
                  SEVERAL: tl.constexpr):
    """SEGMENTS [workers, most, 5]: row, head, tiles [begin, end) and the piece's place; COUNTS [workers]."""
    worker = tl.program_id(0)
    workers = tl.num_programs(0)
    o_b = tl.arange(0, CHUNK)
    total, param = totals(SEQ, BEFORE, B, KH, workers, window, limit, param, rule, o_b, CHUNK, T, KIND, SCANNED,
                          SEVERAL)
    row, length, first, n, size, cut, head, piece, t, end, at, stop = start(
        SEQ, BEFORE, B, KH, worker, workers, total, window, limit, param, rule, o_b, CHUNK, T, KIND, SCANNED, SEVERAL)
    count = 0
    while at < stop:
        place = SEGMENTS + (worker * most + count) * 5
        tl.store(place, row)
        tl.store(place + 1, head)
        tl.store(place + 2, first + t)
        tl.store(place + 3, first + end)
        tl.store(place + 4, cut + head * cursor.pieces(n, size, KIND) + piece)
        count += 1
        at += end - t
        if at < stop:
            row, length, first, n, size, cut, head, piece, t, end = next_segment(
                SEQ, B, row, length, first, n, size, cut, head, piece, end, KH, at, stop, window, limit, param, rule,
                T, KIND, SEVERAL)
    tl.store(COUNTS + worker, count)


def on_device(schedule: Schedule, seq: torch.Tensor, B: int, most: int, window: int | None, KH: int, workers: int,
              tile: int, scanned: bool, several: bool) -> list[tuple[int, ...]]:
    """(worker, row, head, begin, end, place) of every segment, worker by worker; `most` of one worker."""
    cut = launch.cut_of(schedule, tile)
    before = torch.full((2 * B + 3,), -(2**40), dtype=torch.int64)
    segments, counts = torch.full((workers, most, 5), -7), torch.full((workers,), -7, dtype=torch.int32)
    given = window or 0, LIMIT, cut.param, cut.rule
    if scanned:
        merge.prefix[(1,)](seq, before, B, KH, workers, *given, tile, 4, cut.kind, several)
    list_segments[(workers,)](seq, before, segments, counts, B, KH, *given, most, 4, tile, cut.kind, scanned, several)
    return [(w, *segment) for w, n in enumerate(counts.tolist()) for segment in segments[w, :n].tolist()]


def agree(schedule: Schedule, lens: list[int], window: int | None, KH: int, workers: int, tile: int,
          scanned: bool) -> None:
    table = table_of(schedule, lens, window, KH, workers, tile)
    most = sum(-(-n // tile) for n in lens) * KH + 1
    same(table, on_device(schedule, torch.tensor(lens, dtype=torch.int32), len(lens), most, window, KH, workers, tile,
                          scanned, False))


def same(table: sch.Table, found: list[tuple[int, ...]]) -> None:
    columns = table.owner, table.row, table.head, table.begin, table.end
    expected = list(zip(*(column.tolist() for column in columns), strict=True))
    assert [segment[:5] for segment in found] == expected
    if table.plan.kind != sch.STREAM_K:  # its places are counted by worker
        assert [segment[5] for segment in found] == list(range(len(expected)))


@pytest.mark.parametrize("scanned", [False, True], ids=["own scan", "scanned before"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_workers_find_the_segments_of_the_table(schedule: Schedule, scanned: bool) -> None:
    @settings(max_examples=12)
    @given(lengths(12), windows, st.sampled_from([1, 2, 3, 8]), st.integers(1, 9), tiles)
    @example([0, 0, 5], None, 1, 3, 16)
    @example([0], 3, 2, 2, 16)
    @example([500, 0, 0, 0, 0, 0, 17, 0, 0, 900], 100, 2, 7, 16)
    def any_batch(lens: list[int], window: int | None, KH: int, workers: int, tile: int) -> None:
        agree(schedule, lens, window, KH, workers, tile, scanned)

    any_batch()


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
@pytest.mark.parametrize("lens", [[1], [40, 3]])
def test_more_workers_than_tiles(schedule: Schedule, lens: list[int]) -> None:
    agree(schedule, lens, None, 2, 40, 16, False)


@pytest.mark.parametrize("schedule", [Invariant(), Invariant(chunk=16)], ids=repr)
@pytest.mark.parametrize("KH", [1, 8, 1024, 1500])
def test_the_bound_of_invariant(KH: int, schedule: Schedule) -> None:
    """Few segments of many tiles: pieces grow with the length once they would be more than 1,024 for all heads."""
    lens = [40_000 if KH <= 8 else 100, 16, 70, 300, 5000 if KH <= 8 else 90]
    table = table_of(schedule, lens, None, KH, 2, 16)
    cut = launch.cut_of(schedule, 16)
    for row, n in enumerate(-(-length // 16) for length in lens):
        size = int(one(sizes, n, cut.param, cut.rule, KH)[0])
        assert min(size, n) == int(table.cost[table.row == row].max())


@pytest.mark.parametrize("workers", [1, 7, 132, 264])
@pytest.mark.parametrize("rule", [None, "flashdecoding"])
def test_split_counts_of_large_batches(workers: int, rule: str | None) -> None:
    schedule = Fixed() if rule is None else Fixed(rule="flashdecoding")
    cut = launch.cut_of(schedule, 64)
    for rows, longest, KH in [(1, 1, 1), (1, 4, 8), (1, 5, 8), (1, 2048, 8), (4, 65_536, 8), (3, 77, 5), (64, 128, 8),
                              (100_000, 3, 8), (1, 65_536, 1)]:
        lens = [longest * 64] * rows
        expected = sch.resolve(schedule, [0] * rows, lens, KH, workers, 64).param
        found = one(split_count, rows, longest, KH, workers, cut.param, cut.rule)[0]
        assert found == expected, (rows, longest, KH)


@triton.jit
def sizes(OUT, n, param, rule, KH):
    tl.store(OUT, cursor.piece_size(n, param, rule, KH, cursor.CHUNKS))


@triton.jit
def split_count(OUT, rows, longest, KH, workers, param, rule):
    tl.store(OUT, cursor.splits(rows, longest, KH, workers, param, rule))


@triton.jit
def cuts_and_owners(OUT, at, total, worker, workers):
    per, rest = divide(total, workers)
    tl.store(OUT, per)
    tl.store(OUT + 1, rest)
    tl.store(OUT + 2, cut_at(worker, workers, per, rest))
    tl.store(OUT + 3, merge.owner(at, total, workers))


def one(kernel, *args: int) -> list[int]:
    """What a kernel of one program stored; 64-bit arguments where one is past 32 bits."""
    out = torch.full((4,), -7)
    kernel[(1,)](out, *args)
    return out.tolist()


@given(st.integers(1, 2**42) | st.integers(2**31 - 3, 2**31 + 3), st.integers(1, 2**15), st.data())
@settings(max_examples=150)
@example(2**31 - 1, 2**15, None)
@example(2**42, 2**15, None)
def test_cuts_and_owners_of_many_tiles(total: int, workers: int, data: st.DataObject | None) -> None:
    at = total - 1 if data is None else data.draw(st.integers(0, total - 1))
    worker = workers if data is None else data.draw(st.integers(0, workers))
    per, rest, cut, owner = one(tiles_in_64_bits, at >> 32, at & 0xffffffff, total >> 32, total & 0xffffffff, worker,
                                workers)
    assert (per, rest) == divmod(total, workers)
    assert cut == worker * total // workers
    assert owner * total // workers <= at < (owner + 1) * total // workers


@triton.jit
def tiles_in_64_bits(OUT, at_high, at_low, total_high, total_low, worker, workers):
    """`cuts_and_owners` of two numbers of tiles that come in halves, since an argument has 32 bits where it fits."""
    at = (tl.cast(at_high, tl.int64) << 32) + tl.cast(at_low, tl.int64)
    total = (tl.cast(total_high, tl.int64) << 32) + tl.cast(total_low, tl.int64)
    cuts_and_owners(OUT, at, total, worker, workers)


def test_constants_are_those_of_the_schedules() -> None:
    assert cursor.ITEMS_PER_WORKER.value == sch.FIXED_ITEMS_PER_WORKER
    assert cursor.MAX_PIECES.value == sch.INVARIANT_MAX_PIECES
    assert cursor.GROWN_LEAST.value == sch.GROWN_LEAST
    assert cursor.GROWN_QUARTER.value == sch.GROWN_QUARTER
    assert cursor.GROWN_PIECES.value == sch.GROWN_PIECES
    assert cursor.GROWN_MOST.value == sch.GROWN_MOST
    assert cursor.MAX_SPLITS.value == sch.FLASHDECODING_MAX_SPLITS
    for name in ("STREAM_K", "SPLITS", "CHUNKS", "GIVEN", "ITEMS", "FLASHDECODING", "BOUNDED"):
        assert getattr(cursor, name).value == getattr(launch, name)


@given(lengths(12), st.sampled_from([1, 2, 3, 8]), st.integers(1, 200), tiles, st.sampled_from(SCHEDULES))
def test_partial_states_have_room(lens: list[int], KH: int, workers: int, tile: int, schedule: Schedule) -> None:
    table = table_of(schedule, lens, None, KH, workers, tile)
    slots = launch.partial_slots(launch.cut_of(schedule, tile), len(lens), KH, workers, -(-max(lens) // tile))
    assert slots >= (2 * workers if table.plan.kind == sch.STREAM_K else len(table))


@pytest.mark.parametrize("KH", [1, 2, 3, 8, 56, 64, 128, 1500])
def test_partial_states_of_pieces_that_grow_have_room(KH: int) -> None:
    """The buffer is made for the longest row, and pieces grow in steps: a shorter row may have as many."""
    tiles = np.arange(1, 40_000)
    pieces = -(-tiles // sch.invariant_chunk_tiles(tiles, KH, 0))
    cut = launch.cut_of(Invariant(), 16)
    assert all(launch.partial_slots(cut, 1, KH, 132, int(n)) >= most * KH
               for n, most in zip(tiles, np.maximum.accumulate(pieces), strict=True))

"""Properties of tiles and schedules."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counting import calls_of
from wavefill import schedule as sch
from wavefill.spec import Fixed, InvalidArgument, InvalidType, Invariant, StreamK

SCHEDULES = [
    StreamK(), Fixed(), Fixed(splits=1), Fixed(splits=5), Fixed(chunk=100), Fixed(rule="flashdecoding"),
    Invariant(), Invariant(chunk=1), Invariant(chunk=300),
]
ranges = st.lists(
    st.tuples(st.integers(0, 3000), st.integers(0, 3000)).map(lambda p: (min(p), max(p)))
    | st.tuples(st.integers(0, 50), st.integers(0, 50)),
    max_size=9,
)
heads = st.sampled_from([1, 2, 3, 8, 9])
workers = st.integers(1, 300)
tiles = st.sampled_from([1, 16, 63, 64, 128])
schedules = st.sampled_from(SCHEDULES)


def make(schedule, rows, KH, W, T):
    starts, stops = [r[0] for r in rows], [r[1] for r in rows]
    return sch.make_table(schedule, starts, stops, KH=KH, workers=W, tile=T)


def tiles_of(rows, T):
    return [math.ceil(b / T) - a // T if b > a else 0 for a, b in rows]


@given(schedules, ranges, heads, workers, tiles)
def test_every_tile_once_and_in_order(schedule, rows, KH, W, T):
    table = make(schedule, rows, KH, W, T)
    walked = [(int(r), int(h), t)
              for r, h, a, b in zip(table.row, table.head, table.begin, table.end, strict=True)
              for t in range(a, b)]
    expected = [(r, h, t) for r, (a, b) in enumerate(rows) if b > a for h in range(KH)
                for t in range(a // T, math.ceil(b / T))]
    assert walked == expected
    assert (table.end > table.begin).all()
    assert table.tiles == len(expected)
    assert table.num_rows == len(rows)


@given(schedules, ranges, heads, workers, tiles)
def test_a_gpu_worker_owns_the_segments_that_begin_in_its_tiles(schedule, rows, KH, W, T):
    table = make(schedule, rows, KH, W, T)
    N, before = table.tiles, 0
    for owner, cost in zip(table.owner.tolist(), table.cost.tolist(), strict=True):
        assert owner * N // W <= before < (owner + 1) * N // W
        before += cost
    if table.kind == "stream_k":
        assert table.owner.tolist() == table.worker.tolist()


@given(schedules, ranges, heads, workers, tiles)
def test_workers_and_timeline(schedule, rows, KH, W, T):
    line = sch.Timeline(make(schedule, rows, KH, W, T))
    table = line.table
    assert ((table.worker >= 0) & (table.worker < W)).all()
    finish = 0
    for w in set(table.worker.tolist()):
        clock = 0
        for segment, t0, t1 in line.of_worker(w):  # a worker is never idle before its last segment
            assert t0 == clock
            assert t1 - t0 == table.end[segment] - table.begin[segment]
            clock = t1
        assert line.busy[w] == clock
        finish = max(finish, clock)
    assert line.makespan == finish
    assert line.busy.sum() == table.tiles
    assert line.fill == (table.tiles / (W * finish) if finish else 0)
    assert line.makespan >= math.ceil(table.tiles / W)


@given(ranges, heads, workers, tiles)
def test_stream_k_workers_differ_by_at_most_one_tile(rows, KH, W, T):
    line = sch.Timeline(make(StreamK(), rows, KH, W, T))
    N = KH * sum(tiles_of(rows, T))
    assert line.busy.tolist() == [(w + 1) * N // W - w * N // W for w in range(W)]
    assert line.busy.max() - line.busy.min() <= 1
    assert (np.diff(line.worker) >= 0).all()
    assert line.waves == (N > 0)
    # At most one cut a worker besides the ends of heads, so that few states need a merge.
    assert len(line.table) <= sum(n > 0 for n in tiles_of(rows, T)) * KH + W - 1


@given(st.sampled_from([Fixed(), Fixed(splits=3), Fixed(chunk=64), Invariant(chunk=64)]), ranges, heads,
       st.integers(1, 20), tiles)
def test_dynamic_workers_claim_the_next_segment_when_free(schedule, rows, KH, W, T):
    table = make(schedule, rows, KH, W, T)
    free = [0] * W
    for cost, worker, t0 in zip(table.cost.tolist(), table.worker.tolist(), table.t0.tolist(), strict=True):
        assert worker == free.index(min(free))
        assert t0 == free[worker]
        free[worker] += cost


@given(ranges, heads, workers, tiles, st.sampled_from([1, 64, 300, 2048]), st.data())
def test_invariant_depends_on_the_request_alone(rows, KH, W, T, chunk, data):
    table = make(Invariant(chunk=chunk), rows, KH, W, T)
    for r, row in enumerate(rows):
        alone = make(Invariant(chunk=chunk), [row], KH, data.draw(workers), T)
        mine = table.row == r
        for name in ("head", "begin", "end"):
            assert getattr(table, name)[mine].tolist() == getattr(alone, name).tolist()
        assert len(alone) <= max(1024, KH)


@pytest.mark.parametrize("KH", [1, 3, 8, 9, 128])
@pytest.mark.parametrize("length", [1, 2048, 2049, 131_072, 10_000_000])
def test_invariant_workspace_is_bounded(KH, length):
    table = make(Invariant(), [(0, length)], KH, 264, 64)
    assert len(table) <= 1024
    if KH * math.ceil(length / 2048) <= 1024:
        assert len(table) == KH * math.ceil(length / 2048)


@given(st.integers(1, 40), st.integers(1, 60_000), heads, workers, tiles)
def test_fixed_items_are_four_to_eight_times_the_workers_where_the_context_allows(B, length, KH, W, T):
    table = make(Fixed(), [(0, length)] * B, KH, W, T)
    n = math.ceil(length / T)
    if B * KH >= 4 * W:
        assert len(table) == B * KH
    elif B * KH * n >= 4 * W:
        assert 4 * W <= len(table) < 8 * W
    else:
        assert len(table) == B * KH * n


@given(st.integers(1, 12), st.integers(1, 40), st.integers(0, 5000), tiles)
def test_fixed_splits_are_equal_and_start_at_the_rows_first_tile(S, KH, start, T):
    rows = [(start, start + 4000), (start, start + 1)]
    table = make(Fixed(splits=S), rows, KH, 7, T)
    first, n = start // T, tiles_of(rows, T)[0]
    mine = (table.row == 0) & (table.head == KH - 1)
    pieces = [(first + s * n // S, first + (s + 1) * n // S) for s in range(S)]
    assert list(zip(table.begin[mine], table.end[mine], strict=True)) == [p for p in pieces if p[1] > p[0]]


def test_fixed_chunk_is_rounded_up_to_tiles():
    table = make(Fixed(chunk=100), [(130, 700)], 1, 4, 64)
    assert table.begin.tolist() == [2, 4, 6, 8, 10]
    assert table.end.tolist() == [4, 6, 8, 10, 11]


def heuristic_as_published(units, workers, blocks):
    """The rule of FlashAttention's split heuristic, written from its description with exact fractions."""
    if Fraction(units) >= Fraction(8, 10) * workers:
        return 1
    if blocks <= 4:
        return 1
    most = min(128, workers, blocks)

    def efficiency(splits):
        waves = Fraction(units * splits, workers)
        return waves / math.ceil(waves)

    best = max(efficiency(s) for s in range(1, most + 1))
    return next(s for s in range(1, most + 1) if efficiency(s) >= Fraction(85, 100) * best)


@settings(max_examples=300)
@given(st.integers(1, 400), st.integers(1, 600), st.integers(1, 400))
def test_flashdecoding_rule(units, blocks, W):
    assert sch.flashdecoding_splits(units, blocks, W) == heuristic_as_published(units, W, blocks)


def test_flashdecoding_takes_the_longest_row_and_skips_empty_ones():
    rows = [(0, 64 * 40), (0, 64), (5, 5)]
    table = make(Fixed(rule="flashdecoding"), rows, 2, 108, 64)
    splits = heuristic_as_published(4, 108, 40)
    assert table.plan == (sch.FIXED_SPLITS, splits)
    assert len(table) == 2 * splits + 2


def test_resolve_gives_the_same_plan_for_lists_arrays_and_many_rows():
    few, many = [100, 5000, 0], [100, 5000, 0] * 40
    for schedule in SCHEDULES:
        plan = sch.resolve(schedule, [0] * 3, few, 8, 100, 64)
        assert plan == sch.resolve(schedule, np.zeros(3, int), np.array(few), 8, 100, 64)
    assert sch.resolve(Fixed(), [0] * 120, many, 1, 160, 64) == (sch.FIXED_SPLITS, 8)
    assert sch.resolve(Fixed(), np.zeros(120, int), np.array(many), 1, 10_000, 64) == (sch.FIXED_SPLITS, 79)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
@pytest.mark.parametrize("rows", [[], [(0, 0)], [(7, 7), (9, 3)]], ids=["batch-0", "one-empty", "two-empty"])
def test_no_work(schedule, rows):
    line = sch.Timeline(make(schedule, rows, 4, 3, 64))
    assert len(line.table) == 0
    assert (line.makespan, line.waves, line.fill) == (0, 0, 0.0)
    assert line.busy.tolist() == [0, 0, 0]


def test_more_splits_than_tiles_leaves_no_empty_piece():
    table = make(Fixed(splits=32), [(0, 5)], 2, 8, 1)
    assert len(table) == 10
    assert (table.cost == 1).all()


def test_partial_marks_what_must_be_merged():
    table = make(Fixed(splits=2), [(0, 64), (0, 128), (3, 3)], 2, 8, 64)
    assert table.partial.tolist() == [False, False, True, True, True, True]
    assert not make(StreamK(), [(0, 640)] * 3, 2, 6, 64).partial.any()


def test_last_wave_is_filled():
    """17 requests x 8 heads on 132 workers: fixed runs a second wave for 4 items, stream_k does not."""
    rows = [(0, 8192)] * 17
    whole = sch.Timeline(make(Fixed(rule="flashdecoding"), rows, 8, 132, 64))
    lean = sch.Timeline(make(StreamK(), rows, 8, 132, 64))
    assert (whole.waves, whole.makespan) == (2, 256)
    assert whole.fill == pytest.approx(136 / 264)
    assert (lean.waves, lean.makespan) == (1, 132)
    assert lean.fill > 0.99


# ------------------------------------------------------------------------------------------------- row ranges


def keys_of_query(L, n, i, causal, window):
    pos = L - n + i
    return {j for j in range(L)
            if (not causal or j <= pos) and (window is None or pos - window < j <= pos)}


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=4), st.booleans(),
       st.none() | st.integers(1, 50), st.integers(1, 5))
def test_row_ranges_are_the_union_of_the_queries_ranges(batch, causal, window, q_block):
    lens, queries = [b[0] for b in batch], [b[1] for b in batch]
    rows = sch.row_ranges(lens, queries, causal=causal, window=window, q_block=q_block)
    seen = []
    for r, a, b, start, stop in zip(rows.request, rows.q_begin, rows.q_end, rows.start, rows.stop, strict=True):
        assert b - a <= q_block
        seen += [(int(r), i) for i in range(a, b)]
        union = set().union(*(keys_of_query(lens[r], queries[r], i, causal, window) for i in range(a, b)))
        assert set(range(start, stop)) == union
        assert 0 <= start <= stop <= lens[r]
    assert seen == [(r, i) for r, n in enumerate(queries) for i in range(n)]


def test_row_ranges_of_plain_decode():
    rows = sch.row_ranges([5, 0, 9], window=4)
    assert len(rows) == 3
    assert rows.start.tolist() == [1, 0, 5]
    assert rows.stop.tolist() == [5, 0, 9]


def test_window_work_does_not_grow_with_context():
    """A windowed layer must not be scheduled as if the whole cache counted."""
    counts = []
    for length in (1024, 32 * 1024, 1024 * 1024):
        rows = sch.row_ranges([length], window=512)
        counts.append(sch.make_table(StreamK(), rows.start, rows.stop, KH=8, workers=16, tile=64).tiles)
    assert counts == [64, 64, 64]


# ------------------------------------------------------------------------------------------------------- speed


@pytest.mark.parametrize("schedule", [StreamK(), Fixed(), Fixed(splits=2), Fixed(chunk=8192),
                                      Fixed(rule="flashdecoding"), Invariant()], ids=repr)
def test_making_a_table_takes_the_same_steps_for_any_number_of_requests(schedule):
    """All that depends on the requests happens within NumPy; `wavefill bench overhead` times 100,000 of them."""
    def steps(B):
        starts, stops = np.zeros(B, dtype=np.int64), np.random.default_rng(0).integers(0, 4096, B)
        tables = []
        calls = calls_of(lambda: tables.append(sch.make_table(schedule, starts, stops, KH=8, workers=264, tile=64)))
        assert tables[0].tiles == 8 * int(-(-stops // 64).sum())
        return calls

    assert steps(100_000) == steps(1000) < 300


# ------------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(("change", "error", "words"), [
    ({"workers": 0}, InvalidArgument, "workers: must be at least 1; got 0"),
    ({"tile": 0}, InvalidArgument, "tile: must be at least 1"),
    ({"KH": -1}, InvalidArgument, "KH: must be at least 1"),
    ({"workers": 1.5}, InvalidType, "workers: must be an int"),
    ({"stops": [-1]}, InvalidArgument, "stops: must not be negative; got -1"),
    ({"stops": [1, 2]}, InvalidArgument, "stops: must have one entry a row (1); got 2"),
    ({"stops": [1.0]}, InvalidType, "stops: must hold integers; got float64"),
    ({"stops": [[1]]}, InvalidArgument, "stops: must have one dimension"),
    ({"stops": [2**63 - 1]}, InvalidArgument, "stops: must be at most 68719476736; got 9223372036854775807"),
    ({"starts": [10**30]}, InvalidArgument, "starts: must be at most 68719476736"),
    ({"KH": 2**40}, InvalidArgument, "schedule: can be described with at most 16,777,216 segments"),
    ({"KH": 2**60}, InvalidArgument, "schedule: can be described with at most 4,398,046,511,104 tiles"),
    ({"KH": 10**30}, InvalidArgument, "KH: must be at most 9223372036854775807"),
    ({"workers": 2**20 + 1}, InvalidArgument, "workers: must be at most 1048576; got 1048577"),
    ({"tile": 2**16 + 1}, InvalidArgument, "tile: must be at most 65536"),
    ({"tile": True}, InvalidType, "tile: must be an int; got True"),
    ({"stops": [2**36], "tile": 1, "schedule": Fixed(splits=2**63 - 1)}, InvalidArgument,
     "schedule: can be described with at most 16,777,216 segments; got 68,719,476,736"),
    ({"schedule": "stream_k"}, InvalidType, "schedule: must be a Fixed, StreamK or Invariant; got str"),
])
def test_bad_arguments_are_named(change, error, words):
    kwargs = {"schedule": StreamK(), "starts": [0], "stops": [10], "KH": 1, "workers": 1, "tile": 64} | change
    with pytest.raises(error) as caught:
        sch.make_table(**kwargs)
    assert words in str(caught.value)


@pytest.mark.parametrize(("kwargs", "words"), [
    ({"seq_lens": [-3]}, "seq_lens: must not be negative; got -3"),
    ({"seq_lens": [3], "q_lens": [1, 1]}, "q_lens: must have one entry a request (1); got 2"),
    ({"seq_lens": [3], "window": 0}, "window: must be at least 1; got 0"),
    ({"seq_lens": [3], "q_block": 0}, "q_block: must be at least 1; got 0"),
])
def test_bad_row_ranges_are_named(kwargs, words):
    with pytest.raises(InvalidArgument) as caught:
        sch.row_ranges(**kwargs)
    assert words in str(caught.value)

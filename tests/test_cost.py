"""Bytes and FLOPs, counted by hand for small calls."""

from __future__ import annotations

import pytest

from wavefill import cost
from wavefill.schedule import make_table, row_ranges
from wavefill.spec import AttentionSpec, Fixed, InvalidArgument, StreamK


def problem(seq_lens, q_lens=None, *, schedule=None, window=None, workers=2, **shape):
    spec = AttentionSpec(**{"HQ": 8, "KH": 2, "D": 16, "DV": 8, "dtype": "bfloat16"} | shape, window=window)
    rows = row_ranges(seq_lens, q_lens, window=window, q_block=4)
    table = make_table(schedule or StreamK(), rows.start, rows.stop, KH=spec.KH, workers=workers, tile=16)
    return spec, rows, table


def test_bytes_of_plain_decode():
    spec, rows, table = problem([100, 0, 30])
    moved = cost.traffic(spec, rows, table)
    assert moved.kv == 130 * 2 * (16 + 8) * 2
    assert moved.query == 3 * 8 * 16 * 2
    assert moved.output == 3 * 8 * 8 * 2
    assert moved.total == moved.read + moved.written
    assert moved.least == moved.kv + moved.query + moved.output


def test_a_latent_cache_is_read_once():
    """MLA as DeepSeek has it: 512 of the 576 columns of K are V."""
    shape = {"HQ": 128, "KH": 1, "D": 576, "DV": 512}
    apart, shared = (cost.traffic(*problem([100], latent=latent, **shape)) for latent in (False, True))
    assert (apart.kv, shared.kv) == (100 * (576 + 512) * 2, 100 * 576 * 2)
    assert (apart.query, apart.output) == (shared.query, shared.output)
    with pytest.raises(InvalidArgument, match=r"DV: must be at most D \(512\) in a latent cache.*; got 576"):
        problem([100], latent=True, **shape | {"D": 512, "DV": 576})


def test_partial_states_are_written_and_read_once():
    # 2 heads x 7 tiles in 3 splits each: 6 states of 4 query heads, 8 outputs and a log-sum-exp, float32.
    spec, rows, table = problem([100], schedule=Fixed(splits=3))
    moved = cost.traffic(spec, rows, table)
    assert moved.partials == 6 * 4 * 9 * 4
    assert moved.total == moved.least + 2 * moved.partials
    spec, rows, table = problem([100], schedule=Fixed(splits=1))
    assert cost.traffic(spec, rows, table).partials == 0


def test_a_window_bounds_the_bytes():
    sizes = {n: cost.traffic(*problem([n], window=50)).kv for n in (1_000, 100_000)}
    assert sizes == {1_000: 50 * 96, 100_000: 50 * 96}


def test_each_block_of_queries_reads_its_own_keys():
    spec, rows, table = problem([10], [6])  # blocks of 4 and 2 queries, which see 8 and 10 keys
    assert cost.traffic(spec, rows, table).kv == (8 + 10) * 96
    assert cost.flops(spec, rows) == 2 * (4 * 8 + 2 * 10) * 8 * (16 + 8)


def test_float32_doubles_kv_but_not_the_states():
    half = cost.traffic(*problem([100], schedule=Fixed(splits=3)))
    full = cost.traffic(*problem([100], schedule=Fixed(splits=3), dtype="float32"))
    assert full.least == 2 * half.least
    assert full.partials == half.partials


def test_flops_of_one_token():
    spec, rows, _ = problem([100])
    assert cost.flops(spec, rows) == 2 * 100 * 8 * (16 + 8)


def test_floor_is_the_read_floor_of_the_suite():
    """llama8b-b1-64k on an H200: the KV alone is 58.7 us at 4.575 TB/s."""
    spec = AttentionSpec(HQ=32, KH=8, D=128, DV=128)
    rows = row_ranges([65536])
    table = make_table(StreamK(), rows.start, rows.stop, KH=8, workers=264, tile=32)
    assert cost.floor_us(cost.traffic(spec, rows, table).kv, 4.575e12) == pytest.approx(58.67, abs=0.01)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), 1e-320])
def test_a_bandwidth_must_be_positive(value):
    with pytest.raises(InvalidArgument, match="read_bandwidth: must be at least 1, and finite"):
        cost.floor_us(1, value)

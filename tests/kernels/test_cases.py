"""Rows of the case list marked G that Triton's interpreter can show; those that need a GPU's own are in tests/gpu."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from running import CUTS, ON_GPU, SCHEDULES, TILE, call, check, run

from helpers import make_case, name_of, same_bits
from helpers import run as run_on_cpu
from wavefill.backends.gpu import launch
from wavefill.spec import MAX_LENGTH, Fixed, Invariant, Schedule, StreamK

cuts = pytest.mark.parametrize("schedule", CUTS, ids=repr)
schedules = pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
halves = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=name_of)


# -- A: size limits


@cuts
def test_a8_a_length_past_its_row_of_the_table(schedule: Schedule) -> None:
    """A dummy length at graph capture overran the row. Here it is cut; the next row is another request's."""
    case = make_case([32, 5], D=16, page_size=16, capacity=32)
    out, lse = run(replace(case, seq_lens=torch.tensor([2**31 - 1, 5], dtype=torch.int32)), schedule)
    case.expected.check(out, lse)


# -- B: empty, masked, NaN


@halves
@schedules
def test_b7_rows_of_length_zero(schedule: Schedule, dtype: torch.dtype) -> None:
    """Padding of a graph gave NaN or what was there before."""
    out, lse = check(make_case([0, 17, 0, 1], D=16, dtype=dtype, page_size=16, capacity=64), schedule)
    assert (out[[0, 2]] == 0).all()
    assert (lse[[0, 2]] == -math.inf).all()


@cuts
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize(("lens", "page_size"), [([1, 3], None), ([13], 4), ([13, 2], 16)])
def test_b8_b9_slots_past_the_length(schedule: Schedule, poison: float, lens: list[int], page_size: int | None) -> None:
    """A weight of zero times a NaN: the tail of a page or a buffer leaked into the output."""
    made = [make_case(lens, D=64, dtype=torch.float16, page_size=page_size, capacity=20, poison=held)
            for held in (poison, 0.0)]
    (out, lse), (zero_out, zero_lse) = (check(case, schedule) for case in made)
    assert same_bits(out, zero_out)
    assert same_bits(lse, zero_lse)


@schedules
@pytest.mark.parametrize("lens", [[256, 257, 258, 259], [1024, 1027]])
def test_b10_pages_before_the_window(schedule: Schedule, lens: list[int]) -> None:
    """Reused pages with NaN poisoned a window. Here they are not even looked up: their ids are no pages."""
    case = make_case(lens, HQ=1, KH=1, D=16, page_size=16, window=128)
    expected = case.expected
    table = case.block_table.clone()
    for b, n in enumerate(lens):
        table[b, : (n - 128) // 16] = 2**31 - 1
    case.k_cache.nan_to_num_(math.nan)
    out, lse = run(replace(case, block_table=table), schedule)
    expected.check(out, lse)


@cuts
@pytest.mark.parametrize("length", [1, 15, 17, 31, 40])
def test_b11_padding_lanes_with_equal_scores(schedule: Schedule, length: int) -> None:
    """With q = 0 all weights are equal, so lanes past the length would show in full."""
    case = make_case([length], HQ=2, KH=1, D=16, page_size=16)
    case.q.zero_()
    out, lse = check(case, schedule)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(length)))
    assert out.abs().max() > 0


@halves
@cuts
@pytest.mark.parametrize("hidden", [range(16), range(16, 32), range(40), [39]], ids=str)
def test_b11_scores_of_minus_infinity(schedule: Schedule, dtype: torch.dtype, hidden: Any) -> None:
    """Keys that a query must not see, by their values: a whole tile of them made inf - inf, and NaN of the rest."""
    case = make_case([40], HQ=2, KH=1, D=16, dtype=dtype)
    case.q.abs_().add_(0.1)
    case.k_cache[0, list(hidden)] = -math.inf
    on_cpu, cpu_lse = run_on_cpu(case)
    out, lse = run(case, schedule)
    torch.testing.assert_close(out, on_cpu, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse, cpu_lse, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("length", [1, 2, 3, 5])
@pytest.mark.parametrize("splits", [4, 32])
@pytest.mark.parametrize("window", [None, 3])
def test_b12_b13_more_splits_than_tiles(length: int, splits: int, window: int | None) -> None:
    """Splits without a key gave NaN, infinities or 0 / 0."""
    check(make_case([length], HQ=6, KH=2, D=16, page_size=16, window=window), Fixed(splits=splits))


@schedules
def test_b14_a_window_that_leaves_one_live_split(schedule: Schedule) -> None:
    """An idle split overwrote the LSE of the only one with keys."""
    check(make_case([200, 199], HQ=2, KH=1, D=16, page_size=16, window=9), schedule, workers=8)


@schedules
@pytest.mark.parametrize("lens", [[0], [0, 0, 0], [0] * 40])
def test_b15_nothing_to_split(schedule: Schedule, lens: list[int]) -> None:
    """The rule for splits divided by a count of zero."""
    check(make_case(lens, HQ=2, KH=1, D=16, page_size=16, capacity=64), schedule, workers=5)


@schedules
@pytest.mark.parametrize("lens", [[0, 0, 40], [40, 0, 0], [0, 0, 0, 18, 0]])
def test_b16_b19_rows_that_no_worker_visits(schedule: Schedule, lens: list[int]) -> None:
    """A persistent kernel left them as they were; the outputs of `run` are NaN before."""
    check(make_case(lens, HQ=2, KH=1, D=16, page_size=16), schedule, workers=2)


@schedules
def test_b17_a_row_without_keys_is_the_same_on_every_backend(schedule: Schedule) -> None:
    case = make_case([0, 3], D=16, page_size=16)
    on_cpu, here = run_on_cpu(case), run(case, schedule)
    assert same_bits(on_cpu[0][0], here[0][0])
    assert same_bits(on_cpu[1][0], here[1][0])


@pytest.mark.parametrize("schedule", [StreamK(), Invariant(chunk=64)], ids=repr)
def test_b21_a_band_of_lengths_for_one_group_size(schedule: Schedule) -> None:
    """Lengths 241 to 255 were all NaN with 16 query heads a KV head, 240 and 256 fine."""
    lens = [240, 241, 247, 248, 255, 256]
    check(make_case(lens, HQ=16, KH=1, D=8, dtype=torch.float16, page_size=16), schedule, workers=2)


# -- C: the LSE


@pytest.mark.parametrize("scale", [0.088, 1.0, 2.5])
@pytest.mark.parametrize("splits", [1, 4])
def test_c7_the_scale_counts_once_in_the_lse(scale: float, splits: int) -> None:
    """Applied twice it shrank whatever was merged."""
    check(make_case([70, 9], D=16, page_size=16, scale=scale), Fixed(splits=splits))


# -- D: splits


@schedules
def test_d2_only_the_output_is_written(schedule: Schedule) -> None:
    """The combine wrote past the output. Rows, heads and columns of others lie between those of this call."""
    case = make_case([70, 0, 33], HQ=4, D=16, page_size=16)
    out, lse = torch.full((5, 6, 24), 77.0), torch.full((5, 6), 77.0)
    call(case, schedule, out[1:4, 1:5, 4:20], lse[1:4, 1:5])
    case.expected.check(out[1:4, 1:5, 4:20], lse[1:4, 1:5])
    assert (out == 77).sum() == out.numel() - 3 * 4 * 16
    assert (lse == 77).sum() == lse.numel() - 3 * 4


@pytest.mark.parametrize("splits", [1, 2, 3, 5, 16, 32, 64, 127, 128, 129])
def test_d3_any_number_of_splits(splits: int) -> None:
    """16 and 32 splits were far from one; 129 tiles and a few tokens here."""
    check(make_case([129 * TILE + 5], HQ=2, KH=1, D=8, page_size=16), Fixed(splits=splits), workers=2)


@schedules
def test_d5_a_tiny_shape(schedule: Schedule) -> None:
    """Illegal access in the tail of a split."""
    check(make_case([257], HQ=1, KH=1, D=32), schedule)


@schedules
def test_d6_e5_capacity_does_not_show_in_the_bits(schedule: Schedule) -> None:
    """Splits were chosen by the width of the table."""
    results = [run(make_case([300, 7], HQ=2, KH=1, D=16, page_size=16, capacity=n), schedule) for n in (304, 5000)]
    assert same_bits(results[0][0], results[1][0])
    assert same_bits(results[0][1], results[1][1])


@cuts
def test_d8_every_length(schedule: Schedule) -> None:
    """A handful of lengths was wrong, which tests of every 71st missed."""
    check(make_case(list(range(52, 118)), HQ=1, KH=1, D=8, page_size=16), schedule, workers=7)


# -- E and F: grids and buffers


@schedules
def test_e3_workers_without_work(schedule: Schedule) -> None:
    """The grid was padded, and the extra CTAs walked entries that nobody had written."""
    check(make_case([20, 9], HQ=16, KH=2, D=8, page_size=16), schedule, workers=50)


@schedules
@pytest.mark.parametrize("lens", [[200, 0, 33], [5] * 9])
def test_f1_f2_the_buffer_is_large_enough_and_may_be_dirty(
    schedule: Schedule, lens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers of a fixed size overflowed, and what an earlier call had left in them was read."""
    case = make_case(lens, D=16, page_size=16)
    expected, empty, buffers = case.expected, torch.empty, []

    def dirty(size: int, dtype: torch.dtype, **kwargs: Any) -> torch.Tensor:
        if size == 0 or not dtype.is_floating_point:  # not the call's: of the test, and counters on a GPU
            return empty(size, dtype=dtype, **kwargs)
        kwargs["dtype"] = dtype
        buffers.append(empty(size + 64, **kwargs).fill_(math.nan))
        buffers[-1][size:] = 77
        return buffers[-1][:size]

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", dirty)
        patched.setattr(torch, "full", lambda *args, **kwargs: torch.ones(*args[:1], **kwargs) * args[1])
        out, lse = run(case, schedule, workers=7)
    expected.check(out, lse)
    assert buffers
    assert all((buffer[-64:] == 77).all() for buffer in buffers)


@pytest.mark.parametrize("tokens", [8_192, 1_000_000, MAX_LENGTH])
def test_m4_the_buffer_of_invariant_is_bounded(tokens: int) -> None:
    """Deterministic mode's buffers grew with the context until the server ran out of memory."""
    assert launch.partial_slots(launch.cut_of(Invariant(), 64), 1, 8, 132, -(-tokens // 64)) <= 1024


# -- H: tables and layouts


@pytest.mark.skipif(sys.platform == "win32" or ON_GPU, reason="needs mmap and mprotect, and tensors there")
@pytest.mark.parametrize(("arguments", "last", "dies"), [([], "all in bounds\n", False),
                                                         (["overrun"], "4 entries read\n", True)])
def test_h4_nothing_outside_the_tensors_is_read(arguments: list[str], last: str, dies: bool) -> None:
    """A tile read the table past its end. Every tensor ends, or starts, where memory that may not be touched begins."""
    script = Path(__file__).with_name("fenced_calls.py")
    done = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=300)
    assert (done.returncode < 0) == dies, f"exit {done.returncode} after: {done.stdout[-300:]} {done.stderr[-2000:]}"
    assert done.stdout.endswith(last), done.stderr[-2000:]


@schedules
@pytest.mark.parametrize("table_pad", [-1, 7, 2**31 - 1, -(2**31)])
def test_h5_ids_that_are_no_pages_in_slots_without_tokens(schedule: Schedule, table_pad: int) -> None:
    """7 is the number of pages: one too many."""
    case = make_case([33, 0, 16], D=16, page_size=16, spare_pages=3, capacity=128, table_pad=table_pad)
    assert case.k_cache.shape[0] == 7
    check(case, schedule)


@cuts
def test_h6_pages_longer_than_a_tile(schedule: Schedule) -> None:
    check(make_case([600, 256, 257], HQ=4, KH=1, D=32, dtype=torch.float16, page_size=256), schedule)


@cuts
@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
@pytest.mark.parametrize("length", [40, 140])
def test_h7_two_head_sizes_and_pages_that_are_no_tile(schedule: Schedule, page_size: int, length: int) -> None:
    check(make_case([length], HQ=2, KH=1, D=192, DV=128, dtype=torch.float16, page_size=page_size), schedule)


@cuts
def test_h11_only_v_is_transposed(schedule: Schedule) -> None:
    check(make_case([62], HQ=4, KH=4, D=32, layout="v_hnd"), schedule)


@cuts
def test_h13_lengths_near_multiples_of_32(schedule: Schedule) -> None:
    check(make_case([*range(26, 33), 63, 64, 95, 96], HQ=1, KH=1, D=8), schedule)


# -- I: group and head sizes


@pytest.mark.parametrize(("HQ", "KH"), [(28, 4), (24, 4), (40, 8), (64, 4), (64, 1), (96, 8), (9, 3), (12, 2)])
def test_i1_i2_any_group(HQ: int, KH: int) -> None:
    """Groups of 5, 6, 7, 16 and 64 were refused, and 6 was once wrong."""
    check(make_case([40, 3], HQ=HQ, KH=KH, D=8, page_size=16), StreamK())


@halves
@cuts
@pytest.mark.parametrize("D", [16, 32, 48, 80, 96, 112, 120, 192])
def test_i4_i5_head_sizes_that_are_no_power_of_two_or_small(schedule: Schedule, D: int, dtype: torch.dtype) -> None:
    """They did not compile, or a loop over pieces of the head ran zero times and nothing was written."""
    check(make_case([37, 3], HQ=2, KH=1, D=D, dtype=dtype, page_size=16), schedule)


@cuts
def test_i6_two_head_sizes_and_a_group_of_five(schedule: Schedule) -> None:
    check(make_case([37, 3], HQ=5, KH=1, D=192, DV=128, page_size=16), schedule)


# -- M: batch invariance


@pytest.mark.parametrize("HQ", [2, 6])
def test_m3_rows_do_not_move_when_another_row_shrinks(HQ: int) -> None:
    """The number of splits came from a sum over the batch."""
    longer, shorter = (make_case([first, 100, 12, 50], HQ=HQ, KH=2, D=16, page_size=16) for first in (90, 80))
    # Row 1 to 3 of the second batch hold what they held in the first.
    q = torch.cat([shorter.q[:1], longer.q[1:]])
    table = longer.block_table
    (out, lse), (out_2, lse_2) = (run(case, Invariant(chunk=32)) for case in (
        longer, replace(longer, q=q, seq_lens=shorter.seq_lens, block_table=table)))
    assert same_bits(out[1:], out_2[1:])
    assert same_bits(lse[1:], lse_2[1:])

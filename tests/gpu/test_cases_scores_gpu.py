"""Rows of the case list about drafts, options and splits, as users call, on a GPU: on Hopper with its own kernels.

B10, C4, sections D, K and L where they concern a GPU, N5 and N6. tests/kernels has them in Triton's interpreter.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_several_gpu import on_gpu, run
from torch import Tensor

import wavefill
from helpers import Case, make_case, same_bits
from sharding import rank_of
from wavefill import Fixed, InvalidArgument, Invariant, StreamK
from wavefill.backends import gpu
from wavefill.backends.gpu import launch, many
from wavefill.backends.gpu.kernels import Variant

#: What Hopper's kernels serve, and what the portable one does; the matrix of options compiles the same.
SHAPES: dict[str, dict[str, Any]] = {
    "16-bit": {"HQ": 6, "KH": 2, "D": 64, "dtype": torch.bfloat16, "page_size": 16},
    "float32": {"HQ": 6, "KH": 2, "D": 24, "DV": 16, "page_size": 16},
}
SCHEDULES = ("auto", Fixed(splits=3), Invariant(chunk=128))
shapes = pytest.mark.parametrize("shape", list(SHAPES.values()), ids=list(SHAPES))
schedules = pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
#: 77 where nothing may be written.
GUARD = 128


def guarded(*shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A tensor of NaN on the GPU, and the larger one around it."""
    size = math.prod(shape)
    around = torch.full((size + 2 * GUARD,), 77.0, dtype=dtype, device="cuda")
    return around[GUARD:GUARD + size].fill_(math.nan).view(shape), around


def untouched(around: Tensor) -> bool:
    return bool((around[:GUARD] == 77).all() & (around[-GUARD:] == 77).all())


def check(case: Case, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) on the CPU, held to the reference and to the bands round the output."""
    there = on_gpu(case)
    if case.cu_seqlens_q is not None:
        kwargs = {"max_q_len": int(case.cu_seqlens_q.diff().max()), **kwargs}
    out, around = guarded(*case.out_shape, dtype=case.q.dtype)
    result = tuple(side.cpu() for side in run(there, out, **kwargs))
    assert untouched(around)
    case.expected.check(*result)
    return result  # type: ignore[return-value]


def planned(case: Case, **kwargs: Any) -> launch.Call:
    """`check`, and what the backend planned for it."""
    gpu._calls.clear()
    check(case, **kwargs)
    call, = gpu._calls.values()
    return call


def slot(case: Case, position: int) -> tuple[int, int]:
    """Where the first request's key of a position lies."""
    assert case.block_table is not None
    return int(case.block_table[0, position // 16]), position % 16


# -- B: what lies before a window


@shapes
@schedules
@pytest.mark.parametrize("lens", [[2048], [256, 257, 258, 259, 1024, 1025, 1027]], ids=str)
@pytest.mark.parametrize("n", [None, 4, 40])
def test_b10_pages_before_the_window(shape: dict[str, Any], schedule: object, lens: list[int], n: int | None) -> None:
    """They hold NaN, and their ids in the table lead out of the cache: nobody looks."""
    case = make_case(lens, q_lens=None if n is None else [n] * len(lens), window=128, **shape)
    expected = case.expected
    assert case.block_table is not None
    assert case.v_cache is not None
    for b, length in enumerate(lens):
        unseen = (length - (n or 1) - 128 + 1) // 16
        pages = case.block_table[b, :unseen].long()
        case.k_cache[pages], case.v_cache[pages] = math.nan, math.nan
        case.block_table[b, :unseen] = 2**31 - 1
    out, lse = run(on_gpu(case), schedule=schedule, **({} if n is None else {"max_q_len": n}))
    expected.check(out.cpu(), lse.cpu())


# -- C: keys that are shared out over GPUs


@shapes
@pytest.mark.parametrize("interleave", [1, 16])
def test_c4_drafts_over_keys_that_are_shared_out_over_ranks(shape: dict[str, Any], interleave: int) -> None:
    """A row of its own for each query token, as long as what the rank has before it, and merged by their LSE."""
    whole = make_case([700, 33, 150], q_lens=[4, 4, 40], sinks=True, **shape)
    states = [run(on_gpu(rank_of(whole, rank, 3, interleave))) for rank in range(3)]
    out, lse = wavefill.merge_states(*(torch.stack(side).cpu() for side in zip(*states, strict=True)))
    eps = torch.finfo(out.dtype).eps
    torch.testing.assert_close(out.double(), whole.expected.out, rtol=4 * eps, atol=4 * eps)
    torch.testing.assert_close(lse.double(), whole.expected.lse, rtol=0, atol=1e-5)


# -- D: splits


@shapes
@schedules
def test_d2_only_the_outputs_are_written(shape: dict[str, Any], schedule: Any) -> None:
    case = make_case([700, 90], q_lens=[7, 2], **{**shape, "page_size": None})
    there = on_gpu(case)
    out, around = guarded(*case.out_shape, dtype=case.q.dtype)
    lse, around_lse = guarded(*case.out_shape[:2], dtype=torch.float32)
    assert there.v_cache is not None
    gpu.attention(there.q, there.k_cache, there.v_cache, there.seq_lens, None, there.cu_seqlens_q, out, lse,
                  scale=case.q.shape[2] ** -0.5, causal=True, window=None, max_q_len=7,
                  schedule=StreamK() if schedule == "auto" else schedule)
    case.expected.check(out.cpu(), lse.cpu())
    assert untouched(around)
    assert untouched(around_lse)


@pytest.mark.parametrize("n", [None, 4])
def test_d3_any_number_of_splits(n: int | None) -> None:
    case = make_case([4096], q_lens=None if n is None else [n], HQ=16, KH=8, D=128, dtype=torch.bfloat16, page_size=16)
    for splits in (1, 2, 3, 5, 16, 32, 64, 127, 128, 129):
        check(case, schedule=Fixed(splits=splits))


@shapes
def test_d4_tokens_that_this_call_is_about_are_counted_once(shape: dict[str, Any]) -> None:
    check(make_case([256 + 196], q_lens=[196], **shape), schedule=Fixed(splits=2))


@schedules
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_d5_a_tiny_shape(schedule: object, dtype: torch.dtype) -> None:
    for q_lens in (None, [1], [2]):
        check(make_case([257], q_lens=q_lens, HQ=1, KH=1, D=32, dtype=dtype), schedule=schedule)


@shapes
@pytest.mark.parametrize("schedule", SCHEDULES[1:], ids=str)
@pytest.mark.parametrize("n", [None, 4])
def test_d6_capacity_does_not_show_in_the_bits(shape: dict[str, Any], schedule: object, n: int | None) -> None:
    results = [check(make_case([4096, 70], q_lens=None if n is None else [n, n], capacity=capacity, **shape),
                     schedule=schedule) for capacity in (4096, 40_960)]
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


@shapes
def test_d7_splits_that_were_asked_for_are_made(shape: dict[str, Any]) -> None:
    case = make_case([3000], q_lens=[3], causal=False, **shape)
    whole, parts = (check(case, schedule=Fixed(splits=n)) for n in (1, 8))
    assert not all(same_bits(a, b) for a, b in zip(whole, parts, strict=True))


@shapes
def test_d8_every_length(shape: dict[str, Any]) -> None:
    """Up to 1,100 keys, two query tokens each; tests of every 71st length missed a handful."""
    check(make_case(range(1100), q_lens=[2] * 1100, **{**shape, "HQ": 8, "KH": 1}))


# -- K: windows, sinks, ALiBi and masks


@shapes
@schedules
@pytest.mark.parametrize("q_lens", [None, [1, 1], [5, 3], [100, 3]], ids=str)
def test_k3_sinks_on_every_path(shape: dict[str, Any], schedule: object, q_lens: list[int] | None) -> None:
    case = make_case([600, 200], q_lens=q_lens, sinks=6.0, **shape)
    out, _ = check(case, schedule=schedule)
    without, _ = check(replace(case, sinks=None), schedule=schedule)
    assert (out.float() - without.float()).abs().amax(-1).min() > 1e-3  # in every row and head


@shapes
@pytest.mark.parametrize("n", [None, 3])
def test_k4_sinks_count_once_whatever_the_split(shape: dict[str, Any], n: int | None) -> None:
    case = make_case([1500], q_lens=None if n is None else [n], sinks=2.0, **shape)
    for splits in (1, 2, 3, 7, 20):
        check(case, schedule=Fixed(splits=splits))


@shapes
@schedules
@pytest.mark.parametrize("q_lens", [None, [4], [40]], ids=str)
def test_k5_the_oldest_key_of_a_window(shape: dict[str, Any], schedule: object, q_lens: list[int] | None) -> None:
    """The last query of 5,000 sees keys 904 to 4,999 of a window of 4,096. Scores are equal, and V tells keys apart."""
    for length, window in ((5000, 4096), (300, 300), (300, 299), (300, 301)):
        case = make_case([length], q_lens=q_lens, window=window, **shape)
        assert case.v_cache is not None
        case.q.zero_()
        case.v_cache.mul_(0)
        oldest = max(length - window, 0)
        case.v_cache[slot(case, oldest)] = window / 4
        if oldest:
            case.v_cache[slot(case, oldest - 1)] = -window
        _, lse = check(case, schedule=schedule)
        torch.testing.assert_close(lse[-1], torch.full((6,), math.log(min(length, window))), rtol=0, atol=1e-5)


@shapes
@schedules
def test_k7_k8_each_request_has_the_window_of_its_own_queries(shape: dict[str, Any], schedule: object) -> None:
    """One query token forgot it; short requests saw nothing, because theirs began where the longest request's did."""
    for q_lens in (None, [1, 1], [2, 3], [10, 300]):
        check(make_case([10, 2000], q_lens=q_lens, window=64, **shape), schedule=schedule)


@shapes
@schedules
@pytest.mark.parametrize("q_lens", [None, [1], [30], [200]], ids=str)
def test_k11_alibi_over_a_cache(shape: dict[str, Any], schedule: object, q_lens: list[int] | None) -> None:
    check(make_case([300], q_lens=q_lens, alibi_slopes=True, **shape), schedule=schedule)


@pytest.mark.parametrize(("rows", "words", "most"), [(9, 1, 10), (20, 1, 10), (10, 0, 10), (10, 1, 33)])
def test_k13_masks_of_other_shapes_are_refused(rows: int, words: int, most: int) -> None:
    """They were read past their end."""
    case = on_gpu(make_case([20], q_lens=[10], **SHAPES["16-bit"]))
    mask = torch.zeros(rows, words, dtype=torch.int32, device="cuda")
    with pytest.raises(InvalidArgument, match=r"^mask: "):
        run(replace(case, mask=mask), max_q_len=most)


@shapes
@schedules
@pytest.mark.parametrize("sizes", [[3, 5, 7], [33, 65, 31]], ids=str)
def test_k14_masks_whose_bits_are_no_whole_bytes(shape: dict[str, Any], schedule: object, sizes: list[int]) -> None:
    for lens in ([21, 35, 13], [300, 65, 700]):
        if all(n <= length for n, length in zip(sizes, lens, strict=True)):
            check(make_case(lens, q_lens=sizes, mask=True, **shape), schedule=schedule)


# -- L: several query tokens


@shapes
@schedules
@pytest.mark.parametrize("n", [1, 2])
def test_l1_queries_are_the_last_keys(shape: dict[str, Any], schedule: object, n: int) -> None:
    check(make_case([300], q_lens=[n], **shape), schedule=schedule)


@shapes
@schedules
def test_l3_more_query_tokens_than_rows_of_the_table(shape: dict[str, Any], schedule: object) -> None:
    """768 query rows and 256 rows of the table, which ends where its memory does."""
    check(make_case([9] * 256, q_lens=[3] * 256, spare_pages=0, **shape), schedule=schedule)


# -- N: what made calls slow, by what is launched


@shapes
@pytest.mark.parametrize("n", [2, 4, 8])
def test_n5_drafts_take_the_split_path(shape: dict[str, Any], n: int) -> None:
    """Nearly every SM reads; drafts left this path, and two programs read all of these 7,400 keys."""
    call = planned(make_case([7400], q_lens=[n], **shape))
    assert call.attention_grid[0] >= 0.8 * launch.sm_count(0)
    kind = (dict(call.attention.constants)["KIND"] if isinstance(call.attention, Variant)
            else call.attention.build.kind)
    assert kind == launch.cut_of(StreamK(), 64).kind  # as in decode
    assert isinstance(call.attention, many.Launch) == (gpu.is_hopper(0) and shape["D"] == 64)


@shapes
@pytest.mark.parametrize("n", [None, 4])
def test_n6_what_is_planned_is_the_same_before_and_after_the_cache_grows(shape: dict[str, Any], n: int | None) -> None:
    """A windowed call of 32K keys has no more programs or kernels than one of 1,000; b10 shows that none is read."""
    short, long = (planned(make_case([length], q_lens=None if n is None else [n], window=128, **shape))
                   for length in (1024, 32_768))
    assert (short.attention_grid, short.prefix, short.merge) == (long.attention_grid, long.prefix, long.merge)

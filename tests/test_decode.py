"""Decode on the CPU: every length, group size, head size, page size and layout against the float64 reference."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from helpers import (
    DTYPES,
    LAYOUTS,
    SCHEDULES,
    Case,
    Expected,
    check,
    check_each_isa,
    cpu_isas,
    make_case,
    name_of,
    run,
    torch_threads,
    using_isa,
)
from wavefill import Fixed, Invariant, StreamK, decode_attention
from wavefill.backends import cpu
from wavefill.spec import parse_schedule

LENGTHS = range(1101)
PAGE_SIZES = (None, 1, 3, 16, 64, 256)
#: Lengths round the CPU's tile of 64 tokens.
EDGES = [1, 2, 63, 64, 65, 127, 128, 129, 0, 333]


@lru_cache(maxsize=1)
def all_lengths(dtype: torch.dtype, page_size: int | None) -> Case:
    return make_case(LENGTHS, HQ=2, KH=1, D=16, dtype=dtype, page_size=page_size)


@lru_cache(maxsize=3)
def all_lengths_expected(dtype: torch.dtype) -> Expected:
    # The numbers do not depend on where they lie, so one reference serves every page size.
    return make_case(LENGTHS, HQ=2, KH=1, D=16, dtype=dtype).expected


def one_by_one(case: Case, call: Callable[[Case], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Every request as a call of its own; one thread, since waking another costs more than these take."""
    with torch_threads(1):
        results = [call(case.request(b)) for b in range(len(case.seq_lens))]
    return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])


SWEEP = list(itertools.product(DTYPES, PAGE_SIZES, SCHEDULES))
SWEEP_IDS = [f"{name_of(d)}-{'contiguous' if p is None else f'page{p}'}-{s}" for d, p, s in SWEEP]


@pytest.mark.parametrize(("dtype", "page_size", "schedule"), SWEEP, ids=SWEEP_IDS)
def test_every_length(dtype: torch.dtype, page_size: int | None, schedule: str) -> None:
    """0 to 1,100 keys, in one batch and in a call each."""
    case = all_lengths(dtype, page_size)
    all_lengths_expected(dtype).check(*run(case, schedule=schedule))
    all_lengths_expected(dtype).check(*one_by_one(case, lambda one: run(one, schedule=schedule)))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_every_length_shared_by_three_workers(dtype: torch.dtype, schedule: str) -> None:
    """Cuts at other places than one worker has, so that every length is also merged."""
    options = parse_schedule(schedule if schedule != "invariant" else Invariant(chunk=64))

    def call(one: Case) -> tuple[Tensor, Tensor]:
        out, lse = torch.full(one.out_shape, math.nan, dtype=dtype), torch.full(one.out_shape[:2], math.nan)
        cpu.attention(*one.tensors(), None, out, lse, scale=0.25, causal=True, window=None, schedule=options,
                      threads=1, workers=3)
        return out, lse

    all_lengths_expected(dtype).check(*one_by_one(all_lengths(dtype, 16), call))


@pytest.mark.parametrize("isa", cpu_isas())
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_every_length_with_each_instruction_set(isa: str, dtype: torch.dtype) -> None:
    with using_isa(isa):
        all_lengths_expected(dtype).check(*run(all_lengths(dtype, 16), schedule="stream_k"))


HEADS = [(G * KH, KH) for G in (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128) for KH in (1, 2)]
HEADS += [(9, 3), (28, 4), (24, 4), (40, 8), (64, 4), (96, 8), (63, 9), (130, 1)]


@pytest.mark.parametrize(("HQ", "KH"), HEADS, ids=[f"HQ{a}_KH{b}" for a, b in HEADS])
def test_group_sizes(HQ: int, KH: int) -> None:
    for dtype, schedule in zip(DTYPES, SCHEDULES, strict=True):
        check_each_isa(make_case(EDGES, HQ=HQ, KH=KH, D=24, dtype=dtype, page_size=16), schedule=schedule)


DIMS = [(D, D) for D in (1, 2, 7, 8, 16, 17, 32, 48, 60, 64, 80, 96, 112, 120, 128, 192, 256, 512, 576)]
DIMS += [(192, 128), (128, 64), (64, 128), (96, 192), (576, 512), (24, 1), (1, 24), (40, 33)]


@pytest.mark.parametrize(("D", "DV"), DIMS, ids=[f"D{a}_DV{b}" for a, b in DIMS])
def test_head_sizes(D: int, DV: int) -> None:
    for dtype, layout in itertools.product(DTYPES, ("nhd", "kv_tokens")):
        case = make_case([1, 64, 65, 130], HQ=5, KH=1, D=D, DV=DV, dtype=dtype, page_size=3, layout=layout)
        check_each_isa(case, schedule="stream_k")


@pytest.mark.parametrize(("D", "DV"), [(576, 512), (40, 33), (64, 64)], ids=["D576_DV512", "D40_DV33", "D64_DV64"])
@pytest.mark.parametrize("G", [1, 16, 128])
def test_latent_cache(D: int, DV: int, G: int) -> None:
    """V is the first columns of K, which are read as they lie."""
    for dtype, page_size in zip(DTYPES, (None, 16, 64), strict=True):
        case = make_case([0, 1, 100], HQ=G, KH=1, D=D, DV=DV, dtype=dtype, page_size=page_size, latent=True)
        check_each_isa(case, schedule="fixed")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", PAGE_SIZES, ids=lambda p: "contiguous" if p is None else f"page{p}")
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_layouts(layout: str, page_size: int | None, dtype: torch.dtype) -> None:
    case = make_case(EDGES, HQ=6, KH=3, D=20, DV=12, dtype=dtype, page_size=page_size, layout=layout, capacity=400)
    check(case, schedule=SCHEDULES[(LAYOUTS.index(layout) + PAGE_SIZES.index(page_size)) % 3])


@pytest.mark.parametrize(
    "schedule",
    [
        *(Fixed(splits=s) for s in (1, 2, 3, 5, 16, 32, 64, 127, 128, 129)),
        *(Fixed(chunk=c) for c in (1, 64, 65, 512, 10_000)),
        Fixed(rule="flashdecoding"),
        *(StreamK(tile=t) for t in (1, 7, 16, 64, 100, 256, 5000)),
        *(Invariant(chunk=c) for c in (1, 64, 100, 4096)),
        "auto",
    ],
    ids=str,
)
@pytest.mark.parametrize("threads", [1, 2, 7])
def test_schedules_and_workers(schedule: object, threads: int) -> None:
    case = ragged()
    with torch_threads(threads):
        out, lse = run(case, schedule=schedule)
    case.expected.check(out, lse)


@lru_cache(maxsize=1)
def ragged() -> Case:
    return make_case([0, 700, 1, 64, 2500, 0, 65], HQ=4, KH=2, D=32, dtype=torch.bfloat16, page_size=16)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("size", [1e-3, 30.0])
def test_flat_and_peaked_weights(dtype: torch.dtype, size: float) -> None:
    """Scores all but equal, and scores so far apart that one key has all the weight."""
    case = make_case([1, 65, 1000], HQ=4, KH=2, D=64, dtype=dtype)
    check(dataclasses.replace(case, q=case.q * size), schedule="stream_k")


@pytest.mark.parametrize("where", [0, 63, 64, 500, 998, 999])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_needle_is_found_wherever_it_lies(where: int, schedule: str) -> None:
    """One key takes all the weight, so a lost or repeated tile changes everything."""
    case = make_case([1000], HQ=4, KH=2, D=32, page_size=16, dtype=torch.bfloat16)
    q = torch.ones_like(case.q)
    page, slot = int(case.block_table[0, where // 16]), where % 16
    case.k_cache[page, slot] = 20.0
    out, lse = run(dataclasses.replace(case, q=q), schedule=schedule)
    needle = case.v_cache[page, slot].repeat_interleave(2, dim=0)
    torch.testing.assert_close(out[0], needle, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse[0], torch.full((4,), 20.0 * 32 / math.sqrt(32)))


def test_queries_may_be_a_view_of_a_larger_buffer() -> None:
    case = make_case([5, 70], HQ=4, KH=2, D=32)
    buffer = torch.full((2, 3, 4, 40), math.nan)
    buffer[:, 1, :, 4:36] = case.q
    check(dataclasses.replace(case, q=buffer[:, 1, :, 4:36]), schedule="stream_k")


@pytest.mark.parametrize("size", [1e3, 1e9, 3e9, 1e12, 1e30])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("splits", [1, 3])
def test_the_largest_score_counts_fully_however_large_it_is(size: float, sign: int, splits: int) -> None:
    """Float32 scores of 1e9 are 64 apart at best: whatever their rounding, one key is the largest and weighs 1."""
    torch.manual_seed(0)
    q, v = torch.ones(1, 3, 1), torch.randn(1, 70, 1, 4)
    k = (torch.arange(70.0) / 70 + 0.5).view(1, 70, 1, 1) * sign
    for scale in (0.7, 0.72, 0.73, 1.0, 1.37):
        for isa in cpu_isas():
            with using_isa(isa):
                out, lse = decode_attention(
                    q * size, k, v, torch.tensor([70], dtype=torch.int32), scale=scale, return_lse=True,
                    schedule=Fixed(splits=splits))
            top = 69 if sign > 0 else 0
            exact = float(k[0, top].double()) * size * scale
            torch.testing.assert_close(lse, torch.full((1, 3), exact), rtol=1e-5, atol=10)
            if size > 1e5:
                torch.testing.assert_close(out, v[:, top].expand(1, 3, 4))
            assert bool(out.isfinite().all())

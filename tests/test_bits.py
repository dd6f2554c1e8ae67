"""Which bits may change: none from call to call, and with `invariant` none from the rest of the batch either."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

import wavefill
from helpers import DTYPES, SCHEDULES, Case, cpu_isas, make_case, name_of, run, same_bits, torch_threads, using_isa
from wavefill import Fixed, Invariant, StreamK
from wavefill.backends import cpu

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
#: Small pieces, so that short requests are split and merged too; and the default.
INVARIANT = [Invariant(chunk=64), Invariant(chunk=128), "invariant"]
invariants = pytest.mark.parametrize("schedule", INVARIANT, ids=["chunk64", "chunk128", "default"])
HEADS = pytest.mark.parametrize(("HQ", "KH"), [(3, 3), (10, 2)], ids=["mha", "gqa5"])


def same(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    return same_bits(a[0], b[0]) and same_bits(a[1], b[1])


def tokens(result: tuple[Tensor, Tensor], part: slice) -> tuple[Tensor, Tensor]:
    return result[0][part], result[1][part]


@pytest.mark.parametrize(
    "schedule", ["auto", *SCHEDULES, Fixed(splits=7), StreamK(tile=16), Invariant(chunk=64)], ids=str
)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_call_repeats_its_bits(schedule: object, threads: int) -> None:
    """Who finishes first differs from call to call; the order of the merge does not."""
    for dtype in DTYPES:
        case = make_case([500, 3, 1200, 0, 64], HQ=4, KH=2, D=32, dtype=dtype, page_size=16)
        with torch_threads(threads):
            first = run(case, schedule=schedule)
            assert all(same(first, run(case, schedule=schedule)) for _ in range(8))


@dtypes
@invariants
@HEADS
def test_invariant_alone_and_in_a_batch(dtype: torch.dtype, schedule: object, HQ: int, KH: int) -> None:
    case = make_case([5000, 900, 64, 1, 0, 300, 2049], HQ=HQ, KH=KH, D=16, dtype=dtype, page_size=16)
    batch = run(case, schedule=schedule)
    for b in range(len(case.seq_lens)):
        assert same(run(case.request(b), schedule=schedule), tokens(batch, slice(b, b + 1)))
    backwards = torch.arange(len(case.seq_lens) - 1, -1, -1)
    turned = dataclasses.replace(case, q=case.q[backwards], seq_lens=case.seq_lens[backwards],
                                 block_table=case.block_table[backwards])
    assert same(run(turned, schedule=schedule), (batch[0][backwards], batch[1][backwards]))


@dtypes
@invariants
@HEADS
def test_m3_invariant_when_another_request_changes_its_length(
    dtype: torch.dtype, schedule: object, HQ: int, KH: int
) -> None:
    case = make_case([900, 1000, 120, 500], HQ=HQ, KH=KH, D=32, dtype=dtype, page_size=16)
    before = run(case, schedule=schedule)
    for length in (800, 1, 0, 899):
        lens = torch.tensor([length, 1000, 120, 500], dtype=torch.int32)
        after = run(dataclasses.replace(case, seq_lens=lens), schedule=schedule)
        assert same(tokens(before, slice(1, 4)), tokens(after, slice(1, 4)))


@dtypes
@invariants
@pytest.mark.parametrize("page_size", [None, 16])
def test_d6_invariant_whatever_the_capacity(dtype: torch.dtype, schedule: object, page_size: int | None) -> None:
    """The same keys in a cache of 700, 2,048 and 40,000 slots, and in other pages."""
    results = [
        run(make_case([700, 130], HQ=4, KH=2, D=16, dtype=dtype, page_size=page_size, capacity=capacity,
                      spare_pages=spare), schedule=schedule)
        for capacity, spare in ((700, 0), (2048, 5), (40_000, 77))
    ]
    assert same(results[0], results[1])
    assert same(results[0], results[2])


@dtypes
@invariants
def test_e5_invariant_whatever_the_hints(dtype: torch.dtype, schedule: object) -> None:
    case = make_case([700, 130], q_lens=[2, 3], HQ=4, KH=2, D=16, dtype=dtype, page_size=16)
    plain = run(case, schedule=schedule)
    for most, most_q in ((700, 3), (4096, 64), (131_072, 1000)):
        hinted = wavefill.attention(*case.tensors(), cu_seqlens_q=case.cu_seqlens_q, max_seq_len=most,
                                    max_q_len=most_q, schedule=schedule, return_lse=True)
        assert same(plain, hinted)


@dtypes
@invariants
@pytest.mark.parametrize("q_lens", [None, [2, 0, 40, 1]], ids=["decode", "drafts"])
def test_invariant_whatever_the_number_of_workers(
    dtype: torch.dtype, schedule: object, q_lens: list[int] | None
) -> None:
    case = make_case([2500, 64, 700, 1], q_lens=q_lens, HQ=4, KH=2, D=16, dtype=dtype, page_size=16)
    first = run(case, schedule=schedule)
    for threads in (1, 2, 3, 7):
        with torch_threads(threads):
            assert same(first, run(case, schedule=schedule))
    chosen = schedule if isinstance(schedule, Invariant) else Invariant()
    for workers in (1, 2, 132, 1000):
        out, lse = torch.empty_like(first[0]), torch.empty_like(first[1])
        cpu.attention(*case.tensors(), case.cu_seqlens_q, out, lse, scale=0.25, causal=True, window=None,
                      schedule=chosen, threads=2, workers=workers)
        assert same(first, (out, lse))


@dtypes
@invariants
@pytest.mark.parametrize("window", [None, 50])
def test_invariant_with_several_queries_alone_and_in_a_batch(
    dtype: torch.dtype, schedule: object, window: int | None
) -> None:
    lens, q_lens = [1000, 30, 0, 200, 64], [3, 30, 2, 0, 70]
    case = make_case(lens, q_lens=q_lens, HQ=6, KH=2, D=16, dtype=dtype, page_size=16, window=window)
    batch = run(case, schedule=schedule)
    at = 0
    for b, n in enumerate(q_lens):
        assert same(run(case.request(b), schedule=schedule), tokens(batch, slice(at, at + n)))
        at += n


@dtypes
def test_invariant_heads_do_not_depend_on_one_another(dtype: torch.dtype) -> None:
    """Half of the KV heads alone give the bits that they give among all: tensor-parallel ranks agree with one."""
    case = make_case([900, 64], HQ=8, KH=4, D=32, dtype=dtype)
    whole = run(case, schedule="invariant")
    half = Case(case.q[:, :4], case.k_cache[:, :, :2], case.v_cache[:, :, :2], case.seq_lens)
    part = run(half, schedule="invariant")
    assert same_bits(part[0], whole[0][:, :4])
    assert same_bits(part[1], whole[1][:, :4])


@dtypes
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_layout_and_page_size_change_no_bit(dtype: torch.dtype, schedule: str) -> None:
    """The same numbers in the same order, wherever they lie."""
    lens = [700, 3, 65]
    plain = run(make_case(lens, dtype=dtype), schedule=schedule)
    for page_size, layout in ((1, "nhd"), (16, "hnd"), (64, "kv_tokens"), (256, "kv_blocks"), (None, "layers")):
        moved = make_case(lens, dtype=dtype, page_size=page_size, layout=layout, capacity=800)
        assert same(plain, run(moved, schedule=schedule))


@pytest.mark.parametrize("isa", cpu_isas())
@dtypes
def test_invariant_with_each_instruction_set(isa: str, dtype: torch.dtype) -> None:
    case = make_case([900, 64, 1], HQ=10, KH=2, D=40, dtype=dtype, page_size=16)
    with using_isa(isa):
        batch = run(case, schedule=Invariant(chunk=64))
        for b in range(3):
            assert same(run(case.request(b), schedule=Invariant(chunk=64)), tokens(batch, slice(b, b + 1)))

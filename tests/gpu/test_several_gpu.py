"""Several query tokens a request, soft cap, sinks, ALiBi and draft masks on a GPU, held to the float64 reference.

Cases are made and judged on the CPU, as its own are. Head sizes 64 and 128 with pages of a multiple of 16 tokens, or
contiguous, take the kernel of compute capability 9.0; everything else the portable one.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import wavefill
from helpers import Case, make_case, name_of, same_bits
from wavefill import Fixed, Invariant

SCHEDULES = ("auto", "fixed", "invariant", Fixed(splits=3), Invariant(chunk=256))
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "alibi": {"alibi_slopes": True},
    "mask": {"mask": True},
    "window": {"window": 40},
    "all": {"softcap": 1.5, "sinks": True, "alibi_slopes": True, "mask": True, "window": 100},
}
#: Keys and query tokens of each request.
DRAFTS = ([70, 0, 300, 1000, 65, 3], [4, 2, 0, 7, 1, 5])
MIXED = ([700, 17, 1000, 64, 129], [130, 1, 33, 1, 129])


def on_gpu(case: Case) -> Case:
    """The case with its tensors on the GPU, in copies of all their memory."""
    moved: dict[str, Tensor] = {}
    storages: dict[int, Any] = {}
    for name in ("q", "k_cache", "v_cache", "seq_lens", "block_table", "cu_seqlens_q", "sinks", "alibi_slopes", "mask"):
        tensor = getattr(case, name)
        if tensor is not None:
            storage = tensor.untyped_storage()
            there = storages.setdefault(storage.data_ptr(), storage.cuda())
            moved[name] = torch.empty(0, dtype=tensor.dtype, device="cuda").set_(
                there, tensor.storage_offset(), tensor.shape, tensor.stride())
    return replace(case, **moved)


def run(case: Case, out: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of the public function, of tensors that live on the GPU."""
    common = {"window": case.window, "softcap": case.softcap, "sinks": case.sinks, "alibi_slopes": case.alibi_slopes,
              "scale": case.scale, "return_lse": True, "out": out, **kwargs}
    if case.cu_seqlens_q is None:
        return wavefill.decode_attention(*case.tensors(), **common)
    return wavefill.attention(*case.tensors(), cu_seqlens_q=case.cu_seqlens_q, causal=case.causal, mask=case.mask,
                              **common)


def check(case: Case, **kwargs: Any) -> None:
    there = on_gpu(case)
    out, lse = run(there, torch.full(case.out_shape, math.nan, dtype=case.q.dtype, device="cuda"), **kwargs)
    case.expected.check(out.cpu(), lse.cpu())


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("D", [64, 128, 80])
def test_options_and_schedules(name: str, schedule: object, D: int) -> None:
    for (lens, q_lens), most in ((DRAFTS, 7), (MIXED, 130 if "mask" in OPTIONS[name] else None)):
        check(make_case(lens, q_lens=q_lens, HQ=8, KH=2, D=D, dtype=torch.bfloat16, page_size=16, **OPTIONS[name]),
              schedule=schedule, max_q_len=most)


@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in ("mask", "all")])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_options_in_decode(name: str, schedule: object) -> None:
    for D, G, dtype in ((128, 4, torch.bfloat16), (64, 16, torch.float16), (256, 2, torch.bfloat16),
                        (96, 3, torch.float32)):
        check(make_case([700, 0, 1, 130, 64], HQ=2 * G, KH=2, D=D, dtype=dtype, page_size=16, **OPTIONS[name]),
              schedule=schedule)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=name_of)
@pytest.mark.parametrize("layout", ["nhd", "hnd", "kv_tokens"])
@pytest.mark.parametrize("page", [None, 1, 16, 48, 64, 256])
def test_layouts(dtype: torch.dtype, layout: str, page: int | None) -> None:
    check(make_case(*[DRAFTS[0]], q_lens=DRAFTS[1], HQ=8, KH=2, D=64, dtype=dtype, page_size=page, layout=layout))


@pytest.mark.parametrize("G", [1, 2, 3, 5, 8, 16, 17, 33, 64, 128])
def test_groups(G: int) -> None:
    for most in (None, 4):
        q_lens = [4, 3, 1] if most else [40, 3, 9]
        check(make_case([200, 3, 77], q_lens=q_lens, HQ=2 * G, KH=2, D=128, dtype=torch.bfloat16, page_size=32),
              max_q_len=most)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("most", [3, None])
def test_every_key_count(D: int, most: int | None) -> None:
    """0 to 299 keys, three query tokens each, windowed and not."""
    for window in (None, 70):
        check(make_case(range(300), q_lens=[3] * 300, HQ=2, KH=1, D=D, dtype=torch.bfloat16, page_size=16,
                        window=window), max_q_len=most)


@pytest.mark.parametrize("most", [1, 2, 5])
def test_a_bound_that_is_too_small_changes_nothing(most: int) -> None:
    """Requests then have several rows, of fewer query tokens."""
    for D, HQ in ((128, 8), (64, 64)):
        check(make_case(DRAFTS[0], q_lens=DRAFTS[1], HQ=HQ, KH=2, D=D, dtype=torch.bfloat16, page_size=16,
                        sinks=True), max_q_len=most)


@pytest.mark.parametrize("B", [1, 2, 33, 127, 500, 1000, 1023, 1024, 1025])
def test_rows_of_many_requests(B: int) -> None:
    """Programs make up to 1,024 rows by themselves, a warp 32 at a time."""
    q_lens = [b % 3 for b in range(B - 1)] + [2]
    check(make_case([b % 90 for b in range(B)], q_lens=q_lens, HQ=4, KH=1, D=64, dtype=torch.float16, page_size=16),
          max_q_len=2)


@pytest.mark.parametrize("KH", [1, 4, 8, 16, 33])
def test_units_of_a_few_and_of_many_parts(KH: int) -> None:
    """From a hundred parts of a unit to two; a kernel of its own joins them, up to 66 units on an H200."""
    check(make_case([30_000, 500], q_lens=[3, 4], HQ=4 * KH, KH=KH, D=128, dtype=torch.bfloat16, page_size=16),
          max_q_len=4)


@pytest.mark.parametrize("budget", [1, 3, 8])
@pytest.mark.parametrize("D", [64, 128])
def test_drafts_over_many_tiles(D: int, budget: int) -> None:
    """A segment goes round the ring many times; the two groups of warps take every other tile of it."""
    case = make_case([20_000, 9000, 130], q_lens=[4, 3, 4], HQ=16, KH=2, D=D, dtype=torch.bfloat16, page_size=16)
    for _ in range(5):
        check(case, max_q_len=4, sm_budget=budget)


def test_tokens_before_the_first_offset_are_empty() -> None:
    """Offsets start at 0; where they do not, nothing of the memory that the result lies in shows."""
    case = on_gpu(make_case([40, 70], q_lens=[2, 3], HQ=8, KH=2, D=128, dtype=torch.bfloat16, page_size=16))
    out, lse = run(replace(case, cu_seqlens_q=case.cu_seqlens_q + 2), torch.full_like(case.q, math.nan))
    assert bool((out[:2] == 0).all())
    assert bool((lse[:2] == -math.inf).all())
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("causal", [True, False])
def test_prompts(causal: bool) -> None:
    """Enough query tokens that units are not cut."""
    check(make_case([2000, 700], q_lens=[2000, 300], HQ=8, KH=8, D=128, dtype=torch.bfloat16, page_size=64,
                    causal=causal, sinks=True))
    check(make_case([1500], q_lens=[1500], HQ=16, KH=16, D=64, dtype=torch.float16, window=300, causal=causal))


@pytest.mark.parametrize("window", [None, 500])
def test_chunk_over_a_long_prefix(window: int | None) -> None:
    check(make_case([20_000], q_lens=[256], HQ=8, KH=2, D=128, dtype=torch.bfloat16, page_size=16, window=window))


@pytest.mark.parametrize("tokens", [5, 3000])
def test_padding_is_empty(tokens: int) -> None:
    case = on_gpu(make_case([40, tokens], q_lens=[2, tokens - 2], HQ=32, KH=32, D=128, dtype=torch.bfloat16,
                            page_size=16, sinks=True))
    q = torch.cat([case.q, torch.full((9, *case.q.shape[1:]), math.nan, device="cuda", dtype=case.q.dtype)])
    out, lse = run(replace(case, q=q), torch.full_like(q, math.nan))
    assert bool((out[tokens:] == 0).all())
    assert bool((lse[tokens:] == -math.inf).all())
    assert bool(out[:tokens].isfinite().all())


def test_a_graph_serves_other_lengths_and_drafts() -> None:
    """One captured graph, replayed with other lengths and other query tokens of each request."""
    for (lens, q_lens), most in ((DRAFTS, 7), (MIXED, None)):
        case = make_case(lens, q_lens=q_lens, HQ=8, KH=2, D=128, dtype=torch.bfloat16, page_size=16, capacity=1200)
        there = on_gpu(case)
        out = torch.full(case.out_shape, math.nan, device="cuda", dtype=case.q.dtype)
        lens_now, starts_now = there.seq_lens.clone(), there.cu_seqlens_q.clone()
        there.seq_lens.zero_()
        run(there, out, max_q_len=most)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            _, lse = run(there, out, max_q_len=most)
        there.seq_lens.copy_(lens_now)
        for starts in (starts_now, starts_now.clamp(max=int(starts_now[3]))):
            there.cu_seqlens_q.copy_(starts)
            out.fill_(math.nan)
            graph.replay()
            now = replace(case, cu_seqlens_q=starts.cpu())
            used = int(starts[-1])
            expected = replace(now, q=case.q[:used]).expected
            expected.check(out[:used].cpu(), lse[:used].cpu())
            assert bool((out[used:] == 0).all())


def test_invariant_bits_do_not_depend_on_batch_mates() -> None:
    case = on_gpu(make_case([900, 70, 2000], q_lens=[5, 40, 130], HQ=8, KH=2, D=128, dtype=torch.bfloat16,
                            page_size=16))
    out, lse = run(case, schedule="invariant", max_q_len=130)
    for b in range(3):
        one = case.request(b)
        one = replace(one, cu_seqlens_q=one.cu_seqlens_q.cuda())
        alone, alone_lse = run(one, schedule="invariant", max_q_len=int(one.cu_seqlens_q[1]))
        rows = slice(int(case.cu_seqlens_q[b]), int(case.cu_seqlens_q[b + 1]))
        assert same_bits(alone.cpu(), out[rows].cpu())
        assert same_bits(alone_lse.cpu(), lse[rows].cpu())


@pytest.mark.parametrize("q_len", [1, 3, 700])
def test_invariant_bits_of_long_rows_do_not_depend_on_batch_mates(q_len: int) -> None:
    """Rows of many pieces, whose merge takes other shapes for other numbers of rows."""
    case = on_gpu(make_case([9000, 4500, 70, 5000], q_lens=[q_len, q_len, 1, q_len], HQ=8, KH=2, D=128,
                            dtype=torch.bfloat16, page_size=16))
    out, lse = run(case, schedule="invariant", max_q_len=q_len)
    for b in range(4):
        one = case.request(b)
        one = replace(one, cu_seqlens_q=one.cu_seqlens_q.cuda())
        alone, alone_lse = run(one, schedule="invariant", max_q_len=int(one.cu_seqlens_q[1]))
        rows = slice(int(case.cu_seqlens_q[b]), int(case.cu_seqlens_q[b + 1]))
        assert same_bits(alone.cpu(), out[rows].cpu())
        assert same_bits(alone_lse.cpu(), lse[rows].cpu())


def test_repeats_give_the_same_bits() -> None:
    case = on_gpu(make_case(*[MIXED[0]], q_lens=MIXED[1], HQ=8, KH=2, D=128, dtype=torch.bfloat16, page_size=16))
    first = run(case)
    for _ in range(20):
        again = run(case)
        assert same_bits(first[0].cpu(), again[0].cpu())
        assert same_bits(first[1].cpu(), again[1].cpu())

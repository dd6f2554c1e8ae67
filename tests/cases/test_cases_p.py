"""Section P of the case list: a length is a length, not a capacity, and not a last index."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import wavefill
from helpers import DTYPES, SCHEDULES, check, make_case, name_of, run, same_bits
from wavefill import InvalidArgument, PagedKVCache

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
schedules = pytest.mark.parametrize("schedule", SCHEDULES)


@dtypes
@schedules
@pytest.mark.parametrize("page_size", [None, 16, 64])
def test_p1_only_the_filled_slots_of_a_static_cache_count(
    dtype: torch.dtype, schedule: str, page_size: int | None
) -> None:
    """2,048 slots, 100 of them filled, the others zero: counted as keys they would add ln(20) to the LSE."""
    case = make_case([100, 7], dtype=dtype, page_size=page_size, capacity=2048, poison=0.0)
    check(case, schedule=schedule)
    check(make_case([100, 7], dtype=dtype, page_size=page_size, capacity=2048), schedule=schedule)


@dtypes
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_p1_a_paged_cache_with_room_to_spare(dtype: torch.dtype, layout: str) -> None:
    """Filled step by step; the pages beyond hold NaN."""
    cache = PagedKVCache(64, page_size=16, kv_heads=2, head_dim=32, dtype=dtype, layout=layout)
    pages = cache.view()
    pages.k.fill_(math.nan)
    pages.v.fill_(math.nan)
    requests = cache.add(2)
    wanted = make_case([100, 37], dtype=dtype)
    cache.append(requests, torch.cat([wanted.k_cache[0, :99], wanted.k_cache[1, :36]]),
                 torch.cat([wanted.v_cache[0, :99], wanted.v_cache[1, :36]]), counts=[99, 36])
    cache.append(requests, torch.stack([wanted.k_cache[0, 99], wanted.k_cache[1, 36]]),
                 torch.stack([wanted.v_cache[0, 99], wanted.v_cache[1, 36]]))
    out, lse = wavefill.decode_attention(wanted.q, pages, None, cache.seq_lens(requests), cache.block_table(requests),
                                         return_lse=True)
    wanted.expected.check(out, lse)


@dtypes
@schedules
@pytest.mark.parametrize("page_size", [None, 1, 16])
def test_p3_lengths_of_nothing_one_and_all(dtype: torch.dtype, schedule: str, page_size: int | None) -> None:
    case = make_case([0, 1, 48], dtype=dtype, page_size=page_size, capacity=48)
    out, lse = check(case, schedule=schedule)
    assert (out[0] == 0).all()
    assert (lse[0] == -math.inf).all()
    with pytest.raises(InvalidArgument, match=r"seq_lens\[0\]: must not be negative; got -1\."):
        run(dataclasses.replace(case, seq_lens=case.seq_lens - 1), schedule=schedule)


@dtypes
@schedules
@pytest.mark.parametrize("B", [1, 2, 5])
def test_p4_past_and_present_in_buffers_of_their_own(dtype: torch.dtype, schedule: str, B: int) -> None:
    """A caller that copies the cache for every step: each step's buffer has other strides and room for one key more."""
    lens = [30 + b for b in range(B)]
    first = make_case(lens, dtype=dtype, capacity=34)
    check(first, schedule=schedule)
    new_k, new_v = torch.randn(B, 2, 32).to(dtype), torch.randn(B, 2, 32).to(dtype)
    present = []
    for past, new in ((first.k_cache, new_k), (first.v_cache, new_v)):
        buffer = torch.full((B, 35, 2, 32), math.nan, dtype=dtype)
        buffer[:, :34] = past
        for b, n in enumerate(lens):
            buffer[b, n] = new[b]
        present.append(buffer)
    second = dataclasses.replace(first, q=torch.randn(B, 4, 32).to(dtype), k_cache=present[0], v_cache=present[1],
                                 seq_lens=first.seq_lens + 1)
    out, lse = check(second, schedule=schedule)
    again = run(second, schedule=schedule)
    assert same_bits(out, again[0])
    assert same_bits(lse, again[1])

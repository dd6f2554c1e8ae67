"""Section H of the case list: pages, layouts and strides. H3, H5 and H8 are with the tests of bad input."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import wavefill
from helpers import DTYPES, Case, check, make_case, name_of, same_bits
from wavefill import InvalidType, ops

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
paged = pytest.mark.parametrize("page_size", [None, 4], ids=["contiguous", "page4"])


def strided(tensor: Tensor, dim: int, step: int = 2) -> Tensor:
    """The same values in a poisoned buffer, `step` slots apart along `dim`."""
    shape = list(tensor.shape)
    shape[dim] *= step
    index = [slice(None)] * tensor.dim()
    index[dim] = slice(None, None, step)
    view = torch.full(shape, math.nan, dtype=tensor.dtype)[tuple(index)]
    view[:] = tensor
    return view


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    script = Path(__file__).with_name("reads_in_bounds.py")
    return subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=300)


fenced = pytest.mark.skipif(sys.platform == "win32", reason="needs mmap and mprotect")


@fenced
def test_h4_h13_nothing_outside_the_tensors_is_read() -> None:
    """Every tensor ends, or starts, where memory that may not be touched begins; a stray read kills the process."""
    done = run_script()
    assert done.returncode == 0, f"exit {done.returncode} after: {done.stdout[-300:]} {done.stderr[-2000:]}"
    assert done.stdout.count("in bounds") == len(DTYPES)


@fenced
def test_h4_a_read_of_one_slot_too_many_is_fatal() -> None:
    """The fence above does hold."""
    done = run_script("overrun")
    assert done.returncode < 0
    assert done.stdout == "64 slots read\n"


def test_h6_large_pages_past_4096_tokens() -> None:
    check(make_case([6144, 4097, 8191], HQ=32, KH=2, D=256, dtype=torch.bfloat16, page_size=256, capacity=8192))


@dtypes
@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
@pytest.mark.parametrize("HQ", [16, 80], ids=["mha16", "gqa5"])
def test_h7_pages_that_are_no_tile_with_other_sizes_of_v(dtype: torch.dtype, page_size: int, HQ: int) -> None:
    check(make_case([5, 128, 129, 200], HQ=HQ, KH=16, D=192, DV=128, dtype=dtype, page_size=page_size))


@dtypes
@paged
@pytest.mark.parametrize("which", ["q", "k_cache", "v_cache", "all"])
@pytest.mark.parametrize("D", [64, 30])
def test_h10_an_innermost_stride_of_two(dtype: torch.dtype, page_size: int | None, which: str, D: int) -> None:
    case = make_case([70, 5, 64], HQ=6, KH=2, D=D, dtype=dtype, page_size=page_size)
    names = ["q", "k_cache", "v_cache"] if which == "all" else [which]
    spread = {name: strided(getattr(case, name), -1) for name in names}
    assert all(t.stride(-1) == 2 for t in spread.values())
    check(dataclasses.replace(case, **spread))


@dtypes
@paged
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_h10_gaps_along_every_other_dimension(dtype: torch.dtype, page_size: int | None, dim: int) -> None:
    case = make_case([70, 5, 64], HQ=6, KH=2, D=30, dtype=dtype, page_size=page_size)
    spread = {name: strided(getattr(case, name), dim) for name in ("k_cache", "v_cache")}
    if dim < 2:
        spread["q"] = strided(case.q, dim)
    check(dataclasses.replace(case, **spread))


@dtypes
def test_h10_expanded_heads_and_requests(dtype: torch.dtype) -> None:
    """A stride of 0: all requests share one cache, all heads one K."""
    case = make_case([50, 50, 50], HQ=4, KH=2, D=32, dtype=dtype)
    check(dataclasses.replace(case, k_cache=case.k_cache[1:2].expand(3, -1, -1, -1),
                              v_cache=case.v_cache[1:2].expand(3, -1, -1, -1)))
    check(dataclasses.replace(case, k_cache=case.k_cache[:, :, :1].expand(-1, -1, 2, -1)))
    check(dataclasses.replace(case, q=case.q[:1].expand(3, -1, -1)))


@dtypes
def test_h10_a_cache_that_runs_backwards_in_memory_layout(dtype: torch.dtype) -> None:
    """Tokens innermost in memory (stride 1), the head size outermost."""
    case = make_case([70, 5, 64], HQ=6, KH=2, D=24, dtype=dtype)
    k, v = (torch.empty(t.shape[::-1], dtype=dtype).permute(3, 2, 1, 0).copy_(t) for t in (case.k_cache, case.v_cache))
    assert k.stride(-1) != 1
    check(dataclasses.replace(case, k_cache=k, v_cache=v))


@dtypes
def test_h11_only_v_is_a_transposed_view(dtype: torch.dtype) -> None:
    case = make_case([62], HQ=16, KH=16, D=128, dtype=dtype)
    v = case.v_cache.transpose(1, 2).contiguous().transpose(1, 2)
    out, lse = check(case)
    other_out, other_lse = check(dataclasses.replace(case, v_cache=v))
    assert same_bits(out, other_out)
    assert same_bits(lse, other_lse)


def append_inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    k_cache, v_cache = torch.randn(6, 4, 3, 20).to(dtype), torch.randn(6, 4, 3, 12).to(dtype)
    slots = torch.randperm(24)[:9]
    slots[4] = -1
    return k_cache, v_cache, torch.randn(9, 3, 20).to(dtype), torch.randn(9, 3, 12).to(dtype), slots


@dtypes
@pytest.mark.parametrize("new_dim", [None, 0, 1, 2])
@pytest.mark.parametrize("cache_dim", [None, 0, 1, 2, 3])
def test_h12_append_with_strides_writes_the_bits_of_a_packed_append(
    dtype: torch.dtype, new_dim: int | None, cache_dim: int | None
) -> None:
    """Strides of the new tokens, of the cache, or of both; and the slots next to them keep what they had."""
    k_cache, v_cache, k, v, slots = append_inputs(dtype)
    want_k, want_v = k_cache.clone(), v_cache.clone()
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            want_k[slot // 4, slot % 4], want_v[slot // 4, slot % 4] = k[i], v[i]
    if new_dim is not None:
        k, v = strided(k, new_dim), strided(v, new_dim)
    if cache_dim is not None:
        k_cache, v_cache = strided(k_cache, cache_dim), strided(v_cache, cache_dim)
    ops.append(k_cache, v_cache, k, v, slots)
    assert same_bits(k_cache, want_k)
    assert same_bits(v_cache, want_v)
    if cache_dim is not None:
        for cache in (k_cache, v_cache):
            index = [slice(None)] * 4
            index[cache_dim] = slice(1, None, 2)
            gaps = torch.as_strided(cache, [*cache.shape[:cache_dim], cache.shape[cache_dim] * 2 - 1,
                                            *cache.shape[cache_dim + 1 :]],
                                    [s // 2 if d == cache_dim else s for d, s in enumerate(cache.stride())])
            assert gaps[tuple(index)].isnan().all()


@dtypes
def test_h12_append_into_interleaved_k_and_v(dtype: torch.dtype) -> None:
    k_cache, v_cache, k, v, slots = append_inputs(dtype)
    both = torch.cat([k_cache, v_cache], dim=-1)
    ops.append(both[..., :20], both[..., 20:], k, v, slots)
    ops.append(k_cache, v_cache, k, v, slots)
    assert same_bits(both, torch.cat([k_cache, v_cache], dim=-1))


@pytest.mark.parametrize("n", [*range(26, 33), 63, 64, 95, 96, 384])
def test_h13_a_mask_of_the_exact_size_and_no_other(n: int) -> None:
    """As many words as the query tokens take; `test_h4_h13` fences them in. A mask of floats over all keys is none."""
    case: Case = make_case([n + 5], q_lens=[n], D=8, mask=True)
    assert case.mask is not None
    assert case.mask.shape == (n, -(-n // 32))
    check(case)
    with pytest.raises(InvalidType, match=r"^mask: dtype must be int32"):
        wavefill.attention(*case.tensors(), cu_seqlens_q=case.cu_seqlens_q, mask=torch.zeros(n, n + 5))

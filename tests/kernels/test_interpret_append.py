"""The kernels of `append` and `merge_states`: the bytes that the CPU backend writes, and the float64 merge."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import wavefill
from wavefill import reference
from wavefill.backends import cpu
from wavefill.backends.gpu import kernels, operators

PAGES, PAGE, KH = 5, 3, 2
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INTS = {2: torch.int16, 4: torch.int32}


def heads_first(*size: int, dtype: torch.dtype) -> Tensor:
    pages, tokens, heads, width = size
    return torch.empty(pages, heads, tokens, width, dtype=dtype).transpose(1, 2)


def columns_apart(*size: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(*size[:-1], 2 * size[-1], dtype=dtype)[..., ::2]


def off_by_one(*size: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(*size[:-1], size[-1] + 1, dtype=dtype)[..., 1:]


CACHES: dict[str, Callable[..., Tensor]] = {
    "NHD": torch.empty, "HND": heads_first, "columns apart": columns_apart, "off by one": off_by_one}
TOKENS: dict[str, Callable[[Tensor], Tensor]] = {
    "packed": lambda x: x, "heads first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "columns first": lambda x: x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "one for all": lambda x: x[:1].expand(x.shape)}


def noise(*size: int, dtype: torch.dtype) -> Tensor:
    """Any bits: NaN of every kind and subnormal numbers too."""
    ints = INTS[dtype.itemsize]
    limits = torch.iinfo(ints)
    return torch.randint(limits.min, limits.max + 1, size, dtype=ints).view(dtype)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(INTS[x.dtype.itemsize])


def both_write(caches: tuple[Tensor, Tensor], k: Tensor, v: Tensor, slots: Tensor) -> None:
    """The CPU backend and the kernel leave the same bytes in a cache, written or not."""
    for cache in caches:
        cache.copy_(noise(*cache.shape, dtype=cache.dtype))
    copies = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x) for x in caches]
    cpu.append(*caches, k, v, slots)
    operators.append(*copies, k, v, slots, interpret=True)
    for expected, found in zip(caches, copies, strict=True):
        assert torch.equal(bits(found), bits(expected))


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_writes_what_the_cpu_writes(cache: str, tokens: str, dtype: torch.dtype) -> None:
    for D, DV in ((16, 16), (5, 24)):
        caches = tuple(CACHES[cache](PAGES, PAGE, KH, n, dtype=dtype) for n in (D, DV))
        k, v = (TOKENS[tokens](noise(6, KH, n, dtype=dtype)) for n in (D, DV))
        both_write(caches, k, v, torch.tensor([4, -1, 14, 0, -(2**63), 7]))


def test_it_takes_any_number_of_tokens_and_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "APPEND_ELEMENTS", 32)  # programs of two rows, and more than one
    operators._append_call.cache_clear()

    @settings(max_examples=25)
    @given(st.integers(0, 7), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4))
    def any_size(n: int, heads: int, pages: int, page: int) -> None:
        slots = torch.randperm(pages * page)[:n]
        k, v = noise(len(slots), heads, 16, dtype=torch.float32), noise(len(slots), heads, 9, dtype=torch.float32)
        both_write((torch.empty(pages, page, heads, 16), torch.empty(pages, page, heads, 9)), k, v, slots)

    any_size()
    operators._append_call.cache_clear()


@pytest.mark.parametrize("wide", [False, True])
def test_slots_past_the_cache_are_skipped(wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the CPU refuses them: nothing next to the cache is written. WIDE: as for 2**31 slots and more."""
    if wide:
        variant = operators.append_variant
        monkeypatch.setattr(operators, "append_variant", lambda *a, **how: variant(*a, **{**how, "wide": True}))
    operators._append_call.cache_clear()
    room = torch.full((3, 2, PAGES * PAGE * KH * 16), 7.0)
    caches = [room[1, i].view(PAGES, PAGE, KH, 16) for i in range(2)]
    k = v = torch.ones(6, KH, 16)
    slots = torch.tensor([PAGES * PAGE, 2, 2**31, 2**32 + 1, 2**63 - 1, PAGES * PAGE - 1])
    operators.append(*caches, k, v, slots, interpret=True)
    operators._append_call.cache_clear()
    for cache in caches:
        flat = cache.flatten(0, 1)
        assert (flat[[2, PAGES * PAGE - 1]] == 1).all()
        flat[[2, PAGES * PAGE - 1]] = 7.0
    assert (room == 7).all()


def test_where_slots_are_looked_at_the_error_is_the_cpu_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "looks", lambda index: True)
    cache, k = torch.zeros(PAGES, PAGE, KH, 8), torch.ones(3, KH, 8)
    errors = []
    for write in (cpu.append, operators.append):
        with pytest.raises(wavefill.InvalidArgument, match=r"slots\[1\]: must be below .* = 15; got 15") as error:
            write(cache, torch.zeros_like(cache), k, k, torch.tensor([-1, 15, 99]))
        errors.append(str(error.value))
    assert errors[0] == errors[1]
    assert not cache.any()


def test_nothing_to_write_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "function", None)
    for cache, tokens in (((2, 4, 1, 8), (0, 1, 8)), ((0, 4, 1, 8), (1, 1, 8)), ((2, 0, 1, 8), (1, 1, 8)),
                          ((2, 4, 0, 8), (1, 0, 8)), ((2, 4, 1, 0), (1, 1, 0))):
        k, v = (torch.zeros(tokens) for _ in range(2))
        operators.append(torch.zeros(cache), torch.zeros(cache), k, v, torch.zeros(tokens[0], dtype=torch.int64),
                         interpret=True)
    operators.merge(torch.zeros(2, 0, 8), torch.zeros(2, 0), torch.zeros(0, 8), torch.zeros(0), interpret=True)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_cache_that_it_writes_for(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def filled() -> wavefill.PagedKVCache:
        torch.manual_seed(1)
        cache = wavefill.PagedKVCache(9, layers=2, page_size=4, kv_heads=KH, head_dim=16, dtype=torch.bfloat16,
                                      layout=layout)
        for layer in range(2):
            cache.view(layer).k.fill_(0)
            cache.view(layer).v.fill_(0)
        a, b = cache.add(2)
        for requests, counts in (((a, b), (6, 3)), ((a, b, *cache.fork(a)), (1, 2, 3))):
            new = torch.randn(2, 2, sum(counts), KH, 16).bfloat16()
            cache.append(requests, new[0], new[1], counts=counts)
        return cache

    expected = filled()

    def append(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor, *no_scales: None) -> None:
        operators.append(k_cache, v_cache, k, v, slots, interpret=True)

    monkeypatch.setattr(cpu, "append", append)
    found = filled()
    for layer in range(2):
        assert torch.equal(found.view(layer).k, expected.view(layer).k)
        assert torch.equal(found.view(layer).v, expected.view(layer).v)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 4)], ids=str)
@pytest.mark.parametrize("n", [0, 1, 3, 7])
def test_merge_of_any_number_of_states(n: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for width in (24, 300):
        outs, lses = torch.randn(n, *shape, width).to(dtype), 5 * torch.randn(n, *shape)
        lses[torch.rand(lses.shape) < 0.3] = -math.inf
        outs[lses == -math.inf] = torch.nan
        out, lse = merged(outs, lses)
        expected = reference.merge_states(outs, lses)
        torch.testing.assert_close(out.double(), expected[0], atol=1e-6, rtol=2 * torch.finfo(dtype).eps)
        torch.testing.assert_close(lse.double(), expected[1], atol=1e-6, rtol=1e-6)
        on_cpu, lse_on_cpu = wavefill.merge_states(outs, lses)
        torch.testing.assert_close(out, on_cpu, atol=1e-6, rtol=2 * torch.finfo(dtype).eps)
        torch.testing.assert_close(lse, lse_on_cpu, atol=1e-6, rtol=1e-6)


def test_merge_of_what_is_far_apart_or_no_number() -> None:
    outs = torch.tensor([[[1.0], [1.0], [1.0], [3e38]], [[2.0], [2.0], [2.0], [3e38]]])
    lses = torch.tensor([[1e30, math.nan, math.inf, 3.0], [-1e30, 0.0, 0.0, 3.0]])
    out, lse = merged(outs, lses)
    assert out[0] == 1
    assert lse[0] == torch.tensor(1e30)
    assert out[1:3].isnan().all()
    assert lse[1:3].isnan().all()
    torch.testing.assert_close(out[3], torch.tensor([3e38]))


def test_merge_of_states_without_columns() -> None:
    _, lse = merged(torch.zeros(2, 3, 0), torch.zeros(2, 3))
    torch.testing.assert_close(lse, torch.full((3,), math.log(2)))


def merged(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = torch.full_like(outs.sum(0), torch.nan), torch.full(lses.shape[1:], torch.nan)
    operators.merge(outs, lses, out, lse, interpret=True)
    return out, lse

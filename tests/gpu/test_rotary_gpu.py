"""Rotation and append in one launch: the bits of the two launches that it stands for, and nothing else written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from wavefill.backends.gpu import flat, layer, operators, rotary

DTYPES = (torch.bfloat16, torch.float16)
PAGES, PAGE = 7, 4


@pytest.fixture(autouse=True)
def _only_where_it_works() -> None:
    if not flat.works(torch.device("cuda", 0)):
        pytest.skip("rotation and append in one launch is for compute capability 9.0, with cuda-bindings")


def numbers(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def both(rows: int, HQ: int, KH: int, D: int, size: int, dtype: torch.dtype, *, normed: bool = False, batch: int = 0,
         layout: str = "NHD", bad: bool = False) -> None:
    """Two launches and one, on equal tensors: q, and both caches with what lies around them.

    batch: rows with cos and sin of their own, the others being tokens; 0: one for all rows. layout: of the cache.
    bad: some slots are below 0 or past the cache.
    """
    width = (HQ + 2 * KH) * D
    qkv = numbers(rows, width, dtype=dtype, seed=1)
    cos, sin = (numbers(max(batch, 1), rows // max(batch, 1), size, dtype=dtype, seed=2 + i) for i in range(2))
    norms: dict[str, Any] = {"eps": 1e-6} | {
        name: numbers(D, dtype=dtype, seed=4 + i) for i, name in enumerate(("q_weight", "k_weight"))} if normed else {}
    slots = torch.randperm(PAGES * PAGE, generator=torch.Generator().manual_seed(3))[:rows].cuda()
    if bad:
        slots[0], slots[rows // 2], slots[-1] = -1, PAGES * PAGE, 1 << 40
    found = []
    for one in (False, True):
        room = torch.full((rows, width + 8), torch.nan, device="cuda", dtype=dtype)
        room[:, :width] = qkv
        x = room[:, :width]
        axes = (PAGES, PAGE, KH, D) if layout == "NHD" else (PAGES, KH, PAGE, D)
        caches = [torch.full(axes, torch.nan, device="cuda", dtype=dtype) for _ in range(2)]
        views = [c if layout == "NHD" else c.transpose(1, 2) for c in caches]
        if one:
            assert rotary.takes(x, *views)
            rotary.rotate_and_append(x, cos, sin, HQ, *views, slots, **norms)
        else:
            layer.rotate_(x, cos, sin, HQ, KH, D, **norms)
            heads = x.unflatten(1, (HQ + 2 * KH, D))
            operators.append(*views, heads[:, HQ : HQ + KH], heads[:, HQ + KH :], slots)
        found.append((x[:, : HQ * D], room[:, width:], *caches))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("HQ", "KH", "D", "size"), [(32, 8, 128, 128), (4, 2, 64, 64), (3, 1, 80, 80), (5, 5, 96, 24),
                                                     (2, 1, 256, 256), (1, 1, 8, 8), (7, 1, 40, 2)])
def test_the_bits_of_two_launches(HQ: int, KH: int, D: int, size: int, dtype: torch.dtype) -> None:
    for rows in (1, 2, 3, 8, 17):
        both(rows, HQ, KH, D, size, dtype)
    both(6, HQ, KH, D, size, dtype, batch=6)
    both(5, HQ, KH, D, size, dtype, layout="HND", bad=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("D", [128, 64, 80, 256])
def test_heads_that_are_normed_first(D: int, dtype: torch.dtype) -> None:
    """Sums are in another order, so the last bit may differ."""
    rows, HQ, KH = 5, 6, 2
    cos, sin = (numbers(1, rows, D, dtype=dtype, seed=i) for i in range(2))
    weights = {name: numbers(D, dtype=dtype, seed=4 + i) for i, name in enumerate(("q_weight", "k_weight"))}
    x, slots = numbers(rows, (HQ + 2 * KH) * D, dtype=dtype, seed=1), torch.arange(rows, device="cuda")
    y, caches = x.clone(), [torch.zeros(PAGES, PAGE, KH, D, device="cuda", dtype=dtype) for _ in range(2)]
    layer.rotate_(x, cos, sin, HQ, KH, D, eps=1e-6, **weights)
    rotary.rotate_and_append(y, cos, sin, HQ, *caches, slots, eps=1e-6, **weights)
    want = x.view(rows, HQ + 2 * KH, D)
    got = torch.cat([y.view(rows, -1, D)[:, :HQ], *(c.flatten(0, 1)[:rows] for c in caches)], 1)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got, want, rtol=4 * eps, atol=4 * eps * float(want.abs().max()))
    assert torch.equal(got[:, HQ + KH :], want[:, HQ + KH :])

"""The writer of quantised caches: the bytes of `wavefill.quantise`, for any values, strides and slots."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import DTYPES, cpu_isas, name_of, same_bits, torch_threads, using_isa
from quantised import PLAIN
from wavefill import ops
from wavefill.formats import FORMATS, Part
from wavefill.quantise import Scales, quantise, scales
from wavefill.spec import InvalidArgument, InvalidType

forms = pytest.mark.parametrize("form", PLAIN)
CODES = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}


def hostile(N: int, KH: int, D: int) -> Tensor:
    """[N, KH, D] float32: rows of all sizes, ties, zeros of both signs, subnormal numbers, NaN and infinities."""
    x = torch.randn(N, KH, D) * torch.logspace(-44, 38, N).view(-1, 1, 1)
    x[::7] = torch.arange(KH * D).view(KH, D) * 0.5 - 7
    x[1::7] = 0.0
    x[2::7, :, ::2] = -0.0
    x[3::7] *= 1e-6
    flat = x.view(-1)
    for at, value in enumerate((math.nan, -math.nan, math.inf, -math.inf, 448.0, 464.0, 465.0, 1000.0, -1e4, 3.4e38)):
        flat[(at * 131 + 5) % flat.numel()] = value
    return x


def spoilt(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> Tensor:
    """[pages, P, KH, width] full of a byte that no test writes everywhere."""
    pages, P, KH, width = shape
    if layout == "hnd":
        return torch.full((pages, KH, P, width), 0x55, dtype=torch.uint8).view(dtype).transpose(1, 2)
    wide = torch.full((pages, P, KH, 2 * width), 0x55, dtype=torch.uint8).view(dtype)
    return wide[..., ::2] if layout == "strided" else wide[..., :width]


def room(part: Part, pages: int, P: int, KH: int, given: Scales | None) -> Tensor:
    """Scales as the writer takes them: those that are given, or room for those of tokens."""
    if part.span != "token":
        assert given is not None
        return given.scale
    return torch.full((pages, KH, P), 77.0, dtype=getattr(torch, part.scale)).transpose(1, 2)


@pytest.mark.parametrize("isa", cpu_isas())
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@forms
def test_bytes_are_those_of_the_definition(form: str, dtype: torch.dtype, isa: str) -> None:
    pages, P, KH, D, DV, N = 7, 16, 3, 40, 33, 60
    found = FORMATS[form]
    slots = torch.randperm(pages * P)[:N]
    slots[::9] = -1
    kept = slots >= 0
    for layout in ("nhd", "hnd", "strided"):
        sides: list[tuple[Tensor, Tensor, Scales, Tensor, Tensor]] = []
        for part, width in ((found.k, D), (found.v, DV)):
            x = hostile(N, KH, width).to(dtype)
            # Scales of heads come from tamer values, or infinity would leave nothing but zeros.
            by = scales(x if part.span == "token" else torch.randn(N, KH, width).to(dtype), part)
            cache = spoilt((pages, P, KH, width), CODES[part.codes], layout)
            sides.append((x, quantise(x, part, by), by, cache, room(part, pages, P, KH, by)))
        (k, k_codes, k_by, k_cache, k_scale), (v, v_codes, v_by, v_cache, v_scale) = sides
        with using_isa(isa):
            ops.append(k_cache, v_cache, k, v, slots, k_scale, v_scale)
        for codes, by, cache, scale in ((k_codes, k_by, k_cache, k_scale), (v_codes, v_by, v_cache, v_scale)):
            raw = cache.view(torch.uint8).clone(memory_format=torch.contiguous_format).flatten(0, 1)
            assert same_bits(raw[slots[kept]], codes[kept].view(torch.uint8))
            rest = torch.ones(pages * P, dtype=torch.bool)
            rest[slots[kept]] = False
            assert (raw[rest] == 0x55).all(), "wrote where no token goes"
            if scale.dim() == 3:
                flat = scale.flatten(0, 1)
                assert torch.equal(flat[slots[kept]].nan_to_num(nan=-1.0), by.scale[kept].nan_to_num(nan=-1.0))
                assert (flat[rest] == 77).all()


@forms
def test_many_tokens_with_threads_are_the_same_bytes(form: str) -> None:
    found, N, KH, D = FORMATS[form], 3000, 4, 64
    x = torch.randn(N, KH, D).bfloat16()
    slots = torch.randperm(N)
    results = []
    for threads in (1, 2):
        by = scales(x, found.k)
        k, v = (torch.empty(N // 8, 8, KH, D, dtype=CODES[found.k.codes]) for _ in range(2))
        k_scale, v_scale = (room(found.k, N // 8, 8, KH, by) for _ in range(2))
        with torch_threads(threads):
            ops.append(k, v, x, x, slots, k_scale, v_scale)
        results.append((k, v, k_scale, v_scale))
    for a, b in zip(*results, strict=True):
        assert same_bits(a.flatten(), b.flatten())
    codes = results[0][0].flatten(0, 1)[slots]
    assert same_bits(codes, quantise(x, found.k, scales(x, found.k)))


def test_j6_casts_saturate_and_j7_nan_stays() -> None:
    """J6, J7: values past 448 became NaN in one place and 448 in another, and NaN became a number."""
    x = torch.tensor([448.0, 464.0, 465.0, 1000.0, -1e4, math.inf, -math.inf, math.nan]).view(1, 1, 8)
    for isa in cpu_isas():
        cache = torch.zeros(1, 1, 1, 8, dtype=torch.uint8)
        with using_isa(isa):
            ops.append(cache, cache.clone(), x, x, torch.tensor([0]), None, None)
        assert cache.flatten().tolist() == [0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7E, 0xFE, 0x7F]


def small(**kwargs: Any) -> Callable[[], None]:
    cache = torch.zeros(2, 4, 1, 8, dtype=kwargs.pop("cache", torch.int8))
    scale = kwargs.pop("scale", torch.zeros(2, 4, 1))
    new = torch.zeros(1, 1, 8, dtype=kwargs.pop("new", torch.float32))
    return lambda: ops.append(cache, cache.clone(), new, new, kwargs.get("slots", torch.tensor([0])), scale,
                              None if scale is None else scale.clone())


REFUSED = {
    "no-scale": (small(scale=None), InvalidArgument, "k_scale: must be given for a cache of int8"),
    "codes-for-values": (small(new=torch.int8), InvalidType, "k: dtype must be one of float32"),
    "scale-dtype": (small(scale=torch.zeros(2, 4, 1).double()), InvalidType, "k_scale: dtype must be float32, or"),
    "scale-shape": (small(scale=torch.zeros(2, 4, 2)), InvalidArgument, "k_scale: must be"),
    "16-bit": (small(cache=torch.float32), InvalidArgument, "k_scale: belongs to quantised caches"),
    "slot": (small(slots=torch.tensor([8])), InvalidArgument, r"slots\[0\]: must be below"),
}


@pytest.mark.parametrize(("call", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(call: Callable[[], None], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()

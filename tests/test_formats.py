"""KV formats: how far a stored value is from what was stored, what saturates, and what a token costs in bytes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers import DTYPES, name_of, same_bits
from wavefill import formats, quantise
from wavefill.formats import FORMATS, GROUP, PAGE, Part
from wavefill.quantise import Scales, dequantise, scales, simulate
from wavefill.spec import InvalidArgument, InvalidType

PARTS = {f"{part.codes}-{part.span}": part for form in FORMATS.values() for part in (form.k, form.v)}
parts = pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
INTEGERS = {name: part for name, part in PARTS.items() if part.codes != "e4m3"}
#: Half of the distance between e4m3's codes: of a normal code as a share of it, and of the ones near 0.
E4M3_SHARE, E4M3_LEAST = 2.0**-4, 2.0**-10
#: What float32 adds to an error: a few roundings of a value.
SLACK = 2.0**-21


def values(tokens: int = 2 * PAGE, KH: int = 3, D: int = 40, dtype: torch.dtype = torch.float32) -> Tensor:
    """[2, tokens, KH, D] with channels of their own size and mean, as K has them."""
    x = torch.randn(2, tokens, KH, D) * torch.logspace(-2, 1, D) + torch.linspace(-3, 3, D)
    return x.to(dtype)


def stretched(scale: Tensor, part: Part, x: Tensor) -> Tensor:
    """Scales or offsets, one to an element of x, by indexing: what `quantise` says of their shapes."""
    *rest, S, KH, D = x.shape
    s, d = torch.arange(S)[:, None, None], torch.arange(D)
    h = torch.arange(KH)[:, None]
    at: dict[str, Any] = {"tensor": (), "head": (h,), "token": (..., s, h), "channel": (..., s // PAGE, h, d),
                          "group": (..., s, h, d // GROUP)}
    return scale.float()[at[part.span]].expand(*rest, S, KH, D)


def bound(x: Tensor, part: Part, by: Scales) -> Tensor:
    """The largest error of each element that rounding to the nearest code explains."""
    scale = stretched(by.scale, part, x)
    size = x.float().abs()
    if part.codes == "e4m3":
        return torch.maximum(size * E4M3_SHARE, scale * E4M3_LEAST) + size * SLACK
    # The outermost codes take what the scale's own rounding leaves beyond them (2**-11 of the largest magnitude, or
    # half of float16's least number), and an offset's.
    largest = 15 if part.offset else 127
    beyond = largest * torch.maximum(scale * 2.0**-11, torch.tensor(2.0**-25))
    if by.offset is not None:
        offset = stretched(by.offset, part, x)
        beyond = beyond + torch.maximum(offset.abs() * 2.0**-11, torch.tensor(2.0**-25))
    return torch.maximum(scale / 2, beyond) + (size + scale) * SLACK


@parts
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_errors_stay_within_half_a_code(part: Part, dtype: torch.dtype) -> None:
    x = values(dtype=dtype)
    by = scales(x, part)
    codes = quantise.quantise(x, part, by)
    assert codes.shape == x.shape
    assert by.scale.dtype == getattr(torch, part.scale)
    assert (by.offset is not None) == part.offset
    assert bool(((dequantise(codes, part, by) - x.float()).abs() <= bound(x, part, by)).all())


@parts
@given(data=st.data())
def test_errors_of_any_values(part: Part, data: st.DataObject) -> None:
    """Values from the subnormal ones to near the limits, mixed in one span."""
    KH, D, pages = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 70)), data.draw(st.integers(1, 2))
    largest = math.log2(quantise.limit(part)) - 1
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    low = data.draw(st.floats(-30, 10))
    high = min(low + data.draw(st.floats(0, 12)), largest)
    exponents = torch.rand(pages * PAGE, KH, D, generator=generator) * (high - low) + low
    x = torch.exp2(exponents) * torch.randint(-1, 2, exponents.shape, generator=generator)
    by = scales(x, part)
    back = dequantise(quantise.quantise(x, part, by), part, by)
    assert bool(((back - x).abs() <= bound(x, part, by)).all())


@parts
@pytest.mark.parametrize("D", [1, 5, 31, 32, 33, 80, 96, 112, 192])
def test_head_sizes(part: Part, D: int) -> None:
    x = values(PAGE, KH=2, D=D)
    by = scales(x, part)
    assert bool(((simulate(x, part) - x).abs() <= bound(x, part, by)).all())
    if part.span == "group":
        assert by.scale.shape == (2, PAGE, 2, math.ceil(D / GROUP))


@parts
def test_strides_change_nothing(part: Part) -> None:
    x = values()
    views = [x.transpose(1, 2).contiguous().transpose(1, 2), torch.stack((x, x), -1)[..., 0],
             torch.cat((x, x), -1)[..., :x.shape[-1]]]
    for view in views:
        assert not view.is_contiguous()
        assert same_bits(simulate(view, part), simulate(x, part))


@parts
def test_zeros_and_spans_of_zeros(part: Part) -> None:
    x = values()
    x[0, :PAGE, 1] = 0
    back = simulate(x, part)
    assert same_bits(back[0, :PAGE, 1], torch.zeros_like(back[0, :PAGE, 1]))
    nothing = torch.zeros(PAGE, 2, 32)
    assert same_bits(simulate(nothing, part), nothing)


@pytest.mark.parametrize("value", [0.1, 0.3, -0.3, 1000.4])
def test_spans_of_one_value_have_no_scale_under_int4(value: float) -> None:
    """float16 rounds some of them up and some down."""
    x = torch.full((PAGE, 1, GROUP), value)
    for part in (FORMATS["int4"].k, FORMATS["int4"].v):
        by = scales(x, part)
        back = simulate(x, part)
        assert bool((by.scale >= 0).all())
        assert float((back - x).abs().max()) <= abs(value) * 2.0**-11


@parts
@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 1, 40)], ids=str)
def test_no_tokens(part: Part, shape: tuple[int, ...]) -> None:
    assert simulate(torch.empty(shape), part).shape == shape


@pytest.mark.parametrize("value", [1e-38, 1e-42, 2.0**-149])
@parts
def test_tiny_values_become_zero_or_nearly(part: Part, value: float) -> None:
    back = simulate(torch.full((PAGE, 1, 32), value), part)
    assert bool(torch.isfinite(back).all())
    assert float(back.abs().max()) <= 1.1 * value


@parts
@pytest.mark.parametrize("value", [math.inf, -math.inf, 3e38, -3e38, 1e30])
def test_what_is_too_large_is_clamped(part: Part, value: float) -> None:
    x = values(PAGE)
    x[1, 7, 2, 3] = value
    back = simulate(x, part)
    assert bool(torch.isfinite(back).all())
    most = min(quantise.limit(part), abs(value))
    assert math.copysign(1, value) * float(back[1, 7, 2, 3]) == pytest.approx(most, rel=2.0**-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_j6_casts_to_e4m3_saturate(dtype: torch.dtype) -> None:
    x = torch.tensor([448.0, 464, 465, 1000, -1e4, math.inf, -math.inf, 447, 1.0625, 2.0**-9, 2.0**-10]).to(dtype)
    part, by = Part("e4m3", "tensor", "float32"), Scales(torch.tensor(1.0))
    codes = quantise.quantise(x.view(1, 1, -1), part, by)
    assert codes.float().flatten().tolist() == [448, 448, 448, 448, -448, 448, -448, 448, 1.0, 2.0**-9, 0.0]


def test_j7_nan_of_e4m3_is_an_element_s_own() -> None:
    for name, part in PARTS.items():
        if part.codes != "e4m3":
            continue
        x = values(PAGE)
        clean = simulate(x, part)
        x[1, 7, 2, 3] = math.nan
        back = simulate(x, part)
        assert int(torch.isnan(back).sum()) == 1, name
        assert math.isnan(float(back[1, 7, 2, 3]))
        if part.span != "token":
            clean[1, 7, 2, 3] = math.nan
            assert torch.equal(back.nan_to_num(7), clean.nan_to_num(7))
    bytes_of_nan = torch.tensor([[[0x7F, 0xFF, 0x7E]]], dtype=torch.uint8)
    back = dequantise(bytes_of_nan, PARTS["e4m3-tensor"], Scales(torch.tensor(0.5)))
    assert torch.isnan(back).flatten().tolist() == [True, True, False]
    assert float(back[0, 0, 2]) == 224.0


@pytest.mark.parametrize("part", INTEGERS.values(), ids=INTEGERS)
def test_nan_of_integers_takes_its_span_along(part: Part) -> None:
    x = values()
    clean = simulate(x, part)
    x[1, 7, 2, 3] = math.nan
    back = simulate(x, part)
    assert int(quantise.quantise(x, part, scales(x, part))[1, 7, 2, 3]) == 0
    span = {"token": (1, 7, 2), "channel": (1, slice(0, PAGE), 2, 3), "group": (1, 7, 2, slice(0, GROUP))}[part.span]
    assert bool(torch.isnan(back[span]).all())
    back[span] = clean[span]
    assert same_bits(back, clean)


@parts
def test_stored_values_are_stored_as_they_are(part: Part) -> None:
    x = values()
    by = scales(x, part)
    codes = quantise.quantise(x, part, by)
    back = dequantise(codes, part, by)
    again = quantise.quantise(back, part, by)
    assert same_bits(again.float(), codes.float())
    assert same_bits(dequantise(again, part, by), back)


def test_the_definition_step_by_step() -> None:
    """Channels of a page in NumPy, each step rounded as kernels must."""
    f16, f32 = np.float16, np.float32
    x = values(PAGE)[0]
    int4 = FORMATS["int4"].k
    for h, d in ((0, 0), (1, 20), (2, 39)):
        span = x[:, h, d].numpy()
        offset = f16(span.min())
        scale = f16((span.max() - f32(offset)) * f32(1 / 15))
        codes = np.clip(np.rint((span - f32(offset)) * (f32(1) / f32(scale))), 0, 15)
        by = scales(x, int4)
        assert by.offset is not None
        assert (float(by.scale[0, h, d]), float(by.offset[0, h, d])) == (float(scale), float(offset))
        assert quantise.quantise(x, int4, by)[:, h, d].tolist() == codes.tolist()
        assert simulate(x, int4)[:, h, d].tolist() == (codes.astype(f32) * f32(scale) + f32(offset)).tolist()


def test_the_definition_between_two_codes() -> None:
    """Values in the middle, where a division by the scale gives other codes than the product with its inverse."""
    f32 = np.float32
    scale = torch.rand(200, 1).half()
    x = (torch.arange(-127, 127) + 0.5) * scale.float()[..., None]
    inverse = f32(1) / scale.numpy().astype(f32)[..., None]
    codes = np.clip(np.rint(x.numpy() * inverse), -127, 127)
    assert not np.array_equal(codes, np.clip(np.rint(x.numpy() / scale.numpy()[..., None].astype(f32)), -127, 127))
    assert np.array_equal(quantise.quantise(x, FORMATS["int8"].k, Scales(scale)).numpy(), codes)


def test_the_definition_of_scales() -> None:
    x = torch.randn(1000, 2, 64)
    largest = x.abs().amax(-1).numpy()
    fp8, int8 = (scales(x, part).scale.numpy() for part in (PARTS["e4m3-token"], FORMATS["int8"].k))
    assert np.array_equal(fp8, largest * np.float32(1 / 448))
    assert np.array_equal(int8, (largest * np.float32(1 / 127)).astype(np.float16))


def test_codes_are_the_nearest_and_even_ones_of_two() -> None:
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, -128.5]).view(1, 1, -1)
    codes = quantise.quantise(x, FORMATS["int8"].k, Scales(torch.ones(1, 1)))
    assert codes.flatten().tolist() == [0, 2, 2, 0, -2, 126, 127, -127]
    by = Scales(torch.full((1, 1, 1), 2.0), torch.full((1, 1, 1), -3.0))
    codes = quantise.quantise(torch.tensor([-9.0, -3, -2, 0, 27, 40]).view(1, 1, -1), FORMATS["int4"].v, by)
    assert codes.flatten().tolist() == [0, 0, 0, 2, 15, 15]


def test_int8_makes_the_same_scales_of_what_it_stored() -> None:
    part = FORMATS["int8"].k
    x = values()
    by = scales(x, part)
    back = simulate(x, part)
    assert same_bits(scales(back, part).scale, by.scale)
    assert same_bits(simulate(back, part), back)


def test_j1_j2_scales_that_are_given_are_used() -> None:
    x = values()
    per_head = torch.tensor([0.01, 8.0, 0.25])
    heads, whole = PARTS["e4m3-head"], PARTS["e4m3-tensor"]
    back = dequantise(quantise.quantise(x, heads, Scales(per_head)), heads, Scales(per_head))
    for head, scale in enumerate(per_head):
        one = x[..., head:head + 1, :]
        by = Scales(scale)
        assert same_bits(dequantise(quantise.quantise(one, whole, by), whole, by), back[..., head:head + 1, :])


def test_what_is_refused() -> None:
    channel, int8 = PARTS["int4-channel"], PARTS["int8-token"]
    with pytest.raises(InvalidArgument, match="x: must have whole pages of 64 tokens; got 65 tokens"):
        scales(values(65), channel)
    with pytest.raises(InvalidArgument, match=r"x: must be \[..., S, KH, D\]"):
        scales(torch.zeros(3, 4), int8)
    with pytest.raises(InvalidType, match="x: must be one of float32"):
        scales(values().double(), int8)
    with pytest.raises(InvalidType, match=r"codes: must be torch\.int8"):
        dequantise(torch.zeros(1, 1, 8), int8, Scales(torch.ones(1, 1)))
    with pytest.raises(InvalidArgument, match="kv_format: must be one of fp8-tensor"):
        formats.find("int2")


@pytest.mark.parametrize(("name", "each"), [
    ("fp8-tensor", 256.0), ("fp8-head", 256.0), ("fp8-token-head", 264.0), ("int8", 260.0),
    # K: a scale and an offset of 16 bits for 64 tokens of a channel; V: the same for 32 channels of a token.
    ("int4", 128 / 2 + 128 * 4 / 64 + 128 / 2 + 128 / 32 * 4),
])
def test_bytes_of_a_token(name: str, each: float) -> None:
    form = formats.find(name)
    assert form.token_bytes(8, 128, 128) == 8 * each
    assert form.bits(8, 128) == each / 256 * 8


@parts
@pytest.mark.parametrize(("KH", "D"), [(1, 64), (3, 80), (2, 33)])
def test_bytes_are_those_of_the_tensors(part: Part, KH: int, D: int) -> None:
    by = scales(values(PAGE, KH, D)[0], part)
    own = [x for x in (by.scale, by.offset) if x is not None and part.span not in ("tensor", "head")]
    assert part.page_bytes(KH, D) == PAGE * KH * math.ceil(D * part.bits / 8) + sum(x.nbytes for x in own)


@pytest.mark.parametrize(("tokens", "done"), [(0, 0), (1, 0), (127, 0), (128, 64), (191, 64), (192, 128), (4096, 4032)])
def test_the_tail_has_64_to_127_tokens(tokens: int, done: int) -> None:
    assert FORMATS["int4"].quantised(tokens) == done
    assert FORMATS["int8"].quantised(tokens) == tokens

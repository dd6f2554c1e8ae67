"""How K and V become the codes of a quantised cache and come back: the one definition, in plain torch on any device.

Kernels are held to it bit for bit, so every step is one that a CPU and a GPU round alike. All is float32. A scale is
the span's largest magnitude times float32(1 / largest code), rounded to the scale's dtype. A value times float32(1 /
scale), a division rounded correctly, is rounded to the nearest code, ties to even, and clamped to the outermost codes
(saturating). A code times a float16 scale is exact in float32.

- A span of zeros has scale 0 and gives 0. So does one whose scale is too small for the scale's dtype.
- NaN stays NaN. e4m3 has a code for it, and the scale is that of the span's other values; in int8 and int4 the scale
  of the span is NaN, and with it every value of the span.
- Infinity counts as the largest value that the format holds (`limit`).

Codes are one to an element here, [..., S, KH, D] like the values; how a page packs and orders them is for the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from wavefill.formats import GROUP, PAGE, Part
from wavefill.spec import DTYPE_BYTES, MIN_FLOAT32, invalid, invalid_type

#: Codes -> their dtype in memory; codes -> the largest one; the largest float16.
_DTYPES = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8}
_LARGEST = {"e4m3": 448.0, "int8": 127.0, "int4": 15.0}
_MAX_FLOAT16 = 65504.0


@dataclass(frozen=True)
class Scales:
    """Scales of a tensor and, where the part has them, offsets of the same shape.

    Shapes by span, for values [..., S, KH, D]: "tensor" []; "head" [KH]; "token" [..., S, KH]; "channel" [..., S / 64,
    KH, D]; "group" [..., S, KH, ceil(D / 32)].
    """

    scale: Tensor
    offset: Tensor | None = None


def limit(part: Part) -> float:
    """The largest magnitude that the part holds; infinity and what is larger become it."""
    if part.offset:
        return _MAX_FLOAT16
    return _LARGEST[part.codes] * _MAX_FLOAT16 if part.scale == "float16" else 2.0**127


def scales(x: Tensor, part: Part) -> Scales:
    """Scales of x [..., S, KH, D], float32, bfloat16 or float16, any strides; see `Scales` for their shapes.

    Raises InvalidType for other dtypes, InvalidArgument for fewer than three dimensions and, where a scale spans a
    page, for tokens that are not whole pages.
    """
    spans = _spans(x, part)
    largest = _LARGEST[part.codes]
    dtype = getattr(torch, part.scale)
    if not part.offset:
        size = spans.abs()
        if part.codes == "e4m3":
            size = size.nan_to_num(nan=0.0)
        return Scales(_rounded(_over(size, part, torch.amax), largest, dtype))
    low = _over(spans, part, torch.amin).to(dtype)
    return Scales(_rounded(_over(spans, part, torch.amax) - low.float(), largest, dtype), low)


def quantise(x: Tensor, part: Part, by: Scales) -> Tensor:
    """Codes [..., S, KH, D] of x: torch.float8_e4m3fn, int8 (-127 to 127), or for int4 uint8 (0 to 15).

    by: of `scales`, or scales that were given. Raises as `scales` does.
    """
    spans = _spans(x, part)
    scale = _laid(by.scale.float(), part)
    if by.offset is not None:
        spans = spans - _laid(by.offset.float(), part)
    steps = spans * torch.where(scale > 0, 1 / scale, 0.0)
    most = _LARGEST[part.codes]
    if part.codes == "e4m3":
        codes = steps.clamp(-most, most).to(_DTYPES[part.codes])
    else:
        codes = steps.round().nan_to_num(nan=0.0).clamp(0.0 if part.offset else -most, most).to(_DTYPES[part.codes])
    return _joined(codes, x.shape, part)


def dequantise(codes: Tensor, part: Part, by: Scales) -> Tensor:
    """Values [..., S, KH, D], float32, of codes in memory's dtype (float8_e4m3fn may come as uint8, as vLLM has it)."""
    if part.codes == "e4m3" and codes.dtype == torch.uint8:
        codes = codes.view(torch.float8_e4m3fn)
    if codes.dtype != _DTYPES[part.codes]:
        raise invalid_type("codes", f"must be {_DTYPES[part.codes]} for {part.codes}", codes.dtype, "Use quantise().")
    values = _split(codes.float(), part) * _laid(by.scale.float(), part)
    if by.offset is not None:
        values = values + _laid(by.offset.float(), part)
    return _joined(values, codes.shape, part)


def simulate(x: Tensor, part: Part) -> Tensor:
    """x [..., S, KH, D] as a cache of this part gives it back, float32, with scales made from x itself."""
    by = scales(x, part)
    return dequantise(quantise(x, part, by), part, by)


def _spans(x: Tensor, part: Part) -> Tensor:
    """x checked, in float32 within the limit, in the form of `_split`."""
    if str(x.dtype).removeprefix("torch.") not in DTYPE_BYTES:
        raise invalid_type("x", f"must be one of {', '.join(DTYPE_BYTES)}", x.dtype, "Convert it first.")
    most = limit(part)
    return _split(x.float().clamp(-most, most), part)


def _split(x: Tensor, part: Part) -> Tensor:
    """[..., S, KH, D] as [..., S / 64, 64, KH, D] for channels over a page, [..., S, KH, groups, 32] for groups (the
    last filled up with its own last channel), unchanged for other spans."""
    if x.dim() < 3:
        raise invalid("x", "must be [..., S, KH, D]", tuple(x.shape), "Give tokens, heads and channels.")
    S, D = x.shape[-3], x.shape[-1]
    if part.span == "channel":
        if S % PAGE:
            raise invalid("x", f"must have whole pages of {PAGE} tokens", f"{S} tokens",
                          "Leave the others in the tail.")
        return x.reshape(*x.shape[:-3], S // PAGE, PAGE, *x.shape[-2:])
    if part.span == "group":
        if D % GROUP:
            x = torch.cat((x, x[..., -1:].expand(*x.shape[:-1], -D % GROUP)), -1)
        return x.reshape(*x.shape[:-1], -(-D // GROUP), GROUP)
    return x


def _over(x: Tensor, part: Part, reduce: Callable[..., Tensor]) -> Tensor:
    """`reduce` (amax or amin) over what shares a scale, of values in the form of `_split`."""
    if part.span not in ("tensor", "head"):
        return reduce(x, dim=-3 if part.span == "channel" else -1)
    if not x.numel():
        return x.new_zeros(() if part.span == "tensor" else x.shape[-2])
    return reduce(x) if part.span == "tensor" else reduce(x.flatten(0, -3), dim=(0, -1))


def _laid(scale: Tensor, part: Part) -> Tensor:
    """Scales or offsets, so that they broadcast to values in the form of `_split`."""
    return scale if part.span == "tensor" else scale.unsqueeze(-3 if part.span == "channel" else -1)


def _rounded(size: Tensor, largest: float, dtype: torch.dtype) -> Tensor:
    """Scales for spans of a size; 0 where an offset was rounded past its span, and in place of float32's subnormal
    numbers, whose inverse would be infinite."""
    scale = size * (1 / largest)
    return torch.where(scale < MIN_FLOAT32, 0.0, scale).to(dtype)


def _joined(x: Tensor, shape: torch.Size, part: Part) -> Tensor:
    """What `_split` made, as it was: [..., S, KH, D]."""
    if part.span == "channel":
        return x.flatten(-4, -3)
    if part.span == "group":
        return x.flatten(-2)[..., : shape[-1]]
    return x

"""Cases whose caches hold codes, and the same numbers as a plain case that the reference takes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from helpers import Case, cpu_isas, guarded, make_case, run, using_isa
from wavefill.formats import FORMATS, Part
from wavefill.quantise import dequantise, quantise, scales

#: Formats of 8 bits, whose codes and scales lie on plain pages.
PLAIN = ("fp8-tensor", "fp8-head", "fp8-token-head", "int8")
#: A code that is NaN, and what stands for one where codes have none.
_POISON = {"e4m3": 0x7F, "int8": -128}


@dataclass(frozen=True)
class Quantised:
    """A call on codes: `coded` has them for its caches, `plain` what they stand for, in float32."""

    coded: Case
    plain: Case
    k_scale: Tensor
    v_scale: Tensor | None

    @cached_property
    def scaled(self) -> dict[str, Any]:
        return {"k_scale": self.k_scale, "v_scale": self.v_scale}

    def request(self, b: int) -> Quantised:
        """The b-th request as a batch of its own; its cache is paged."""
        return replace(self, coded=self.coded.request(b), plain=self.plain.request(b))

    def run(self, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return run(self.coded, **self.scaled, **kwargs)

    def check(self, isas: Iterable[str] | None = None, **kwargs: Any) -> None:
        """Runs with the kernels of each instruction set into guarded outputs, and holds them to the reference."""
        for isa in cpu_isas() if isas is None else isas:
            with using_isa(isa):
                out, untouched = guarded(self.coded.out_shape, self.coded.q.dtype)
                result, lse = self.run(out=out, **kwargs)
                untouched()
                try:
                    self.plain.expected.check(result, lse)
                except AssertionError as error:
                    raise AssertionError(f"{isa}: {error}") from error


def make_quantised(form: str, seq_lens: Any, *, as_uint8: bool = False, **kwargs: Any) -> Quantised:
    """`make_case` in a format of `PLAIN`, with scales that differ from head to head and token to token.

    What no token fills holds NaN, or for int8 codes under scales that are NaN. K and V are stored where `make_case`
    stores them, in the same layout.
    """
    case = make_case(seq_lens, **kwargs)
    found = FORMATS[form]
    sizes = torch.logspace(-1.0, 1.0, case.k_cache.shape[2]).view(-1, 1)
    k, k_codes, k_scale = _coded(case.k_cache, found.k, sizes, as_uint8)
    if case.v_cache is None:
        return Quantised(replace(case, k_cache=k_codes), replace(case, k_cache=k), k_scale, None)
    v, v_codes, v_scale = _coded(case.v_cache, found.v, sizes.flip(0), as_uint8)
    return Quantised(replace(case, k_cache=k_codes, v_cache=v_codes), replace(case, k_cache=k, v_cache=v), k_scale,
                     v_scale)


def _coded(cache: Tensor, part: Part, sizes: Tensor, as_uint8: bool) -> tuple[Tensor, Tensor, Tensor]:
    """What the codes stand for, the codes with the cache's strides, and their scales."""
    empty = cache[..., :1].isnan()
    x = torch.where(empty, 0.0, cache.float() * sizes)
    by = scales(x, part)
    values = quantise(x, part, by)
    poisoned = values.view(torch.int8).masked_fill(empty, _POISON[part.codes])
    codes = torch.empty_strided(cache.shape, cache.stride(), dtype=torch.int8).copy_(poisoned)
    scale = by.scale if by.scale.dim() < 3 else by.scale.masked_fill(empty[..., 0], math.nan)
    stands = dequantise(values, part, by).masked_fill(empty, math.nan)
    dtype = torch.int8 if part.codes == "int8" else torch.uint8 if as_uint8 else torch.float8_e4m3fn
    return stands, codes.view(dtype), scale



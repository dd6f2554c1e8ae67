"""What a quantised KV cache stores: codes, scales and bytes of each format. `quantise.py` says how values become codes.

fp8 takes the scales that other engines' caches have (float32): one for all, one a KV head, or one a token and head.
int8 has a scale a token and head. int4 treats K and V as their error needs (KIVI, arXiv:2402.02750; KVQuant,
arXiv:2401.18079): channels of K differ from each other and keep to their values from token to token, so a scale spans
one channel over the 64 tokens of a page; V has no such channels, and a scale spans 32 channels of one token. The newest
64 to 127 tokens stay in 16 bits, since a page is quantised once it and the 64 tokens after it are there.

Why int4 has offsets, and why scales are float16, is measured: error (root mean square) of the attention output of 10
layers of SmolLM2-135M for the last 256 of 1,024 tokens, with all of K or V, and not the other, in 4 bits:

====================================================  ======  ======
codes                                                      K       V
====================================================  ======  ======
-7 to 7                                               16.3 %   7.9 %
-8 to 7, the largest magnitude at -8                  14.3 %   7.0 %
0 to 15, integer zero point                            8.5 %   5.7 %
0 to 15, offset in float16 (this module)               8.0 %   5.5 %
====================================================  ======  ======

An offset costs V half a bit an element, and so would a symmetric scale for every 16 channels (6.4 %). float32 scales
and offsets in place of float16 ones change no figure of int8 (1.7 %) and V, and K's by 0.1.

Nothing here needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from wavefill.spec import invalid

#: Tokens of a page of int4, which K's scales span; channels that a scale of int4's V spans.
PAGE = 64
GROUP = 32
#: Newest tokens that stay in 16 bits under int4, at least.
TAIL = 64

Codes = Literal["e4m3", "int8", "int4"]
Span = Literal["tensor", "head", "token", "channel", "group"]


@dataclass(frozen=True)
class Part:
    """How K or V is stored.

    codes:   "e4m3" (8 bits, largest 448), "int8" (-127 to 127) or "int4" (0 to 15).
    span:    what shares a scale: all of the "tensor"; a KV "head"; a "token" of a head; a "channel" of a head over the
             `PAGE` tokens of a page; a "group" of `GROUP` channels of a token of a head, the last one shorter where
             the head size is no multiple.
    scale:   dtype of scales and offsets.
    """

    codes: Codes
    span: Span
    scale: Literal["float32", "float16"]

    @property
    def offset(self) -> bool:
        """Whether a value is code * scale + offset (the least value of the span), where others are code * scale."""
        return self.codes == "int4"

    @property
    def bits(self) -> int:
        """Of one code."""
        return 4 if self.codes == "int4" else 8

    def scales(self, KH: int, D: int) -> int:
        """Scales of `PAGE` tokens; none where they do not grow with the tokens."""
        return {"tensor": 0, "head": 0, "token": PAGE * KH, "channel": KH * D, "group": PAGE * KH * -(-D // GROUP)}[
            self.span]

    def page_bytes(self, KH: int, D: int) -> int:
        """Bytes of `PAGE` tokens: codes, a row of odd D filled up to a byte, with scales and offsets."""
        each = (4 if self.scale == "float32" else 2) * (2 if self.offset else 1)
        return PAGE * KH * -(-D * self.bits // 8) + self.scales(KH, D) * each


@dataclass(frozen=True)
class Format:
    """A format of KV caches.

    name: as `wavefill bench quality --formats` takes it.
    tail: whether the newest tokens stay in 16 bits.
    """

    name: str
    k: Part
    v: Part
    tail: bool = False

    def quantised(self, tokens: int) -> int:
        """How many of a request's `tokens` are quantised, the oldest ones: whole pages where there is a tail."""
        return max(tokens - TAIL, 0) // PAGE * PAGE if self.tail else tokens

    def token_bytes(self, KH: int, D: int, DV: int) -> float:
        """Bytes of K and V of one quantised token in one layer."""
        return (self.k.page_bytes(KH, D) + self.v.page_bytes(KH, DV)) / PAGE

    def bits(self, KH: int, D: int) -> float:
        """Bits that a quantised element takes, with its share of the scales, where K and V have one head size."""
        return 8 * self.token_bytes(KH, D, D) / (KH * 2 * D)


def _same(name: str, part: Part) -> Format:
    return Format(name, part, part)


_ALL = (
    _same("fp8-tensor", Part("e4m3", "tensor", "float32")),
    _same("fp8-head", Part("e4m3", "head", "float32")),
    _same("fp8-token-head", Part("e4m3", "token", "float32")),
    _same("int8", Part("int8", "token", "float16")),
    Format("int4", Part("int4", "channel", "float16"), Part("int4", "group", "float16"), tail=True),
)
FORMATS = {each.name: each for each in _ALL}
#: What "fp8" stands for: the scales that do best.
_SHORT = {"fp8": "fp8-token-head"}


def find(name: str) -> Format:
    """The format of that name; "fp8" is "fp8-token-head". Raises InvalidArgument."""
    found = FORMATS.get(_SHORT.get(name, name)) if isinstance(name, str) else None
    if found is None:
        raise invalid("kv_format", f"must be one of {', '.join(FORMATS)}", repr(name), "Use one of these.")
    return found

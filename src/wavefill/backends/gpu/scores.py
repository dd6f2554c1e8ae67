"""What becomes of scores between the product and the softmax, in Triton: `wavefill.scores` has the order."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def tanh(x):
    """Within two units in the last place, also near 0, where 1 - exp(-2 |x|) has no digits left."""
    square = x * x
    near = -0.33333299 + square * (0.13331958 + square * (-0.05378668 + square * (0.02080538 - square * 0.00590586)))
    e = tl.exp2(tl.abs(x) * -2.8853900817779268)
    far = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(x) < 0.6, x + x * square * near, tl.where(x < 0, -far, far))


@triton.jit
def with_sinks(SINK, head, there, top, total):
    """(top, total, factor) of softmax states and their sinks: the largest score in base 2, the sum, and what the values
    summed so far take.

    SINK [HQ], read at the query heads `head` where they are `there`.
    """
    # A sink past 2.3e38 would become infinite in base 2.
    sink = tl.minimum(tl.load(SINK + head, mask=there, other=float("-inf")) * LOG2_E, 3.4e38)
    larger = tl.maximum(top, sink)
    base = tl.where(larger == float("-inf"), 0.0, larger)
    factor = tl.exp2(top - base)
    return larger, total * factor + tl.exp2(sink - base), factor


@triton.jit
def draft_sees(MASK, o_token, key, there, base, s_mask, words):
    """Whether the draft mask lets query tokens see keys: [queries, keys] of int1; keys before the draft are seen.

    MASK: int32 [T, words], row stride `s_mask`; o_token [queries] packed indices, read where `there`; key [keys]
    positions; base: position of the request's first query token. Keys past the bits of a row are not seen.
    """
    bit = key - base
    place = o_token.to(tl.int64)[:, None] * s_mask + (bit // 32)[None, :]
    inside = there[:, None] & ((bit >= 0) & (bit // 32 < words))[None, :]
    word = tl.load(MASK + place, mask=inside, other=0)
    return (bit < 0)[None, :] | (((word >> (bit & 31)[None, :]) & 1) != 0)

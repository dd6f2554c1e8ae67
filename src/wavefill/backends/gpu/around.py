"""What runs before and after a library's attention kernel, so that its result is that of `attention`.

Libraries take lengths and offsets as they are, some read values past a request's end, and they leave rows of no request
unwritten. All of that is put right on the device, without a synchronisation.
"""

import triton
import triton.language as tl

from wavefill.backends.gpu.rows import offsets


@triton.jit
def enter(STARTS, LENS, V, GIVEN, FLAGS, B, T, S, apart, s_vb, s_vt, s_vh,
          D: tl.constexpr, DP: tl.constexpr, LOOK: tl.constexpr, AT_ONCE: tl.constexpr, CHUNK: tl.constexpr):
    """STARTS [B + 1], LENS [B]: `cu_seqlens_q` and `seq_lens`; V [B, S, KH, D].

    GIVEN [3 * B + 2]: for the library, offsets that never decrease and stay within T, lengths within S, and the first
    key of each request where requests are `apart` keys from each other.
    FLAGS: one a program of the grid (B, KH, LOOK / AT_ONCE) where LOOK, whether one of its AT_ONCE values of the LOOK
    tokens after the request's last is no number. Without LOOK the grid is one program.
    """
    request, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if request + head + part == 0:
        o_b = tl.arange(0, CHUNK)
        last = tl.maximum(tl.minimum(tl.load(STARTS), T), 0)
        for b0 in range(0, B, CHUNK):
            here = b0 + o_b
            begin, _end, last_here = offsets(STARTS, here, B, T, last)
            length = tl.load(LENS + here, mask=here < B, other=0)
            tl.store(GIVEN + here, begin, mask=here < B)
            tl.store(GIVEN + B + 1 + here, tl.maximum(tl.minimum(length, S), 0), mask=here < B)
            tl.store(GIVEN + 2 * B + 1 + here, here * apart, mask=here < B)
            last = tl.maximum(last, last_here)
        tl.store(GIVEN + B, last)
        tl.store(GIVEN + 3 * B + 1, B * apart)
    if LOOK:
        length = tl.maximum(tl.minimum(tl.load(LENS + request), S), 0)
        o_t = length + part * AT_ONCE + tl.arange(0, AT_ONCE)
        o_d = tl.arange(0, DP)
        at = V + request.to(tl.int64) * s_vb + head.to(tl.int64) * s_vh + o_t.to(tl.int64)[:, None] * s_vt
        seen = ((length > 0) & (o_t < S))[:, None] & (o_d < D)[None, :]
        value = tl.load(at + o_d[None, :], mask=seen, other=0.0).to(tl.float32)
        odd = (value != value) | (tl.abs(value) == float("inf"))
        flag = (request * tl.num_programs(1) + head) * tl.num_programs(2) + part
        tl.store(FLAGS + flag, tl.max(tl.max(odd.to(tl.int32), 1), 0))


@triton.jit
def leave(GIVEN, FLAGS, GATE, FOUND, OUT, LSE, B, T, HQ, flags, causal, s_ot, s_oh, s_lt, s_lh,
          D: tl.constexpr, DP: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, CHUNK: tl.constexpr):
    """GIVEN, and FLAGS of which there are `flags`: what `enter` wrote. GATE [1]: whether one of the flags is set.

    FOUND [HQ, T] float32: the library's LSE, which goes to LSE. Tokens of no request and queries that see no key get 0
    and -inf. An infinite LSE of a library may stand for a sum that is NaN; the output then says so.
    """
    pid = tl.program_id(0)
    o_b = tl.arange(0, CHUNK)
    if pid == 0:
        odd = tl.cast(0, tl.int32)
        for at in range(0, flags, CHUNK):
            odd = tl.maximum(odd, tl.max(tl.load(FLAGS + at + o_b, mask=at + o_b < flags, other=0), 0))
        tl.store(GATE, odd)
    o_t = pid * TOKENS + tl.arange(0, TOKENS)
    m_t = o_t < T
    request = tl.zeros([TOKENS], tl.int32)
    for b0 in range(0, B, CHUNK):
        ends = tl.load(GIVEN + 1 + b0 + o_b, mask=b0 + o_b < B, other=2147483647)
        request += tl.sum((ends[None, :] <= o_t[:, None]).to(tl.int32), 1)
    inside = m_t & (request < B) & (o_t >= tl.load(GIVEN))
    end = tl.load(GIVEN + 1 + request, mask=inside, other=0)
    length = tl.load(GIVEN + B + 1 + request, mask=inside, other=0)
    sees = inside & (length > 0) & ((causal == 0) | (length - end + o_t >= 0))
    token = o_t.to(tl.int64)
    for h0 in range(0, HQ, HEADS):
        o_h = (h0 + tl.arange(0, HEADS)).to(tl.int64)
        m_h = m_t[:, None] & (o_h < HQ)[None, :]
        b_lse = tl.load(FOUND + o_h[None, :] * T + token[:, None], mask=m_h & sees[:, None], other=float("-inf"))
        odd = m_h & sees[:, None] & (tl.abs(b_lse) == float("inf"))
        value = tl.load(OUT + token[:, None] * s_ot + o_h[None, :] * s_oh, mask=odd, other=0.0).to(tl.float32)
        b_lse = tl.where(odd, tl.where(value != value, value, float("-inf")), b_lse)
        tl.store(LSE + token[:, None] * s_lt + o_h[None, :] * s_lh, b_lse, mask=m_h)
    empty = m_t & (sees == 0)
    if tl.max(empty.to(tl.int32), 0) > 0:
        o_d = tl.arange(0, DP)
        nothing = tl.zeros([TOKENS, DP], tl.float32).to(OUT.dtype.element_ty)
        for h in range(0, HQ):
            tl.store(OUT + token[:, None] * s_ot + tl.cast(h, tl.int64) * s_oh + o_d[None, :], nothing,
                     mask=empty[:, None] & (o_d < D)[None, :])

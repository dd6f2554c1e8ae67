"""Tokens into the pages of a cache: the kernel of `wavefill::append`."""

import triton
import triton.language as tl


@triton.jit
def write(K, V, NEW_K, NEW_V, SLOTS, N, KH, pages, page_size, s_kp, s_kt, s_kh, s_kd, s_vp, s_vt, s_vh, s_vd, s_nt,
          s_nh, s_nd, s_mt, s_mh, s_md,
          D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, ROWS: tl.constexpr,
          WIDE: tl.constexpr, UNIT: tl.constexpr):
    """K [pages, page_size, KH, D] and V with DV, at the SLOTS [N] int64, become NEW_K [N, KH, D] and NEW_V.

    A program writes ROWS heads of tokens; s_n and s_m are the strides of NEW_K and NEW_V. Slots below 0 or past the
    cache are skipped. WIDE: there are 2**31 slots or heads of tokens, or more. UNIT: last strides are 1.
    """
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    o_r = program * ROWS + tl.arange(0, ROWS)
    token = o_r // KH
    head = (o_r % KH).to(tl.int64)
    slot = tl.load(SLOTS + token, mask=token < N, other=-1)
    m_r = (slot >= 0) & (slot < tl.cast(pages, tl.int64) * page_size)
    slot = tl.where(m_r, slot, 0)
    if not WIDE:
        slot = slot.to(tl.int32)
    page = (slot // page_size).to(tl.int64)
    offset = (slot % page_size).to(tl.int64)
    token = token.to(tl.int64)
    o_d = tl.arange(0, DP)
    o_v = tl.arange(0, DVP)
    m_d = m_r[:, None] & (o_d < D)[None, :]
    m_v = m_r[:, None] & (o_v < DV)[None, :]
    from_d, to_d, from_v, to_v = o_d, o_d, o_v, o_v
    if not UNIT:
        from_d, to_d, from_v, to_v = o_d * s_nd, o_d * s_kd, o_v * s_md, o_v * s_vd
    b_k = tl.load(NEW_K + (token * s_nt + head * s_nh)[:, None] + from_d[None, :], mask=m_d)
    b_v = tl.load(NEW_V + (token * s_mt + head * s_mh)[:, None] + from_v[None, :], mask=m_v)
    tl.store(K + (page * s_kp + offset * s_kt + head * s_kh)[:, None] + to_d[None, :], b_k, mask=m_d)
    tl.store(V + (page * s_vp + offset * s_vt + head * s_vh)[:, None] + to_v[None, :], b_v, mask=m_v)

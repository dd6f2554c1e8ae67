"""Decode attention in plain Triton: any GPU that Triton serves, any page size and strides, and the interpreter.

A program is a worker. It derives its run of tiles from the lengths (`cursor`), walks one segment after the other
through a software-pipelined loop, and stores a finished row or a partial state that `merge` combines afterwards.
"""

import triton
import triton.language as tl

from wavefill.backends.gpu.cursor import STREAM_K, next_segment, pieces, start, totals


@triton.jit
def decode(Q, K, V, TABLE, SEQ, BEFORE, OUT, LSE, PART_O, PART_M, PART_L, qk_scale,
           B, KH, G, page_size, window, limit, param, rule,
           s_qb, s_qh, s_kp, s_kt, s_kh, s_kd, s_vp, s_vt, s_vh, s_vd, s_ob, s_oh, s_lb, s_lh, s_table,
           D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, GP: tl.constexpr, T: tl.constexpr,
           CHUNK: tl.constexpr, KIND: tl.constexpr, PAGED: tl.constexpr, SCANNED: tl.constexpr, UNIT: tl.constexpr,
           STAGES: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr, PDL: tl.constexpr):
    """Shapes and strides are those of `launch.decode`; DP and DVP are D and DV rounded up to powers of two, GP is G
    rounded up so or, where the grid has a second dimension, the query heads of a program.

    UNIT:   K and V have unit last strides and rows of whole 16-byte vectors. WIDEN: arithmetic in float32, for the
    interpreter, whose bfloat16 is not to be trusted.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    worker = tl.program_id(0)
    workers = tl.num_programs(0)
    o_b = tl.arange(0, CHUNK)
    total, param = totals(SEQ, BEFORE, B, KH, workers, window, limit, param, rule, o_b, CHUNK, T, KIND, SCANNED)
    row, length, first, n, size, cut, head, piece, t, end, at, stop = start(
        SEQ, BEFORE, B, KH, worker, workers, total, window, limit, param, rule, o_b, CHUNK, T, KIND, SCANNED)
    o_g = tl.program_id(1) * GP + tl.arange(0, GP)
    o_d = tl.arange(0, DP)
    o_v = tl.arange(0, DVP)
    o_t = tl.arange(0, T)
    m_g = o_g < G
    m_d = o_d < D
    m_v = o_v < DV
    if UNIT:
        s_kd = 1
        s_vd = 1
    opened = 0
    while at < stop:
        q_row = Q + row.to(tl.int64) * s_qb + (head * G + o_g).to(tl.int64) * s_qh
        b_q = tl.load(q_row[:, None] + o_d[None, :], mask=m_g[:, None] & m_d[None, :], other=0.0)
        if WIDEN:
            b_q = b_q.to(tl.float32)
        b_m = tl.full([GP], float("-inf"), tl.float32)
        b_l = tl.zeros([GP], tl.float32)
        b_acc = tl.zeros([GP, DVP], tl.float32)
        row_table = TABLE + row.to(tl.int64) * s_table
        low = tl.where(window > 0, tl.maximum(length - window, 0), 0)
        pages = _pages(row_table, (first + t) * T + o_t, low, length, page_size, PAGED)
        for tile in tl.range(first + t, first + end, num_stages=STAGES):
            token = tile * T + o_t
            m_t = (token >= low) & (token < length)
            if PAGED:
                page = pages.to(tl.int64)
                place = token % page_size
            else:
                page = tl.full([T], 0, tl.int64) + row
                place = token
            # Read a tile ahead. Were they read for this tile, the compiler would give half of the stages to them,
            # and K and V would share what is left.
            pages = _pages(row_table, token + T, low, length, page_size, PAGED)
            k_row = K + page * s_kp + place.to(tl.int64) * s_kt + head.to(tl.int64) * s_kh
            v_row = V + page * s_vp + place.to(tl.int64) * s_vt + head.to(tl.int64) * s_vh
            b_k = tl.load(k_row[:, None] + o_d[None, :].to(tl.int64) * s_kd, mask=m_t[:, None] & m_d[None, :],
                          other=0.0)
            b_v = tl.load(v_row[:, None] + o_v[None, :].to(tl.int64) * s_vd, mask=m_t[:, None] & m_v[None, :],
                          other=0.0)
            if WIDEN:
                b_k = b_k.to(tl.float32)
                b_v = b_v.to(tl.float32)
            b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * qk_scale
            b_s = tl.where(m_t[None, :], b_s, float("-inf"))
            b_new = tl.maximum(b_m, tl.max(b_s, 1))
            b_base = tl.where(b_new == float("-inf"), 0.0, b_new)  # where all scores are minus infinity so far
            b_p = tl.exp2(b_s - b_base[:, None])
            b_alpha = tl.exp2(b_m - b_base)
            b_l = b_l * b_alpha + tl.sum(b_p, 1)
            b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_alpha[:, None], input_precision=PRECISION)
            b_m = b_new
        if KIND == STREAM_K:
            alone = end - t == n
            slot = 2 * worker.to(tl.int64) + opened
        else:
            count = pieces(n, size, KIND)
            alone = count == 1
            slot = cut + head.to(tl.int64) * count + piece
        if alone:
            o_row = OUT + row.to(tl.int64) * s_ob + (head * G + o_g).to(tl.int64) * s_oh
            b_o = b_acc / tl.where(b_l == 0, 1.0, b_l)[:, None]
            tl.store(o_row[:, None] + o_v[None, :], b_o.to(OUT.dtype.element_ty), mask=m_g[:, None] & m_v[None, :])
            tl.store(LSE + row.to(tl.int64) * s_lb + (head * G + o_g).to(tl.int64) * s_lh,
                     (b_m + tl.log2(b_l)) * 0.6931471805599453, mask=m_g)
        else:
            p_row = slot * G + o_g
            tl.store(PART_O + p_row[:, None] * DV + o_v[None, :], b_acc, mask=m_g[:, None] & m_v[None, :])
            tl.store(PART_M + p_row, b_m, mask=m_g)
            tl.store(PART_L + p_row, b_l, mask=m_g)
        opened = 1
        at += end - t
        if at < stop:
            row, length, first, n, size, cut, head, piece, t, end = next_segment(
                SEQ, row, length, first, n, size, cut, head, piece, end, KH, at, stop, window, limit, param, rule,
                T, KIND)


@triton.jit
def _pages(row_table, token, low, length, page_size, PAGED: tl.constexpr):
    """The pages of a vector of tokens, 0 for those that are not seen."""
    if PAGED:
        return tl.load(row_table + token // page_size, mask=(token >= low) & (token < length), other=0)
    return tl.zeros_like(token)

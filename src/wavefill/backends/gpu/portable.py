"""Attention in plain Triton: any GPU that Triton serves, any page size and strides, every option, and the interpreter.

A program is a worker. It derives its run of tiles from the lengths (`cursor`), walks one segment after the other
through a software-pipelined loop, and stores a finished row or a partial state that `merge` combines afterwards.
"""

import triton
import triton.language as tl

from wavefill.backends.gpu.cursor import STREAM_K, next_segment, pieces, start, totals
from wavefill.backends.gpu.rows import BASE, COUNT, FIRST, POSITION, REQUEST, START
from wavefill.backends.gpu.scores import LOG2_E, draft_sees, tanh, with_sinks


@triton.jit
def attend(Q, K, V, TABLE, SEQ, BEFORE, OUT, LSE, PART_O, PART_M, PART_L, SINK, SLOPES, MASK, qk_scale, cap,
           B, KH, G, queries, page_size, causal, window, limit, param, rule, words,
           s_qt, s_qh, s_kp, s_kt, s_kh, s_kd, s_vp, s_vt, s_vh, s_vd, s_ot, s_oh, s_lt, s_lh, s_table, s_mask,
           D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, GP: tl.constexpr, T: tl.constexpr,
           CHUNK: tl.constexpr, KIND: tl.constexpr, PAGED: tl.constexpr, SCANNED: tl.constexpr, UNIT: tl.constexpr,
           STAGES: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr, PDL: tl.constexpr,
           SEVERAL: tl.constexpr, CAPPED: tl.constexpr, SLOPED: tl.constexpr, SINKS: tl.constexpr,
           MASKED: tl.constexpr):
    """Shapes and strides are those of `launch.plan`; DP and DVP are D and DV rounded up to powers of two, GP the
    queries of a unit rounded up so or, where the grid has a second dimension, those of a program.

    A unit is a (row, KV head). Its `queries` are the G heads of the group for each query token that a row has at
    most, token by token; B rows are the requests, or where SEVERAL those of `rows.expand`, which SEQ then points at.

    qk_scale, cap: `launch.make` has them. SINK, SLOPES: float32 [HQ], MASK: int32 [T, words]; read where SINKS, SLOPED
    and MASKED.
    UNIT:   K and V have unit last strides and rows of whole 16-byte vectors. WIDEN: arithmetic in float32, for the
    interpreter, whose bfloat16 is not to be trusted.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    worker = tl.program_id(0)
    workers = tl.num_programs(0)
    o_b = tl.arange(0, CHUNK)
    total, param = totals(SEQ, BEFORE, B, KH, workers, window, limit, param, rule, o_b, CHUNK, T, KIND, SCANNED,
                          SEVERAL)
    row, length, first, n, size, cut, head, piece, t, end, at, stop = start(
        SEQ, BEFORE, B, KH, worker, workers, total, window, limit, param, rule, o_b, CHUNK, T, KIND, SCANNED, SEVERAL)
    o_q = tl.program_id(1) * GP + tl.arange(0, GP)
    o_d = tl.arange(0, DP)
    o_v = tl.arange(0, DVP)
    o_t = tl.arange(0, T)
    o_g = o_q % G if SEVERAL else o_q
    m_q = o_q < queries
    m_d = o_d < D
    m_v = o_v < DV
    least = tl.where((causal != 0) | (window > 0), 0, -2147483647)
    most = tl.where(window > 0, window, 2147483647)
    if UNIT:
        s_kd = 1
        s_vd = 1
    opened = 0
    while at < stop:
        if SEVERAL:
            request = tl.load(SEQ + REQUEST * B + row)
            low = tl.load(SEQ + START * B + row)
            o_i = o_q // G  # which of the row's query tokens
            m_q = o_i < tl.load(SEQ + COUNT * B + row)
            o_token = tl.load(SEQ + FIRST * B + row) + o_i
            at_key = tl.load(SEQ + POSITION * B + row) + o_i
            base = tl.load(SEQ + BASE * B + row)
        else:
            request = row
            low = tl.where(window > 0, tl.maximum(length - window, 0), 0)
            o_token = row
            if SLOPED:
                at_key = tl.zeros([GP], tl.int32) + length - 1
        o_head = head * G + o_g
        if SLOPED:
            b_slope = tl.load(SLOPES + o_head, mask=m_q, other=0.0) * LOG2_E
        q_row = Q + o_token.to(tl.int64) * s_qt + o_head.to(tl.int64) * s_qh
        b_q = tl.load(q_row[:, None] + o_d[None, :], mask=m_q[:, None] & m_d[None, :], other=0.0)
        if WIDEN:
            b_q = b_q.to(tl.float32)
        b_m = tl.full([GP], float("-inf"), tl.float32)
        b_l = tl.zeros([GP], tl.float32)
        b_acc = tl.zeros([GP, DVP], tl.float32)
        row_table = TABLE + request.to(tl.int64) * s_table
        pages = _pages(row_table, (first + t) * T + o_t, low, length, page_size, PAGED)
        for tile in tl.range(first + t, first + end, num_stages=STAGES):
            token = tile * T + o_t
            m_t = (token >= low) & (token < length)
            if PAGED:
                page = pages.to(tl.int64)
                place = token % page_size
            else:
                page = tl.full([T], 0, tl.int64) + request
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
            if CAPPED:
                b_s = cap * tanh(b_s)
            if SEVERAL or SLOPED:
                behind = at_key[:, None] - token[None, :]
            if SLOPED:
                b_s -= b_slope[:, None] * tl.abs(behind).to(tl.float32)
            if SEVERAL:
                seen = m_t[None, :] & (behind >= least) & (behind < most)
                if MASKED:  # noqa: SIM102 - this is decided as the kernel is compiled, the other as it runs
                    if tile * T + T > base:
                        seen = seen & draft_sees(MASK, o_token, token, m_q, base, s_mask, words)
                b_s = tl.where(seen, b_s, float("-inf"))
            else:
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
            if SINKS:
                b_m, b_l, b_factor = with_sinks(SINK, o_head, m_q, b_m, b_l)
                b_acc *= b_factor[:, None]
            o_row = OUT + o_token.to(tl.int64) * s_ot + o_head.to(tl.int64) * s_oh
            b_o = b_acc / tl.where(b_l == 0, 1.0, b_l)[:, None]
            tl.store(o_row[:, None] + o_v[None, :], b_o.to(OUT.dtype.element_ty), mask=m_q[:, None] & m_v[None, :])
            tl.store(LSE + o_token.to(tl.int64) * s_lt + o_head.to(tl.int64) * s_lh,
                     (b_m + tl.log2(b_l)) * 0.6931471805599453, mask=m_q)
        else:
            p_row = slot * queries + o_q
            tl.store(PART_O + p_row[:, None] * DV + o_v[None, :], b_acc, mask=m_q[:, None] & m_v[None, :])
            tl.store(PART_M + p_row, b_m, mask=m_q)
            tl.store(PART_L + p_row, b_l, mask=m_q)
        opened = 1
        at += end - t
        if at < stop:
            row, length, first, n, size, cut, head, piece, t, end = next_segment(
                SEQ, B, row, length, first, n, size, cut, head, piece, end, KH, at, stop, window, limit, param, rule,
                T, KIND, SEVERAL)


@triton.jit
def _pages(row_table, token, low, length, page_size, PAGED: tl.constexpr):
    """The pages of a vector of tokens, 0 for those that are not seen."""
    if PAGED:
        return tl.load(row_table + token // page_size, mask=(token >= low) & (token < length), other=0)
    return tl.zeros_like(token)

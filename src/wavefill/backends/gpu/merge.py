"""What runs beside the attention kernel: the merge of partial states after it, and a scan of many lengths before it."""

import triton
import triton.language as tl

from wavefill.backends.gpu.cursor import (
    SPLITS,
    STREAM_K,
    batch,
    cut_at,
    divide,
    locate,
    piece_size,
    pieces,
    tiles_of,
    totals,
)
from wavefill.backends.gpu.rows import COUNT, FIRST, PLANES
from wavefill.backends.gpu.scores import with_sinks


@triton.jit
def owner(at, total, workers):
    """The worker that owns a linear tile."""
    result = tl.cast(0, tl.int64)
    if total < 2147483647 // workers:  # as in `divide`
        result += ((at + 1).to(tl.int32) * workers - 1) // total.to(tl.int32)
    else:
        result += ((at + 1) * workers - 1) // total
    return result


@triton.jit
def merge(SEQ, BEFORE, OUT, LSE, PART_O, PART_M, PART_L, SINK, B, KH, G, queries, tokens, workers, window, limit, param,
          rule, s_ot, s_oh, s_lt, s_lh,
          DV: tl.constexpr, COLUMNS: tl.constexpr, STATES: tl.constexpr, T: tl.constexpr, CHUNK: tl.constexpr,
          KIND: tl.constexpr, BY_WORKER: tl.constexpr, SCANNED: tl.constexpr, PDL: tl.constexpr,
          SEVERAL: tl.constexpr, SINKS: tl.constexpr):
    """One program a (unit, one of its `queries`, COLUMNS of the output); unit and queries are those of `portable`.

    STATES partial states are read at a time and always in order, so the bits do not depend on who was last. Units of
    one segment were written by the attention kernel and are left alone; rows without keys are written here, and where
    SEVERAL the query tokens of no request, which have no sinks either, up to `tokens`.

    BY_WORKER: the grid has a program a worker in place of one a unit. Program w then merges the unit in whose middle
    worker w starts, if no worker before it does; there are at most as many as workers, however many units there are.
    """
    pid = tl.program_id(0)
    o_b = tl.arange(0, CHUNK)
    o_c = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    o_s = tl.arange(0, STATES)
    m_c = o_c < DV
    total, param = totals(SEQ, BEFORE, B, KH, workers, window, limit, param, rule, o_b, CHUNK, T, KIND, SCANNED,
                          SEVERAL)
    per, rest = divide(total, workers)
    row = tl.cast(0, tl.int32)
    head = tl.cast(0, tl.int32)
    n = tl.cast(0, tl.int32)
    begin = tl.cast(0, tl.int64)
    cut = tl.cast(0, tl.int64)
    if BY_WORKER:
        mine = cut_at(pid, workers, per, rest)
        if (total > 0) & (mine < total):
            row, tiles, cut = locate(SEQ, BEFORE, B, KH, mine, window, limit, param, rule, o_b, CHUNK, T, KIND, SCANNED,
                                     SEVERAL)
            n = tiles_of(SEQ, row, B, window, limit, T, SEVERAL)
            head = (mine - tiles).to(tl.int32) // n
            begin = tiles + head.to(tl.int64) * n
            first = owner(begin, total, workers) == owner(tl.maximum(mine - 1, begin), total, workers)
            if (mine == begin) | (owner(mine, total, workers) != pid) | (first == 0):
                n = tl.cast(0, tl.int32)  # not in a middle, owning nothing, or not the first to start in it
    else:
        row = pid // KH
        head = pid % KH
        n = tiles_of(SEQ, row, B, window, limit, T, SEVERAL)
        if n == 0:
            query = tl.program_id(1)
            _no_keys(SEQ, OUT, LSE, SINK, row, B, query // G, head * G + query % G, o_c, m_c, s_ot, s_oh, s_lt, s_lh,
                     SEVERAL, SINKS)
        else:
            begin, cut = _before(SEQ, BEFORE, B, KH, row, window, limit, param, rule, o_b, CHUNK, T, KIND, SCANNED,
                                 SEVERAL)
            begin += head.to(tl.int64) * n
    low = tl.cast(0, tl.int64)
    high = tl.cast(0, tl.int64)
    if n > 0:
        if KIND == STREAM_K:
            low = owner(begin, total, workers)
            high = owner(begin + n - 1, total, workers) + 1
        else:
            count = pieces(n, piece_size(n, param, rule, KH, KIND), KIND)
            low = cut + head.to(tl.int64) * count
            high = low + count
    # What divisions of 64 bits, which are calls of functions, would have to keep comes after them.
    query = tl.program_id(1)
    token, g = query // G, query % G  # of the row, and of the group
    out_token = row
    if SEVERAL:
        out_token = tl.load(SEQ + FIRST * B + row) + token
        high = tl.where(token < tl.load(SEQ + COUNT * B + row), high, low)
    if PDL:  # in every program: the end of this grid must mean the end of the one before it
        tl.extra.cuda.gdc_wait()
    if high - low > 1:
        b_max = float("-inf")
        b_sum = 0.0
        b_acc = tl.zeros([COLUMNS], tl.float32)
        for part in tl.range(low, high, STATES):
            at = part + o_s
            m_s = at < high
            if KIND == STREAM_K:  # a worker's first segment has slot 0; only the unit's first can be a later one
                run = cut_at(at, workers, per, rest)
                m_s &= run < cut_at(at + 1, workers, per, rest)
                at = 2 * at + tl.where(run < begin, 1, 0)
            at = at * queries + query
            p_m = tl.load(PART_M + at, mask=m_s, other=float("-inf"))
            p_l = tl.load(PART_L + at, mask=m_s, other=0.0)
            p_o = tl.load(PART_O + (at * DV)[:, None] + o_c[None, :], mask=m_s[:, None] & m_c[None, :], other=0.0)
            b_new = tl.maximum(b_max, tl.max(p_m, 0))
            base = tl.where(b_new == float("-inf"), 0.0, b_new)
            old = tl.exp2(b_max - base)
            weight = tl.exp2(p_m - base)
            b_sum = b_sum * old + tl.sum(p_l * weight, 0)
            b_acc = b_acc * old + tl.sum(p_o * weight[:, None], 0)
            b_max = b_new
        b_head = head * G + g
        if SINKS:
            b_max, b_sum, factor = with_sinks(SINK, b_head, True, b_max, b_sum)
            b_acc *= factor
        b_o = b_acc / tl.where(b_sum == 0, 1.0, b_sum)
        tl.store(OUT + out_token.to(tl.int64) * s_ot + b_head.to(tl.int64) * s_oh + o_c,
                 b_o.to(OUT.dtype.element_ty), mask=m_c)
        if tl.program_id(2) == 0:
            tl.store(LSE + out_token.to(tl.int64) * s_lt + b_head.to(tl.int64) * s_lh,
                     (b_max + tl.log2(b_sum)) * 0.6931471805599453)
    if BY_WORKER:
        for empty in range(pid, B, tl.num_programs(0)):
            there = tiles_of(SEQ, empty, B, window, limit, T, SEVERAL)
            if there == 0:
                for h in range(0, KH):
                    _no_keys(SEQ, OUT, LSE, SINK, empty, B, token, h * G + g, o_c, m_c, s_ot, s_oh, s_lt, s_lh, SEVERAL,
                             SINKS)
    if SEVERAL:
        _no_request(SEQ, OUT, LSE, SINK, B, KH * G, tokens, query, queries, o_c, m_c, s_ot, s_oh, s_lt, s_lh)


@triton.jit
def _no_keys(SEQ, OUT, LSE, SINK, row, B, token, head, o_c, m_c, s_ot, s_oh, s_lt, s_lh, SEVERAL: tl.constexpr,
             SINKS: tl.constexpr):
    """The result of a query of a row without keys, if the row has so many tokens."""
    if SEVERAL:
        if token < tl.load(SEQ + COUNT * B + row):
            _nothing(OUT, LSE, SINK, tl.load(SEQ + FIRST * B + row) + token, head, o_c, m_c, s_ot, s_oh, s_lt, s_lh,
                     SINKS)
    else:
        _nothing(OUT, LSE, SINK, row, head, o_c, m_c, s_ot, s_oh, s_lt, s_lh, SINKS)


@triton.jit
def _nothing(OUT, LSE, SINK, token, head, o_c, m_c, s_ot, s_oh, s_lt, s_lh, SINKS: tl.constexpr):
    """The result of a query that sees no key: nothing, and its sink."""
    tl.store(OUT + tl.cast(token, tl.int64) * s_ot + tl.cast(head, tl.int64) * s_oh + o_c,
             tl.zeros_like(o_c).to(OUT.dtype.element_ty), mask=m_c)
    if tl.program_id(2) == 0:
        at = LSE + tl.cast(token, tl.int64) * s_lt + tl.cast(head, tl.int64) * s_lh
        if SINKS:
            tl.store(at, tl.load(SINK + head))
        else:
            tl.store(at, float("-inf"))


@triton.jit
def join_pieces(SEQ, OUT, LSE, PART_O, PART_M, PART_L, SINK, B, KH, G, queries, tokens, window, limit, param,
                s_ot, s_oh, s_lt, s_lh,
                DV: tl.constexpr, QUERIES: tl.constexpr, T: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
                SINKS: tl.constexpr):
    """`merge` for chunks of prompts, of which all rows are cut into at most `param` pieces, a few: one program a (unit,
    QUERIES of its `queries`). Units of one piece were written by the attention kernel."""
    row, head = tl.program_id(0) // KH, tl.program_id(0) % KH
    o_b = tl.arange(0, CHUNK)
    o_c = tl.arange(0, DV)
    o_q = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    count = tl.minimum(tiles_of(SEQ, row, B, window, limit, T, True), param)
    _tiles, first = _before(SEQ, SEQ, B, KH, row, window, limit, param, 0, o_b, CHUNK, T, SPLITS, False, True)
    first += head * count
    token = tl.load(SEQ + FIRST * B + row) + o_q // G
    b_head = head * G + o_q % G
    there = (o_q < queries) & (o_q // G < tl.load(SEQ + COUNT * B + row))
    if PDL:
        tl.extra.cuda.gdc_wait()
    if count == 0:
        b_lse = tl.full([QUERIES], float("-inf"), tl.float32)
        if SINKS:
            b_lse = tl.load(SINK + b_head, mask=there, other=float("-inf"))
        tl.store(OUT + (token.to(tl.int64) * s_ot + b_head.to(tl.int64) * s_oh)[:, None] + o_c[None, :],
                 tl.zeros([QUERIES, DV], tl.float32).to(OUT.dtype.element_ty), mask=there[:, None])
        tl.store(LSE + token.to(tl.int64) * s_lt + b_head.to(tl.int64) * s_lh, b_lse, mask=there)
    if count > 1:
        b_max = tl.full([QUERIES], float("-inf"), tl.float32)
        b_sum = tl.zeros([QUERIES], tl.float32)
        b_acc = tl.zeros([QUERIES, DV], tl.float32)
        for piece in range(0, count):
            at = (first + piece) * queries + o_q
            p_m = tl.load(PART_M + at, mask=there, other=float("-inf"))
            p_l = tl.load(PART_L + at, mask=there, other=0.0)
            p_o = tl.load(PART_O + (at * DV)[:, None] + o_c[None, :], mask=there[:, None], other=0.0)
            b_new = tl.maximum(b_max, p_m)
            base = tl.where(b_new == float("-inf"), 0.0, b_new)
            old, weight = tl.exp2(b_max - base), tl.exp2(p_m - base)
            b_sum = b_sum * old + p_l * weight
            b_acc = b_acc * old[:, None] + p_o * weight[:, None]
            b_max = b_new
        if SINKS:
            b_max, b_sum, factor = with_sinks(SINK, b_head, there, b_max, b_sum)
            b_acc *= factor[:, None]
        b_o = b_acc / tl.where(b_sum == 0, 1.0, b_sum)[:, None]
        tl.store(OUT + (token.to(tl.int64) * s_ot + b_head.to(tl.int64) * s_oh)[:, None] + o_c[None, :],
                 b_o.to(OUT.dtype.element_ty), mask=there[:, None])
        tl.store(LSE + token.to(tl.int64) * s_lt + b_head.to(tl.int64) * s_lh,
                 (b_max + tl.log2(b_sum)) * 0.6931471805599453, mask=there)
    _no_request(SEQ, OUT, LSE, SINK, B, KH * G, tokens, tl.program_id(1), tl.num_programs(1), o_c, o_c < DV,
                s_ot, s_oh, s_lt, s_lh)


@triton.jit
def _no_request(SEQ, OUT, LSE, SINK, B, HQ, tokens, head, step, o_c, m_c, s_ot, s_oh, s_lt, s_lh):
    """The results of query tokens before the first row and past the last, for every `step`th head from `head` on."""
    pid = tl.program_id(0)
    used = tl.load(SEQ + PLANES * B)
    first = tl.load(SEQ + PLANES * B + 2)
    for padding in range(pid, first + tokens - used, tl.num_programs(0)):
        where = tl.where(padding < first, padding, padding - first + used)
        for h in range(head, HQ, step):
            _nothing(OUT, LSE, SINK, where, h, o_c, m_c, s_ot, s_oh, s_lt, s_lh, False)


@triton.jit
def _before(SEQ, BEFORE, B, KH, row, window, limit, param, rule, o_b,
            CHUNK: tl.constexpr, T: tl.constexpr, KIND: tl.constexpr, SCANNED: tl.constexpr, SEVERAL: tl.constexpr):
    """Tiles and pieces of all heads of the rows before `row`."""
    if SCANNED:
        return tl.load(BEFORE + row), tl.load(BEFORE + B + 1 + row)
    tiles = tl.cast(0, tl.int64)
    cut = tl.cast(0, tl.int64)
    for b0 in range(0, row, CHUNK):
        n = tiles_of(SEQ, b0 + o_b, B, window, limit, T, SEVERAL, b0 + o_b < row)
        tiles += tl.sum(n.to(tl.int64), 0)
        if KIND != STREAM_K:
            cut += tl.sum(pieces(n, piece_size(n, param, rule, KH, KIND), KIND).to(tl.int64), 0)
    return tiles * KH, cut * KH


@triton.jit
def prefix(SEQ, BEFORE, B, KH, workers, window, limit, param, rule,
           T: tl.constexpr, CHUNK: tl.constexpr, KIND: tl.constexpr, SEVERAL: tl.constexpr):
    """BEFORE [2 * B + 3] int64: tiles [B + 1] and pieces [B + 1] of all heads of the rows before each, then the
    schedule's parameter; one program.

    Runs first when there are more requests than a worker scans by itself.
    """
    o_b = tl.arange(0, CHUNK)
    _total, param = batch(SEQ, B, KH, workers, window, limit, param, rule, o_b, CHUNK, T, KIND, SEVERAL)
    tiles = tl.cast(0, tl.int64)
    cut = tl.cast(0, tl.int64)
    for b0 in range(0, B, CHUNK):
        m_b = b0 + o_b < B
        n = tiles_of(SEQ, b0 + o_b, B, window, limit, T, SEVERAL, m_b)
        parts = pieces(n, piece_size(n, param, rule, KH, KIND), KIND).to(tl.int64) * KH
        n = n.to(tl.int64) * KH
        tl.store(BEFORE + b0 + o_b, tiles + tl.cumsum(n, 0) - n, mask=m_b)
        tl.store(BEFORE + B + 1 + b0 + o_b, cut + tl.cumsum(parts, 0) - parts, mask=m_b)
        tiles += tl.sum(n, 0)
        cut += tl.sum(parts, 0)
    tl.store(BEFORE + B, tiles)
    tl.store(BEFORE + 2 * B + 1, cut)
    tl.store(BEFORE + 2 * B + 2, param)

"""From query offsets in device memory to rows: blocks of a request's query tokens, and the keys that each reads.

A row takes the place that a request has in decode. `wavefill.schedule.row_ranges` is the definition; a test compares.
"""

import triton
import triton.language as tl

#: Planes of ROWS [7 * R + 3] int32, each of R entries: the first key that a query of the row sees and one past the last
#: (both 0 where none sees a key), the request, the packed index of the first query token, the number of query tokens (0
#: in entries without a row), the position of the first, and that of the request's first. The last two may be negative.
START, STOP, REQUEST, FIRST, COUNT, POSITION, BASE = (tl.constexpr(i) for i in range(7))
#: After the planes: where the query tokens of requests end, the rows in use, and where those query tokens begin.
PLANES = tl.constexpr(7)


@triton.jit
def offsets(STARTS, b, B, T, last):
    """Where the query tokens of a vector of requests begin and end, and where the last of them ends.

    Offsets past the `T` query tokens are cut to them, and one below an earlier one (`last` and on) to that.
    """
    begin = tl.load(STARTS + b, mask=b < B, other=0)
    end = tl.load(STARTS + b + 1, mask=b < B, other=0)
    begin = tl.maximum(tl.associative_scan(tl.minimum(begin, T), 0, _larger), last)
    end = tl.maximum(tl.minimum(end, T), begin)
    return begin, end, tl.max(end, 0)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def expand(STARTS, LENS, ROWS, GATE, gated, B, R, T, block, causal, window, limit, CHUNK: tl.constexpr,
           SIZE: tl.constexpr, PDL: tl.constexpr):
    """STARTS [B + 1], LENS [B]: `cu_seqlens_q` and `seq_lens`; ROWS: see above. A program fills SIZE entries of R.

    block:  query tokens of a row at most.
    window: 0 for none; limit: keys that a request can have.
    gated:  whether there is a GATE [1]. Where it holds 0 there are no rows, and all T tokens count as some request's,
            so that the kernels after this one write nothing.

    PDL:    whether the kernel after this one may begin with it; it waits for the rows by itself.

    Rows are ordered by request, then by block. Every program looks at all requests, CHUNK at a time, and counts for
    each of its rows those that end before it.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    o_r = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    o_b = tl.arange(0, CHUNK)
    request = tl.zeros([SIZE], tl.int32)
    above = tl.zeros([SIZE], tl.int32)
    first = tl.zeros([SIZE], tl.int32)
    total = tl.cast(0, tl.int32)
    origin = tl.maximum(tl.minimum(tl.load(STARTS), T), 0)
    last = origin
    for b0 in range(0, B, CHUNK):
        begin, end, last_here = offsets(STARTS, b0 + o_b, B, T, last)
        blocks = tl.where(b0 + o_b < B, (end - begin + block - 1) // block, 0)
        after = total + tl.cumsum(blocks, 0)
        passed = (after[None, :] <= o_r[:, None]) & (b0 + o_b < B)[None, :]
        request += tl.sum(passed.to(tl.int32), 1)
        above = tl.maximum(above, tl.max(tl.where(passed, after[None, :], 0), 1))
        first = tl.maximum(first, tl.max(tl.where(passed, end[None, :], 0), 1))
        total += tl.sum(blocks, 0)
        last = tl.maximum(last, last_here)
    first = tl.maximum(first, origin)
    if gated != 0:
        shut = tl.load(GATE) == 0
        total = tl.where(shut, 0, total)
        origin = tl.where(shut, 0, origin)
        last = tl.where(shut, T, last)
    used = o_r < total
    end = tl.maximum(tl.minimum(tl.load(STARTS + request + 1, mask=used, other=0), T), first)
    length = tl.maximum(tl.minimum(tl.load(LENS + request, mask=used, other=0), limit), 0)
    base = length - (end - first)
    begin = (o_r - above) * block
    count = tl.minimum(end - first - begin, block)
    position = base + begin
    stop = tl.where((causal != 0) | (window > 0), tl.minimum(length, position + count), length)
    start = tl.where(window > 0, tl.maximum(tl.maximum(position + 1, 0) - window, 0), 0)
    seen = used & (start < stop)
    m_r = o_r < R
    tl.store(ROWS + START * R + o_r, tl.where(seen, start, 0), mask=m_r)
    tl.store(ROWS + STOP * R + o_r, tl.where(seen, stop, 0), mask=m_r)
    tl.store(ROWS + REQUEST * R + o_r, tl.where(used, request, 0), mask=m_r)
    tl.store(ROWS + FIRST * R + o_r, tl.where(used, first + begin, 0), mask=m_r)
    tl.store(ROWS + COUNT * R + o_r, tl.where(used, count, 0), mask=m_r)
    tl.store(ROWS + POSITION * R + o_r, tl.where(used, position, 0), mask=m_r)
    tl.store(ROWS + BASE * R + o_r, tl.where(used, base, 0), mask=m_r)
    if tl.program_id(0) == 0:
        tl.store(ROWS + PLANES * R, last)
        tl.store(ROWS + PLANES * R + 1, total)
        tl.store(ROWS + PLANES * R + 2, origin)

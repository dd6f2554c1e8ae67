"""The arithmetic of `wavefill.schedule` on the device: which tiles a worker owns, from lengths in device memory.

Every worker (a program of the grid) derives its own run of tiles as it starts, so there is no plan and one captured
graph serves any lengths. Both attention kernels and the merge kernel call these functions; a test compares what they
give with `schedule.build`, in the interpreter and on a GPU.

All three schedules share one rule, `Table.owner`: worker w owns the segments whose first tile lies in the linear tiles
[w*N//W, (w+1)*N//W). Under stream_k segments are cut there; under the others they are pieces of a row that are not cut.

A row is a request of one query token, and SEQ its length; where SEVERAL, a row is a block of a request's query tokens,
and SEQ what `rows.expand` wrote: B first keys, then B ends of the rows' keys. `window` and `limit` are not read then.

Functions take scalars, and where they scan rows the index vector `o_b` [CHUNK] of the caller, which carries the
caller's layout.
"""

import triton
import triton.language as tl

#: How segments are cut; `schedule.Plan.kind` and its parameter become one of these and a rule.
STREAM_K, SPLITS, CHUNKS = (tl.constexpr(i) for i in range(3))
#: How the parameter of SPLITS or CHUNKS is meant: as given; FIXED_ITEMS_PER_WORKER; FlashDecoding's; the bound of
#: invariant.
GIVEN, ITEMS, FLASHDECODING, BOUNDED = (tl.constexpr(i) for i in range(4))
#: Constants of `wavefill.schedule`; a test holds them equal.
ITEMS_PER_WORKER = tl.constexpr(4)
MAX_PIECES = tl.constexpr(1024)
GROWN_LEAST, GROWN_QUARTER, GROWN_PIECES, GROWN_MOST = (tl.constexpr(n) for n in (4, 16, 64, 64))
MAX_SPLITS = tl.constexpr(128)


@triton.jit
def keys_of(SEQ, row, B, window, limit, SEVERAL: tl.constexpr, mask=None):
    """First key and one past the last of a row, or of a vector of rows, where `mask` holds.

    A length past the cache's capacity is cut to it. A negative length has no tiles, and nothing past the capacity is
    read, so a wrong length cannot lead out of the table. It gives no error here: WAVEFILL_CHECK=1 looks for such
    lengths on the host.
    """
    if SEVERAL:
        if mask is None:
            return tl.load(SEQ + row), tl.load(SEQ + B + row)
        else:
            return tl.load(SEQ + row, mask=mask, other=0), tl.load(SEQ + B + row, mask=mask, other=0)
    else:
        if mask is None:
            length = tl.minimum(tl.load(SEQ + row), limit)
        else:
            length = tl.minimum(tl.load(SEQ + row, mask=mask, other=0), limit)
        return tl.where(window > 0, tl.maximum(length - window, 0), 0), length


@triton.jit
def row_tiles(low, length, T: tl.constexpr):
    """First tile of a row with the keys [low, length), and its number of tiles; of vectors, too."""
    first = low // T
    return first, tl.where(length > low, (length - 1) // T + 1 - first, 0)


@triton.jit
def tiles_of(SEQ, row, B, window, limit, T: tl.constexpr, SEVERAL: tl.constexpr, mask=None):
    """The number of tiles alone, from memory."""
    low, length = keys_of(SEQ, row, B, window, limit, SEVERAL, mask)
    _, n = row_tiles(low, length, T)
    return n


@triton.jit
def piece_size(n, param, rule, KH, KIND: tl.constexpr):
    """What cuts a row of n tiles: its number of pieces (SPLITS) or the tiles of a piece (CHUNKS)."""
    if KIND == SPLITS:
        return tl.minimum(n, param)
    if KIND == CHUNKS:
        most = tl.maximum(MAX_PIECES // KH, 1)
        quarter = tl.minimum(tl.maximum((n + 3) // 4, GROWN_LEAST), GROWN_QUARTER)
        heads = tl.minimum(KH, GROWN_PIECES)
        spread = (tl.minimum(n, GROWN_MOST * GROWN_PIECES) * heads + GROWN_PIECES - 1) // GROWN_PIECES
        chunk = tl.where(param > 0, param, tl.maximum(quarter, tl.minimum(spread, GROWN_MOST)))
        return tl.where(rule == BOUNDED, tl.maximum(chunk, (n + most - 1) // most), param)
    return n


@triton.jit
def pieces(n, size, KIND: tl.constexpr):
    """Pieces of a row of n tiles; of vectors, too. Rows without tiles have none."""
    if KIND == SPLITS:
        return size
    if KIND == CHUNKS:
        return (n + size - 1) // size
    return tl.minimum(n, 1)


@triton.jit
def boundary(p, n, size, KIND: tl.constexpr):
    """First tile of piece p."""
    if KIND == SPLITS:
        return (p.to(tl.int64) * n // size).to(tl.int32)
    return tl.minimum(p.to(tl.int64) * size, n).to(tl.int32)


@triton.jit
def piece_from(t, n, size, KIND: tl.constexpr):
    """The first piece that starts at tile t or after it."""
    if KIND == SPLITS:
        return ((t.to(tl.int64) * size + n - 1) // n).to(tl.int32)
    return (t + size - 1) // size


@triton.jit
def batch(SEQ, B, KH, workers, window, limit, param, rule, o_b,
          CHUNK: tl.constexpr, T: tl.constexpr, KIND: tl.constexpr, SEVERAL: tl.constexpr):
    """Tiles of the batch, all heads counted, and the parameter of its schedule."""
    total = tl.cast(0, tl.int64)
    rows = tl.cast(0, tl.int32)
    longest = tl.cast(0, tl.int32)
    for b0 in range(0, B, CHUNK):
        n = tiles_of(SEQ, b0 + o_b, B, window, limit, T, SEVERAL, b0 + o_b < B)
        total += tl.sum(n.to(tl.int64), 0)
        if KIND == SPLITS:
            rows += tl.sum((n > 0).to(tl.int32), 0)
            longest = tl.maximum(longest, tl.max(n, 0))
    if KIND == SPLITS:
        param = splits(rows, longest, KH, workers, param, rule)
    return total * KH, param


@triton.jit
def totals(SEQ, BEFORE, B, KH, workers, window, limit, param, rule, o_b,
           CHUNK: tl.constexpr, T: tl.constexpr, KIND: tl.constexpr, SCANNED: tl.constexpr, SEVERAL: tl.constexpr):
    """`batch`, from the scan where there was one."""
    if SCANNED:
        return tl.load(BEFORE + B), tl.load(BEFORE + 2 * B + 2).to(tl.int32)
    return batch(SEQ, B, KH, workers, window, limit, param, rule, o_b, CHUNK, T, KIND, SEVERAL)


@triton.jit
def splits(rows, longest, KH, workers, param, rule):
    """`schedule.resolve` for Fixed: the split count of every row."""
    units = tl.maximum(rows.to(tl.int64) * KH, 1)
    if rule == ITEMS:
        param = tl.minimum((ITEMS_PER_WORKER * workers + units - 1) // units, longest).to(tl.int32)
    if rule == FLASHDECODING:
        param = tl.cast(1, tl.int32)
        if (longest > 4) & (5 * units < 4 * workers):
            most = tl.minimum(tl.minimum(MAX_SPLITS, workers), longest)
            best_items = tl.cast(0, tl.int64)
            best_places = tl.cast(1, tl.int64)
            for s in range(1, most + 1):
                items = units * s
                places = (items + workers - 1) // workers * workers
                better = items * best_places > best_items * places
                best_items = tl.where(better, items, best_items)
                best_places = tl.where(better, places, best_places)
            param = most.to(tl.int32)
            for back in range(0, most):
                items = units * (most - back)
                places = (items + workers - 1) // workers * workers
                param = tl.where(100 * items * best_places >= 85 * best_items * places, most - back, param).to(tl.int32)
    return tl.maximum(param, 1)


@triton.jit
def locate(SEQ, BEFORE, B, KH, target, window, limit, param, rule, o_b,
           CHUNK: tl.constexpr, T: tl.constexpr, KIND: tl.constexpr, SCANNED: tl.constexpr, SEVERAL: tl.constexpr):
    """The row that holds the linear tile `target`, and the tiles and pieces of all heads before the row.

    BEFORE: int64 [2 * B + 3] of `merge.prefix` where SCANNED, else not read.
    """
    if SCANNED:
        low = tl.cast(0, tl.int32)
        high = B
        while high - low > 1:
            middle = (low + high) // 2
            after = tl.load(BEFORE + middle) <= target
            low = tl.where(after, middle, low)
            high = tl.where(after, high, middle)
        return low, tl.load(BEFORE + low), tl.load(BEFORE + B + 1 + low)
    b0 = tl.cast(0, tl.int32)
    tiles = tl.cast(0, tl.int64)
    cut = tl.cast(0, tl.int64)
    n = tiles_of(SEQ, o_b, B, window, limit, T, SEVERAL, o_b < B)
    here = tl.sum(n.to(tl.int64), 0) * KH
    while (tiles + here <= target) & (b0 + CHUNK < B):
        tiles += here
        if KIND != STREAM_K:
            cut += tl.sum(pieces(n, piece_size(n, param, rule, KH, KIND), KIND).to(tl.int64), 0) * KH
        b0 += CHUNK
        n = tiles_of(SEQ, b0 + o_b, B, window, limit, T, SEVERAL, b0 + o_b < B)
        here = tl.sum(n.to(tl.int64), 0) * KH
    n = n.to(tl.int64) * KH
    before = (tiles + tl.cumsum(n, 0) <= target) & (b0 + o_b < B)
    if KIND != STREAM_K:
        n_row = n // KH
        parts = pieces(n_row, piece_size(n_row, param, rule, KH, KIND), KIND).to(tl.int64) * KH
        cut += tl.sum(tl.where(before, parts, 0), 0)
    return b0 + tl.sum(before.to(tl.int32), 0), tiles + tl.sum(tl.where(before, n, 0), 0), cut


@triton.jit
def divide(total, workers):
    """Quotient and remainder of the tiles by the workers; nearly always in 32 bits, which take a tenth of the time."""
    if total < 2147483648:
        low = total.to(tl.int32)
        return (low // workers).to(tl.int64), (low % workers).to(tl.int32)
    return total // workers, (total % workers).to(tl.int32)


@triton.jit
def cut_at(worker, workers, per, rest):
    """worker * total // workers, the linear tile at which a worker's run begins; of vectors, too.

    per, rest: `divide(total, workers)`. Workers are at most 2**15, so that the product of two fits.
    """
    return worker.to(tl.int64) * per + (worker.to(tl.int32) * rest // workers).to(tl.int64)


@triton.jit
def next_row(SEQ, row, B, window, limit, T: tl.constexpr, SEVERAL: tl.constexpr):
    """The next row that has tiles, its length, first tile and tiles; the caller knows that there is one."""
    row += 1
    low, length = keys_of(SEQ, row, B, window, limit, SEVERAL)
    first, n = row_tiles(low, length, T)
    while n == 0:
        row += 1
        low, length = keys_of(SEQ, row, B, window, limit, SEVERAL)
        first, n = row_tiles(low, length, T)
    return row, length, first, n


@triton.jit
def start(SEQ, BEFORE, B, KH, worker, workers, total, window, limit, param, rule, o_b,
          CHUNK: tl.constexpr, T: tl.constexpr, KIND: tl.constexpr, SCANNED: tl.constexpr, SEVERAL: tl.constexpr):
    """Where a worker's run begins: a cursor, and the linear tile at which it stops.

    A cursor is (row, length, first, n, size, cut, head, piece, t, end, at): the row, its keys, its first tile, its
    tiles, what cuts it, pieces before the row, the KV head, the piece, the next tile and the end of the segment
    (both counted from `first`), and the linear index of t. There is no segment where at >= stop.
    """
    per, rest = divide(total, workers)
    at = cut_at(worker, workers, per, rest)
    stop = cut_at(worker + 1, workers, per, rest)
    row = tl.cast(0, tl.int32)
    length = tl.cast(0, tl.int32)
    first = tl.cast(0, tl.int32)
    n = tl.cast(1, tl.int32)
    size = tl.cast(1, tl.int32)
    cut = tl.cast(0, tl.int64)
    head = tl.cast(0, tl.int32)
    piece = tl.cast(0, tl.int32)
    t = tl.cast(0, tl.int32)
    end = tl.cast(0, tl.int32)
    if at < stop:
        row, tiles, cut = locate(SEQ, BEFORE, B, KH, at, window, limit, param, rule, o_b, CHUNK, T, KIND, SCANNED,
                                 SEVERAL)
        low, length = keys_of(SEQ, row, B, window, limit, SEVERAL)
        first, n = row_tiles(low, length, T)
        size = piece_size(n, param, rule, KH, KIND).to(tl.int32)
        within = (at - tiles).to(tl.int32)
        head = within // n
        t = within % n
        if KIND == STREAM_K:
            end = tl.minimum(n, t + stop - at).to(tl.int32)
        else:
            piece = piece_from(t, n, size, KIND)
            up = boundary(piece, n, size, KIND)
            at += up - t
            t = up
            end = boundary(piece + 1, n, size, KIND)
            if (t == n) & (at < stop):
                row, length, first, n, size, cut, head, piece, t, end = next_unit(
                    SEQ, B, row, length, first, n, size, cut, head, KH, at, stop, window, limit, param, rule,
                    T, KIND, SEVERAL)
    return row, length, first, n, size, cut, head, piece, t, end, at, stop


@triton.jit
def next_unit(SEQ, B, row, length, first, n, size, cut, head, KH, at, stop, window, limit, param, rule,
              T: tl.constexpr, KIND: tl.constexpr, SEVERAL: tl.constexpr):
    """The cursor's fields at the next KV head or row."""
    head += 1
    if head == KH:
        head = tl.cast(0, tl.int32)
        cut += pieces(n, size, KIND).to(tl.int64) * KH
        row, length, first, n = next_row(SEQ, row, B, window, limit, T, SEVERAL)
        size = piece_size(n, param, rule, KH, KIND).to(tl.int32)
    piece = tl.cast(0, tl.int32)
    t = tl.cast(0, tl.int32)
    end = boundary(piece + 1, n, size, KIND)
    if KIND == STREAM_K:
        end = tl.minimum(n, stop - at).to(tl.int32)
    return row, length, first, n, size, cut, head, piece, t, end


@triton.jit
def next_segment(SEQ, B, row, length, first, n, size, cut, head, piece, t, KH, at, stop, window, limit, param, rule,
                 T: tl.constexpr, KIND: tl.constexpr, SEVERAL: tl.constexpr):
    """The cursor's fields at the segment after the one that ended at tile t; the caller knows that there is one."""
    end = t
    if t == n:
        row, length, first, n, size, cut, head, piece, t, end = next_unit(
            SEQ, B, row, length, first, n, size, cut, head, KH, at, stop, window, limit, param, rule,
            T, KIND, SEVERAL)
    else:
        piece += 1
        end = boundary(piece + 1, n, size, KIND)
    return row, length, first, n, size, cut, head, piece, t, end

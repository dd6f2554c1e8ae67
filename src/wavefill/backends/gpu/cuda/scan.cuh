// A warp reads the batch's lengths, or where SEVERAL its rows': totals, and the row that has a linear tile.
#pragma once

constexpr u32 ALL = 0xffffffffu;

__device__ __forceinline__ Row row_at(const Args& a, i32 b, i32 opening = 0) {
#if SEVERAL
    return b < a.B ? row_of(row_word(a, b), row_word(a, i64(a.B) + b), opening) : Row{0, 0, 0};
#else
    const i32 length = least(b < a.B ? __ldg(a.seq + b) : 0, a.limit);
    return row_of(a.window > 0 ? most(length - a.window, 0) : 0, length, opening);
#endif
}

// The sum over lanes.
__device__ __forceinline__ Tiles all(Tiles x) {
    if (!WIDE) return __reduce_add_sync(ALL, i32(x));
    for (i32 d = 16; d; d /= 2) x += __shfl_xor_sync(ALL, x, d);
    return x;
}

struct Batch {
    Tiles tiles;       // of all heads
    i32 rows, longest; // rows that have tiles; tiles of the longest
    Row mine;          // the lane's own row, where lanes are enough
};

__device__ __forceinline__ Batch batch_of(const Args& a, i32 lane) {
    if (SCANNED) return {Tiles(__ldg(a.before + a.B)), a.B, 0, {}};
    Row row = row_at(a, lane);
    Tiles sum = row.n;
    i32 rows = row.n > 0, longest = row.n;
    UNROLL_NOT for (i32 b0 = lane + 32; b0 - lane < a.B; b0 += 256)
#pragma unroll
        for (i32 b = b0; b < b0 + 256; b += 32) {
            const i32 n = row_at(a, b).n;
            sum += n, rows += n > 0, longest = most(longest, n);
        }
    return {all(sum) * a.KH, __reduce_add_sync(ALL, rows), KIND == CHUNKS ? 0 : __reduce_max_sync(ALL, longest), row};
}

__device__ __forceinline__ Tiles sum_before(Tiles x, i32 lane) {
    Tiles sum = x;
    UNROLL_NOT for (i32 d = 1; d < 32; d *= 2) {
        Tiles other = __shfl_up_sync(ALL, sum, d);
        if (lane >= d) sum += other;
    }
    return sum - x;
}

// Rows in blocks, one a lane: finds the lane that has `target` and moves (row, tiles, cut) to the start of its block.
__device__ __forceinline__ void narrow(Tiles target, Tiles tiles_here, Tiles cut_here, i32 rows, i32 lane, i32& row,
                                       Tiles& tiles, Tiles& cut) {
    Tiles before = tiles + sum_before(tiles_here, lane);
    i32 found = __popc(__ballot_sync(ALL, before + tiles_here <= target));
    if (KIND != STREAM_K) {
        Tiles cuts = cut + sum_before(cut_here, lane);
        cut = __shfl_sync(ALL, cuts, found);
    }
    tiles = __shfl_sync(ALL, before, found);
    row += found * rows;
}

// The row that has the linear tile `target`, and the tiles and pieces of all heads before it.
__device__ __forceinline__ i32 locate(const Args& a, Tiles target, i32 param, i32 opening, i32 lane, Tiles& tiles,
                                      Tiles& cut) {
    tiles = cut = 0;
    i32 row = 0;
    if (SCANNED) {
        i32 high = a.B;
        while (high - row > 1) {
            i32 middle = (row + high) / 2;
            if (__ldg(a.before + middle) <= target)
                row = middle;
            else
                high = middle;
        }
        tiles = __ldg(a.before + row);
        cut = __ldg(a.before + a.B + 1 + row);
        return row;
    }
    auto parts = [&](i32 n) { return KIND == STREAM_K ? 0 : pieces(n, piece_size(n, param, a.rule, a.KH)); };
    UNROLL_NOT for (i32 each = (a.B + 31) / 32, last = a.B;; each = 1) { // rows a lane, then one
        Tiles n = 0, p = 0;
        UNROLL_NOT for (i32 b = row + lane * each; b < least(row + lane * each + each, last); b++) {
            const i32 here = row_at(a, b, opening).n;
            n += here, p += parts(here);
        }
        narrow(target, n * a.KH, p * a.KH, each, lane, row, tiles, cut);
        if (each == 1) break;
        last = least(row + each, a.B);
    }
    return row;
}

__device__ __forceinline__ void next_row(const Args& a, Cursor& c) {
    Row r;
    do r = row_at(a, ++c.row, c.opening);
    while (r.n == 0 && c.row + 1 < a.B);
    c.length = r.length, c.first = r.first, c.n = r.n;
}

__device__ __forceinline__ void next_unit(const Args& a, Cursor& c, i32 param, Tiles left) {
    if (++c.head == a.KH) {
        c.head = 0;
        if (KIND != STREAM_K) c.cut += Tiles(pieces(c.n, c.size)) * a.KH;
        next_row(a, c);
        c.size = piece_size(c.n, param, a.rule, a.KH);
    }
    c.piece = c.t = 0;
    c.end = KIND == STREAM_K ? i32(least(Tiles(c.n), left)) : boundary(1, c.n, c.size);
}

// The cursor at the linear tile `at`, or at the first piece that begins there or later (`at` moves along).
__device__ __forceinline__ Cursor cursor_at(const Args& a, const Batch& batch, Tiles& at, Tiles stop, i32 param,
                                            i32 opening, i32 lane) {
    Cursor c;
    Tiles tiles = 0;
    c.row = 0, c.cut = 0, c.opening = opening;
    Row r;
    if (SCANNED || a.B > 1) {
        c.row = locate(a, at, param, opening, lane, tiles, c.cut);
        r = row_at(a, c.row, opening);
    } else {
        r = {__shfl_sync(ALL, batch.mine.length, 0), __shfl_sync(ALL, batch.mine.first, 0),
             __shfl_sync(ALL, batch.mine.n, 0)};
    }
    c.length = r.length, c.first = r.first, c.n = r.n;
    c.size = piece_size(c.n, param, a.rule, a.KH);
    c.head = WIDE ? i32(over64(at - tiles, c.n)) : i32(u32(at - tiles) / u32(c.n));
    c.t = i32(at - tiles - Tiles(c.head) * c.n);
    c.piece = 0;
    if (KIND == STREAM_K) {
        c.end = i32(least(Tiles(c.n), c.t + stop - at));
    } else {
        c.piece = piece_from(c.t, c.n, c.size);
        i32 up = boundary(c.piece, c.n, c.size);
        at += up - c.t;
        c.t = up;
        c.end = boundary(c.piece + 1, c.n, c.size);
        if (c.t == c.n && at < stop) next_unit(a, c, param, stop - at);
    }
    return c;
}

// To the segment after this one; the caller has moved `at` and knows that there is one.
__device__ __forceinline__ void next_segment(const Args& a, Cursor& c, i32 param, Tiles left) {
    if (c.end == c.n) return next_unit(a, c, param, left);
    c.piece++;
    c.t = c.end;
    c.end = boundary(c.piece + 1, c.n, c.size);
}

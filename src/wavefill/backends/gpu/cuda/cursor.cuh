// The arithmetic of wavefill.schedule in CUDA C++: which tiles a run has, and how rows are cut. Nothing here is the
// device's alone, so a test compiles it for the host and holds it to the Python tables.
//
// variant.cuh is written for each compilation: T (tokens of a tile), KIND (how rows are cut) and the choices of
// decode.cu.
#pragma once

#include "variant.cuh"

#if defined(__CUDACC__)
#define HOST_DEVICE __host__ __device__ __forceinline__
#define UNROLL_NOT _Pragma("unroll 1") // code is read from memory anew in every call
#else
#define HOST_DEVICE inline
#define UNROLL_NOT
#endif

typedef int i32;
typedef unsigned u32;
typedef long long i64;
#if WIDE
typedef i64 Tiles;
#else
typedef i32 Tiles; // of a batch that cannot have more
#endif

enum { STREAM_K, SPLITS, CHUNKS, ROUNDS };
enum { GIVEN, ITEMS, FLASHDECODING, BOUNDED };
constexpr i32 ITEMS_PER_WORKER = 4, MAX_PIECES = 1024, MAX_SPLITS = 128;
constexpr i32 OPENING = 7; // tiles that are read in the time that a further segment of a run costs
constexpr i32 GROWN_LEAST = 4, GROWN_QUARTER = 16, GROWN_PIECES = 64, GROWN_MOST = 64;

HOST_DEVICE i32 least(i32 a, i32 b) { return a < b ? a : b; }
HOST_DEVICE i32 most(i32 a, i32 b) { return a > b ? a : b; }
HOST_DEVICE i64 least(i64 a, i64 b) { return a < b ? a : b; }
HOST_DEVICE i64 most(i64 a, i64 b) { return a > b ? a : b; }

// a / b for a >= 0, b > 0; nearly always in 32 bits, which take a tenth of the time.
HOST_DEVICE i64 over64(i64 a, i64 b) {
    if (((a | b) >> 32) == 0) return u32(a) / u32(b);
    return a / b;
}
HOST_DEVICE Tiles over(Tiles a, i32 b) { return WIDE ? Tiles(over64(a, b)) : Tiles(u32(a) / u32(b)); }

// The tiles of a row, of keys [begin, length): the first, and how many.
struct Row {
    i32 length, first, n;
};

HOST_DEVICE Row row_of(i32 begin, i32 length, i32 opening) {
    i32 first = u32(begin) / T;
    return {length, first, length > begin ? i32(u32(length - 1) / T) + 1 - first + opening : 0};
}

// What cuts a row of n tiles: its number of pieces (SPLITS) or the tiles of a piece (CHUNKS).
HOST_DEVICE i32 piece_size(i32 n, i32 param, i32 rule, i32 KH) {
    if (KIND == SPLITS) return least(n, param);
    if (KIND == CHUNKS && rule == BOUNDED) {
        const i32 pieces = most(MAX_PIECES / KH, 1), heads = least(KH, GROWN_PIECES);
        const i32 quarter = least(most((n + 3) / 4, GROWN_LEAST), GROWN_QUARTER);
        const i32 spread = (least(n, GROWN_MOST * GROWN_PIECES) * heads + GROWN_PIECES - 1) / GROWN_PIECES;
        return most(param ? param : most(quarter, least(spread, GROWN_MOST)), (n + pieces - 1) / pieces);
    }
    return KIND == CHUNKS ? param : n;
}

// Pieces of a row of n tiles; rows without tiles have none.
HOST_DEVICE i32 pieces(i32 n, i32 size) {
    if (KIND == SPLITS) return size;
    if (KIND == CHUNKS) return (n + size - 1) / size;
    return least(n, 1);
}

// First tile of piece p.
HOST_DEVICE i32 boundary(i32 p, i32 n, i32 size) {
    if (KIND == SPLITS) return i32(over64(i64(p) * n, size));
    return i32(least(i64(p) * size, i64(n)));
}

// The first piece that starts at tile t or after it.
HOST_DEVICE i32 piece_from(i32 t, i32 n, i32 size) {
    if (KIND == SPLITS) return i32(over64(i64(t) * size + n - 1, n));
    return (t + size - 1) / size;
}

// schedule.resolve for Fixed: the splits of every row.
HOST_DEVICE i32 splits(i32 rows, i32 longest, i32 KH, i32 workers, i32 param, i32 rule) {
    i64 units = rows ? i64(rows) * KH : 1;
    if (rule == ITEMS) param = i32(least(over64(i64(ITEMS_PER_WORKER) * workers + units - 1, units), i64(longest)));
    if (rule == FLASHDECODING) {
        param = 1;
        if (longest > 4 && 5 * units < 4 * i64(workers)) {
            i32 top = least(least(MAX_SPLITS, workers), longest);
            i64 best_items = 0, best_places = 1;
            for (i32 s = 1; s <= top; s++) {
                i64 items = units * s, places = over64(items + workers - 1, workers) * workers;
                if (items * best_places > best_items * places) best_items = items, best_places = places;
            }
            for (i32 s = top; s >= 1; s--) {
                i64 items = units * s, places = over64(items + workers - 1, workers) * workers;
                if (100 * items * best_places >= 85 * best_items * places) param = s;
            }
        }
    }
    return most(param, 1);
}

#if defined(__CUDACC__)
HOST_DEVICE float quotient(float a, float b) { return __fdividef(a, b); }
#else
HOST_DEVICE float quotient(float a, float b) { return a / b; }
#endif

// Linear tiles cut into `count` runs of equal length; none is empty.
struct Runs {
    Tiles total, each; // tiles of a run, rounded down
    i32 count, left;

    HOST_DEVICE Runs(Tiles total, i32 runs) : total(total), count(most(runs, 1)) {
        each = over(total, count), left = i32(total - each * count);
    }

    // run * total / count; runs are at most 2^15.
    HOST_DEVICE Tiles cut(i32 run) const { return run * each + u32(run) * u32(left) / u32(count); }

    // The run that has a linear tile: a little too low from a division of floats, then exactly.
    HOST_DEVICE i32 owner(Tiles tile) const {
        i32 run = most(i32(quotient(float(tile) * count, float(total))) - 1, 0);
        UNROLL_NOT while (cut(run + 1) <= tile) run++;
        return run;
    }
};

// A place in the linear tiles: a segment [t, end) of the n tiles of (row, head), counted from the row's first.
struct Cursor {
    i32 row, length, first, n; // the row
    i32 size, head, piece, t, end;
    Tiles cut;   // pieces of all heads of the rows before
    i32 opening; // tiles that every unit counts more than it has, at its start: see `share_out`
};

// One warp's part of a segment: reading sixteen tokens at a time ahead of use, scores, softmax and weighted sum.
#pragma once

constexpr i32 SUB = 16;
// Where the copy engine brings boxes they lie in pieces of 64 columns, [pieces, 16 tokens, 128 bytes], swizzled; where
// it brings rows a row has an odd number of 16 bytes. Either way eight tokens of a column fall into eight banks.
constexpr i32 PIECE = SUB * 128, K_PIECES = (D + 63) / 64, V_PIECES = (DV + 63) / 64;
constexpr i32 K_ROW = (D / 8 | 1) * 16, V_ROW = (DV / 8 | 1) * 16;
constexpr i32 K_BYTES = BOXES ? K_PIECES * PIECE : SUB * K_ROW, V_BYTES = BOXES ? V_PIECES * PIECE : SUB * V_ROW;
constexpr i32 STAGE = K_BYTES + V_BYTES, RING = STAGES * STAGE;

// The address in shared memory of a lane's 16 bytes of `token`, in the first 16 columns of K or V, and of later ones.
__device__ __forceinline__ u32 first_columns(i32 token, i32 half, i32 row_bytes) {
    return BOXES ? token * 128 + ((half ^ (token & 7)) * 16) : token * row_bytes + half * 16;
}
__device__ __forceinline__ u32 columns(u32 first, i32 sixteen) {
    return BOXES ? (first ^ (sixteen % 4 * 32)) + sixteen / 4 * PIECE : first + sixteen * 32;
}

struct State {
    float m[NT][2], l[NT][2], o[NT][DV / 16][4]; // lane (g, t) has heads 2t and 2t+1, columns g and g+8 of each 16
};

// Tokens [low, stop) from `lo`, a multiple of 16, in steps: every so many sixteens of a segment are one warp's.
// The copy engine brings them: boxes of 16 tokens and 64 columns, each asked for by a lane, where pages are multiples
// of 16 tokens; else rows, of K for the lower half of the lanes and of V for the upper half.
struct Reader {
    const Maps& maps;
    const u16* rows;   // of the lane's kind and KV head
    const i32* ids_of; // the row's table
    i64 s_p, s_t;
    i32 lo, low, stop, step, count, lane, row, head;
    u32 ring, barriers; // of the warp
    i32 ids, ids_next;
    u32 phases = 0; // of the barriers, a bit each

    static constexpr i32 BATCH = PAGE % SUB == 0 ? 32 : 1; // sixteens whose page ids the lanes hold

    __device__ __forceinline__ Reader(const Maps& maps, i32 lane, u32 ring, u32 barriers)
        : maps(maps), lane(lane), ring(ring), barriers(barriers) {
        if (lane < STAGES) barrier_init(barriers + 8 * lane);
        __syncwarp();
    }

    // mine: number of the warp among those of the team's programs.
    __device__ __forceinline__ void begin(const Args& a, const Cursor& c, i32 mine, i32 log_team) {
        low = a.window > 0 ? most(c.length - a.window, 0) : 0;
        stop = least((c.first + most(c.end - c.opening, 0)) * T, c.length);
        step = (WARPS * SUB) << log_team;
        lo = most((c.first + most(c.t - c.opening, 0)) * T, low) / SUB * SUB + mine * SUB;
        count = stop > lo ? (u32(stop - lo - 1) / (WARPS * SUB) >> log_team) + 1 : 0;
        row = c.row, head = c.head;
        ids_of = a.table + c.row * a.t_b;
        ids = load_ids(0);
        ids_next = count > BATCH ? load_ids(BATCH) : 0;
        if (!BOXES) {
            const bool keys = lane < SUB;
            s_p = keys ? a.k_p : a.v_p, s_t = keys ? a.k_t : a.v_t;
            rows = (keys ? a.k + c.head * a.k_h : a.v + c.head * a.v_h) + (PAGE ? 0 : c.row * s_p);
        }
    }

    __device__ __forceinline__ i32 token(i32 i) const { return lo + i * step; }

    __device__ __forceinline__ i32 load_ids(i32 i) const {
        if (PAGE == 0) return 0;
        const i32 at = BATCH == 1 ? token(i) + lane % SUB : token(i + lane);
        const bool mine = BATCH == 1 ? i < count && at >= low && at < stop : i + lane < count;
        return mine ? __ldg(ids_of + u32(at) / (PAGE ? PAGE : 1)) : 0;
    }

    // Begin to read the i-th sixteen, if there is one.
    __device__ __forceinline__ void issue(i32 i) {
        if (i >= count) return;
        const i32 at = token(i), id = PAGE && BATCH > 1 ? __shfl_sync(ALL, ids, i % BATCH) : ids;
        const u32 stage = i % STAGES, barrier = barriers + 8 * stage, to = ring + stage * STAGE;
        if (BOXES) {
            if (lane == 0) barrier_expect(barrier, STAGE);
            const i32 piece = lane < K_PIECES ? lane : lane - K_PIECES;
            if (lane < K_PIECES + V_PIECES)
                copy_box(to + lane * PIECE, lane < K_PIECES ? maps.k : maps.v, piece * 64,
                         PAGE ? u32(at) % (PAGE ? PAGE : 1) : at, head, PAGE ? id : row, barrier);
        } else {
            const i32 mine = at + lane % SUB;
            const bool take = mine >= low && mine < stop;
            const u32 taken = __popc(__ballot_sync(ALL, take)) / 2;
            if (lane == 0) barrier_expect(barrier, taken * (D + DV) * 2);
            if (take) {
                const u16* from = rows + i64(id) * s_p + i64(PAGE ? u32(mine) % (PAGE ? PAGE : 1) : mine) * s_t;
                copy_row(to + (lane < SUB ? lane * K_ROW : K_BYTES + (lane - SUB) * V_ROW), from,
                         (lane < SUB ? D : DV) * 2, barrier);
            }
        }
        if (PAGE && (i + 1) % BATCH == 0) {
            ids = ids_next;
            ids_next = i + 1 + BATCH < count ? load_ids(i + 1 + BATCH) : 0;
        }
    }

    // Wait for the i-th sixteen; values of tokens that are not in the segment become zeros, for a weight of zero does
    // not keep a NaN out of a sum.
    __device__ __forceinline__ void wait(i32 i) {
        const u32 stage = i % STAGES;
        barrier_wait(barriers + 8 * stage, phases >> stage & 1);
        phases ^= 1 << stage;
        const i32 at = token(i) + lane;
        if (partial(i) && lane < SUB && (at < low || at >= stop)) {
            const u32 v = ring + stage * STAGE + K_BYTES + lane * (BOXES ? 128 : V_ROW);
            UNROLL_NOT for (i32 x = 0; x < (BOXES ? V_PIECES * 8 : DV / 8); x++)
                store_zeros(v + (BOXES ? x / 8 * PIECE + x % 8 * 16 : x * 16));
        }
        __syncwarp();
    }

    __device__ __forceinline__ bool partial(i32 i) const { return token(i) < low || token(i) + SUB > stop; }
};

// ALiBi's slopes of a lane's heads, times log2(e), and the position of the query.
struct Slopes {
    float of[NT][2];
    i32 position;

    __device__ __forceinline__ void load(const Args& a, const Cursor& c, i32 g0, i32 G, i32 lane) {
        if (!SLOPED) return;
        position = c.length - 1;
#pragma unroll
        for (i32 n = 0; n < NT; n++)
#pragma unroll
            for (i32 h = 0; h < 2; h++) {
                const i32 g = n * 8 + lane % 4 * 2 + h;
                of[n][h] = g < G ? __ldg(a.slopes + c.head * a.G + g0 + g) * LOG2_E : 0;
            }
    }
};

// The state of one warp's sixteens.
__device__ __forceinline__ void attend(Reader& reader, const u32 (&q)[NT][D / 16][2], const Args& args,
                                       const Slopes& slopes, State& s) {
    const float scale = args.scale;
    const i32 lane = reader.lane, g = lane / 4;
    const u32 k_first = first_columns(lane % 16, lane / 16, K_ROW);
    const u32 v_first = first_columns(lane / 16 * 8 + lane % 8, lane / 8 % 2, V_ROW);
#pragma unroll
    for (i32 n = 0; n < NT; n++) {
        s.m[n][0] = s.m[n][1] = NOTHING;
        s.l[n][0] = s.l[n][1] = 0;
#pragma unroll
        for (i32 j = 0; j < DV / 16; j++)
#pragma unroll
            for (i32 x = 0; x < 4; x++) s.o[n][j][x] = 0;
    }
    UNROLL_NOT for (i32 i = 0; i < reader.count; i++) {
        reader.issue(i + STAGES - 1);
        reader.wait(i);
        const u32 k_tile = reader.ring + i % STAGES * STAGE, v_tile = k_tile + K_BYTES;
        float p[NT][4] = {}, odd[NT][4] = {};
#pragma unroll
        for (i32 j = 0; j < D / 16; j++) {
            u32 a[4];
            load_matrices(a, k_tile + columns(k_first, j));
#pragma unroll
            for (i32 n = 0; n < NT; n++) mma(j % 2 ? odd[n] : p[n], a, q[n][j][0], q[n][j][1]);
        }
#pragma unroll
        for (i32 n = 0; n < NT; n++)
#pragma unroll
            for (i32 c = 0; c < 4; c++) {
                p[n][c] = (p[n][c] + odd[n][c]) * scale;
                if (CAPPED) p[n][c] = args.cap * tanh_of(p[n][c]);
                if (SLOPED) p[n][c] -= slopes.of[n][c % 2] * float(slopes.position - (reader.token(i) + g + c / 2 * 8));
            }
        if (reader.partial(i)) {
#pragma unroll
            for (i32 c = 0; c < 4; c += 2) {
                const i32 at = reader.token(i) + g + 4 * c;
                if (at < reader.low || at >= reader.stop)
#pragma unroll
                    for (i32 n = 0; n < NT; n++) p[n][c] = p[n][c + 1] = NOTHING;
            }
        }
        bool grown = false;
        float top[NT][2];
#pragma unroll
        for (i32 n = 0; n < NT; n++)
#pragma unroll
            for (i32 h = 0; h < 2; h++) {
                float x = fmaxf(p[n][h], p[n][h + 2]);
                x = fmaxf(x, __shfl_xor_sync(ALL, x, 4));
                x = fmaxf(x, __shfl_xor_sync(ALL, x, 8));
                x = fmaxf(x, __shfl_xor_sync(ALL, x, 16));
                top[n][h] = fmaxf(s.m[n][h], x);
                grown |= top[n][h] != s.m[n][h];
            }
        if (__any_sync(ALL, grown)) {
#pragma unroll
            for (i32 n = 0; n < NT; n++)
#pragma unroll
                for (i32 h = 0; h < 2; h++) {
                    const float old = s.m[n][h] == NOTHING ? 0.f : exp2_of(s.m[n][h] - top[n][h]);
                    s.m[n][h] = top[n][h];
                    s.l[n][h] *= old;
#pragma unroll
                    for (i32 j = 0; j < DV / 16; j++) s.o[n][j][h] *= old, s.o[n][j][h + 2] *= old;
                }
        }
        u32 w[NT][2];
#pragma unroll
        for (i32 n = 0; n < NT; n++) {
#pragma unroll
            for (i32 c = 0; c < 4; c++) p[n][c] = exp2_of(p[n][c] - (s.m[n][c % 2] == NOTHING ? 0.f : s.m[n][c % 2]));
            s.l[n][0] += p[n][0] + p[n][2];
            s.l[n][1] += p[n][1] + p[n][3];
            w[n][0] = transpose(pack(p[n][0], p[n][1]));
            w[n][1] = transpose(pack(p[n][2], p[n][3]));
        }
#pragma unroll
        for (i32 j = 0; j < DV / 16; j++) {
            u32 a[4];
            load_transposed(a, v_tile + columns(v_first, j));
#pragma unroll
            for (i32 n = 0; n < NT; n++) mma(s.o[n][j], a, w[n][0], w[n][1]);
        }
        reads_end();
    }
}

// The queries of a unit as the right side of the scores' product.
__device__ __forceinline__ void load_queries(const Args& a, u32 (&q)[NT][D / 16][2], i32 row, i32 head, i32 g0, i32 G,
                                             i32 lane) {
#pragma unroll
    for (i32 n = 0; n < NT; n++) {
        const i32 g = n * 8 + lane / 4;
        const u32* from =
            reinterpret_cast<const u32*>(a.q + row * a.q_b + (i64(head) * a.G + g0 + g) * a.q_h) + lane % 4;
#pragma unroll
        for (i32 j = 0; j < D / 16; j++) {
            q[n][j][0] = g < G ? __ldg(from + j * 8) : 0;
            q[n][j][1] = g < G ? __ldg(from + j * 8 + 4) : 0;
        }
    }
}

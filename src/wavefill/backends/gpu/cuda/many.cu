// Attention of several query tokens a request, for GPUs of compute capability 9.0: drafts, chunks of prompts, prompts.
//
// A unit is a (row, KV head); a row is a block of query tokens of one request (rows.py), which with the G heads of the
// KV head are the QUERIES rows of the products. A program goes through segments of units, as in decode.cu. Two of its
// warps bring K and V into rings through the copy engine; two groups of four warps each multiply. Where a unit has more
// than 64 queries, each group has 64 of them and both read every tile; else (TOGETHER) both have all queries and every
// other tile, and join their states at the end of the segment.
//
// A group asks for the scores of a tile before the products with V of the tile before it, and turns scores into weights
// while those run.
//
// variant.cuh has, beside what decode.cu takes from it: QUERIES (64 or 128), BOX (tokens of a copy), CAPPED, SLOPED,
// SINKS, MASKED. KIND may be ROUNDS: all units are cut into `param` pieces, and programs take one in each round, in
// such an order that they read the same K and V at the same time, from L2. Whole units come last rows first, which are
// a prompt's longest, and to and fro, so that sums are nearly equal.

#include "cursor.cuh"

typedef unsigned short u16;
typedef unsigned long long u64;

struct Args {
    const u16 *q, *k, *v; // k and v are read through the maps
    const i32 *table, *rows;
    const i64* before;
    u16* out;
    float *lse, *part_o, *part_m, *part_l;
    const float *sinks, *slopes;
    const i32* mask;
    i64 q_b, q_h, o_b, o_h, l_b, l_h, t_b, mask_row;
    float scale, cap; // of the scores times log2(e); where CAPPED, of the products what the tanh takes, and its factor
    i32 B, KH, G, block, tokens;      // rows; query tokens of a row at most, and of the call
    i32 causal, window, param, rule, words;
};
struct __align__(64) Map {
    u64 words[16];
};
struct Maps {
    Map k, v;
};

#include "instructions.cuh"
#include "scan.cuh"
#include "wgmma.cuh"

constexpr i32 PIECES = D / 64, BOXES_OF = T / BOX, PIECE = T * 128, Q_PIECE = QUERIES * 128;
constexpr i32 SIDE = PIECES * PIECE, Q_BYTES = PIECES * Q_PIECE; // bytes of K or V of a tile, of the queries
constexpr bool TOGETHER = QUERIES == 64;
constexpr i32 GROUP = 128, GROUPS = 2, THREADS = GROUP * (GROUPS + 1), JOIN_FLOATS = DV / 2 + 4;
constexpr i32 READERS = TOGETHER ? 4 : 8; // warps that read a tile
constexpr i32 SCORES = T / 2, OUTPUTS = DV / 2; // registers of a thread
constexpr i64 L2_BYTES = 36 << 20; // of K and V that programs share, most of what there is
constexpr float LN2 = 0.69314718056f;
static_assert(D == DV && PIECES * BOXES_OF <= 32, "a lane asks for a box");
// A group that reads every other tile must find its tiles in stages of its own: it does not see the other ones filled,
// and the parity of a barrier tells a stage only from the one before.
static_assert(!TOGETHER || STAGES % 2 == 0, "an even ring");

// A row of `rows`: what its queries see, and where they are.
struct Block {
    i32 start, stop, request, first, count, position, base;

    __device__ __forceinline__ Block(const Args& a, i32 row) {
        const i32* at = a.rows + row;
        start = __ldg(at), stop = __ldg(at + i64(a.B)), request = __ldg(at + 2 * i64(a.B));
        first = __ldg(at + 3 * i64(a.B)), count = __ldg(at + 4 * i64(a.B));
        position = __ldg(at + 5 * i64(a.B)), base = __ldg(at + 6 * i64(a.B));
    }
};
__device__ __forceinline__ i32 used_tokens(const Args& a) { return __ldg(a.rows + 7 * i64(a.B)); }
__device__ __forceinline__ i32 used_rows(const Args& a) { return __ldg(a.rows + 7 * i64(a.B) + 1); }

// Where a program is.
struct Place {
    Cursor c;
    Tiles at, stop;
    i32 round, used, heads;
    bool opened;
};

// The segments of a program, one after the other.
struct Walk : Place {
    const Args& a;
    const i32 param;

    __device__ __forceinline__ Walk(const Args& a, i32 param, i32 lane)
        : a(a), param(param) {
        at = stop = 0, opened = false;
        const i32 programs = gridDim.x;
        if (KIND == ROUNDS) {
            round = -1, used = used_rows(a);
            const i64 bytes = used ? i64(__ldg(a.rows + i64(a.B) + used - 1)) * (D + DV) * 2 + 1 : 1;
            const i32 groups = i32(least((bytes * a.KH + L2_BYTES - 1) / L2_BYTES, i64(a.KH)));
            heads = (a.KH + groups - 1) / groups;
            return;
        }
        const Batch batch = batch_of(a, lane);
        const Runs runs(batch.tiles, programs);
        at = runs.cut(blockIdx.x), stop = runs.cut(blockIdx.x + 1);
        if (at < stop) c = cursor_at(a, batch, at, stop, param, 0, lane);
    }

    // The parameter of the schedule, worked out before roles part and have their registers.
    static __device__ __forceinline__ i32 parameter(const Args& a, i32 lane) {
        if (KIND != SPLITS) return a.param;
        if (SCANNED) return i32(__ldg(a.before + 2 * a.B + 2));
        const Batch batch = batch_of(a, lane);
        return splits(batch.rows, batch.longest, a.KH, gridDim.x, a.param, a.rule);
    }

    __device__ __forceinline__ bool more() {
        if (KIND != ROUNDS) return at < stop;
        const i32 programs = gridDim.x;
        do {
            round++;
            const i32 item = round * programs + (param == 1 && round % 2 ? programs - 1 - i32(blockIdx.x) : blockIdx.x);
            if (item >= used * a.KH * param) return false;
            if (param == 1) { // heads in groups whose K and V fit into L2
                const i32 group = item / (used * heads), left = item - group * used * heads;
                const i32 here = least(heads, a.KH - group * heads);
                c.row = used - 1 - left / here, c.head = group * heads + left % here, c.piece = 0;
            } else {
                const i32 left = item % (used * param);
                c.head = item / (used * param), c.piece = left / used, c.row = left % used;
            }
            const Row r = row_at(a, c.row);
            c.first = r.first, c.n = r.n, c.size = least(r.n, param);
        } while (c.piece >= c.size);
        c.t = i32(over64(i64(c.piece) * c.n, c.size)), c.end = i32(over64(i64(c.piece + 1) * c.n, c.size));
        return true;
    }

    // Whether the segment is its unit, and the slot of its partial state.
    __device__ __forceinline__ bool whole() const {
        if (KIND == ROUNDS) return c.size == 1;
        return KIND == STREAM_K ? c.end - c.t == c.n : pieces(c.n, c.size) == 1;
    }
    __device__ __forceinline__ i64 slot(i32 lane) const {
        if (KIND == STREAM_K) return 2 * i64(blockIdx.x) + opened;
        if (KIND == ROUNDS) {
            i32 before = 0; // pieces of the rows before this one
            for (i32 row = lane; row < c.row; row += 32) before += least(row_at(a, row).n, param);
            return i64(__reduce_add_sync(ALL, before)) * a.KH + c.head * c.size + c.piece;
        }
        return c.cut + i64(c.head) * pieces(c.n, c.size) + c.piece;
    }

    __device__ __forceinline__ void next() {
        if (KIND == ROUNDS) return;
        at += c.end - c.t, opened = true;
        if (at < stop) next_segment(a, c, param, stop - at);
    }
};

// Which stage a program's i-th tile lies in, and the parity of its barriers' phase then.
struct Stage {
    i32 at = 0;
    u32 phase = 0;

    __device__ __forceinline__ void advance(i32 tiles) {
        at += tiles;
        while (at >= STAGES) at -= STAGES, phase ^= 1;
    }
};

struct Shared {
    unsigned char q[Q_BYTES], k[STAGES][SIDE], v[STAGES][SIDE];
    float join[TOGETHER ? JOIN_FLOATS * GROUP : 1];
    u64 k_full[STAGES], k_free[STAGES], v_full[STAGES], v_free[STAGES];
    Place places[GROUPS * 4]; // of the warps that multiply, whose registers are full meanwhile
};

// ------------------------------------------------------------------------------------------------------ bringing tiles

// One warp brings K (side 0), another one V.
__device__ __forceinline__ void bring(const Maps& maps, const Args& a, Shared& sh, i32 param, i32 side, i32 lane) {
    const i32 box = lane % BOXES_OF * BOX, piece = lane / BOXES_OF;
    u64* const full = side ? sh.v_full : sh.k_full;
    u64* const free = side ? sh.v_free : sh.k_free;
    const u32 to = shared_address(side ? sh.v[0] : sh.k[0]) + piece * PIECE + box * 128;
    const Map& map = side ? maps.v : maps.k;
    Stage stage;
    for (Walk walk(a, param, lane); walk.more(); walk.next()) {
        const Cursor& c = walk.c;
        const Block block(a, c.row);
        const i32* ids = a.table + block.request * a.t_b;
        auto id_of = [&](i32 tile) {
            const i32 at = tile * T + box;
            return PAGE && at + BOX > block.start && at < block.stop ? __ldg(ids + u32(at) / (PAGE ? PAGE : 1)) : 0;
        };
        i32 id = id_of(c.first + c.t);
        for (i32 tile = c.first + c.t; tile < c.first + c.end; tile++, stage.advance(1)) {
            const i32 at = tile * T + box;
            const bool seen = at + BOX > block.start && at < block.stop;
            const u32 bytes = __popc(__ballot_sync(ALL, seen && piece == 0)) * PIECES * BOX * 128;
            const i32 next_id = tile + 1 < c.first + c.end ? id_of(tile + 1) : 0;
            const u32 barrier = shared_address(full + stage.at);
            barrier_wait(shared_address(free + stage.at), stage.phase ^ 1);
            if (lane == 0) barrier_expect(barrier, bytes);
            __syncwarp();
            if (seen && piece < PIECES)
                copy_box(to + stage.at * SIDE, map, piece * 64, PAGE ? u32(at) % (PAGE ? PAGE : 1) : at, c.head,
                         PAGE ? id : block.request, barrier);
            id = next_id;
        }
    }
}

// --------------------------------------------------------------------------------------------------------- multiplying

// Of a thread: queries g and g + 8 of its warp's sixteen; of these the columns 2t and 2t + 1 of every eight.
struct Attention {
    const Args& a;
    Shared& sh;
    const i32 thread, group, warp, lane; // thread: of its group
    float s[SCORES], o[OUTPUTS], m[2], l[2];
    u32 p[T / 4];
    i32 place[2]; // each query's position
    float slope[2];

    __device__ __forceinline__ i32 query(i32 h) const {
        return (TOGETHER ? 0 : group * 64) + warp * 16 + lane / 4 + h * 8;
    }

    // The block's queries, [pieces, QUERIES, 128 bytes]; what is past them is zero.
    __device__ __forceinline__ void load_queries(const Block& block, i32 head) {
        const i32 queries = block.count * a.G;
        constexpr i32 SHARE = QUERIES / GROUPS; // of a group: where not TOGETHER those that it reads
        UNROLL_NOT for (i32 x = thread; x < SHARE * D / 8; x += GROUP) {
            const i32 r = group * SHARE + x / (D / 8), column = x % (D / 8), token = u32(r) / u32(a.G);
            uint4 value = make_uint4(0, 0, 0, 0);
            if (r < queries)
                value = __ldg(reinterpret_cast<const uint4*>(a.q + (block.first + token) * a.q_b +
                                                             (i64(head) * a.G + r - token * a.G) * a.q_h) + column);
            *reinterpret_cast<uint4*>(sh.q + column / 8 * Q_PIECE + r * 128 + ((column % 8) ^ (r & 7)) * 16) = value;
        }
    }

    // The threads that read the same queries.
    __device__ __forceinline__ void meet_readers() const {
        if (TOGETHER)
            meet<GROUP * GROUPS>(1);
        else
            meet<GROUP>(2 + group);
    }

    __device__ __forceinline__ void begin(const Block& block, i32 head) {
#pragma unroll
        for (i32 i = 0; i < OUTPUTS; i++) o[i] = 0;
#pragma unroll
        for (i32 h = 0; h < 2; h++) {
            m[h] = NOTHING, l[h] = 0;
            const i32 token = u32(query(h)) / u32(a.G), position = block.position + token;
            const bool there = token < block.count;
            place[h] = position;
            if (SLOPED) slope[h] = there ? __ldg(a.slopes + head * a.G + query(h) - token * a.G) * LOG2_E : 0;
        }
    }

    __device__ __forceinline__ void score(u32 k) {
        const u32 q = shared_address(sh.q) + (TOGETHER ? 0 : group * 64 * 128);
        products_begin();
#pragma unroll
        for (i32 j = 0; j < D / 16; j++)
            Product<T>::shared(s, pieces_at(q + j / 4 * Q_PIECE + j % 4 * 32, 16),
                               pieces_at(k + j / 4 * PIECE + j % 4 * 32, 16), j > 0);
        products_issued();
    }
    __device__ __forceinline__ void weigh(u32 v) {
        products_begin();
#pragma unroll
        for (i32 j = 0; j < T / 16; j++) Product<DV>::registers(o, p + 4 * j, pieces_at(v + j * 2048, PIECE));
        products_issued();
    }

    // Scores of the tile from token `lo` become weights 2^(score - m); returns whether a maximum has grown, and by what
    // factors outputs change.
    __device__ __forceinline__ bool soften(const Block& block, i32 lo, float (&factor)[2]) {
        const bool ready = CAPPED || SLOPED || a.scale <= 0; // scores take their final value before the maximum
        const float scale = ready ? 1.f : a.scale;
        const i32 column = lo + lane % 4 * 2;
        if (ready) {
#pragma unroll
            for (i32 i = 0; i < SCORES; i++) {
                const i32 h = i / 2 % 2;
                s[i] *= a.scale;
                if (CAPPED) s[i] = a.cap * tanh_of(s[i]);
                if (SLOPED) s[i] -= slope[h] * fabsf(float(place[h] - (column + i / 4 * 8 + i % 2)));
            }
        }
        const i32 first_high = least(block.stop - 1, a.causal ? block.position : block.stop);
        const i32 last_low = a.window ? most(block.start, block.position + block.count - a.window) : block.start;
        if (lo + T - 1 > first_high || lo < last_low || (MASKED && lo + T > block.base)) {
#pragma unroll
            for (i32 i = 0; i < SCORES; i++) {
                const i32 h = i / 2 % 2, key = column + i / 4 * 8 + i % 2;
                bool seen = key >= (a.window ? most(block.start, place[h] - a.window + 1) : block.start) &&
                            key < (a.causal ? least(block.stop, place[h] + 1) : block.stop);
                if (MASKED && seen && key >= block.base) {
                    const i32 bit = key - block.base, token = block.first + place[h] - block.position;
                    seen = bit < a.words * 32 && token < a.tokens &&
                           (__ldg(a.mask + token * a.mask_row + u32(bit) / 32) >> (u32(bit) % 32) & 1);
                }
                if (!seen) s[i] = NOTHING;
            }
        }
        bool grown = false;
#pragma unroll
        for (i32 h = 0; h < 2; h++) {
            float top = NOTHING;
#pragma unroll
            for (i32 i = 0; i < SCORES; i += 4) top = fmaxf(top, fmaxf(s[i + 2 * h], s[i + 2 * h + 1]));
            top = fmaxf(top, __shfl_xor_sync(ALL, top, 1));
            top = fmaxf(top, __shfl_xor_sync(ALL, top, 2));
            top = fmaxf(m[h], top == NOTHING ? NOTHING : top * scale);
            const float base = top == NOTHING ? 0.f : top;
            factor[h] = m[h] == NOTHING ? 0.f : exp2_of(m[h] - base);
            grown |= top != m[h];
            m[h] = top, l[h] *= factor[h];
            float sum = 0;
#pragma unroll
            for (i32 i = 0; i < SCORES; i += 4)
#pragma unroll
                for (i32 x = 0; x < 2; x++) {
                    float& w = s[i + 2 * h + x];
                    w = exp2_of(__fmaf_rn(w, scale, -base));
                    sum += w;
                }
            l[h] += sum;
        }
        return grown;
    }
    __device__ __forceinline__ void rescale(const float (&factor)[2]) {
#pragma unroll
        for (i32 i = 0; i < OUTPUTS; i++) o[i] *= factor[i / 2 % 2];
    }
    __device__ __forceinline__ void round_weights() {
#pragma unroll
        for (i32 i = 0; i < T / 4; i++) p[i] = pack(s[2 * i], s[2 * i + 1]);
    }

    // Values of tokens that nobody sees become zeros: a weight of zero does not keep a NaN out of a sum.
    __device__ __forceinline__ void clean(const Block& block, i32 lo, unsigned char* v) {
        if (lo >= block.start && lo + T <= block.stop) return;
        for (i32 x = thread; x < T * PIECES * 8; x += GROUP) {
            const i32 token = lo + x / 8 % T;
            if (token < block.start || token >= block.stop) store_zeros(shared_address(v) + x * 16);
        }
        writes_end();
        meet<GROUP>(2 + group);
    }

    __device__ __forceinline__ void attend(const Block& block, const Cursor& c, Stage stage) {
        const i32 step = TOGETHER ? 2 : 1, begin = c.first + c.t + (TOGETHER ? group : 0), end = c.first + c.end;
        if (begin >= end) return;
        if (TOGETHER) stage.advance(group);
        auto free = [&](u64* barriers, i32 at) {
            if (lane == 0) barrier_arrive(shared_address(barriers + at));
        };
        auto full = [&](u64* barriers, const Stage& s) { barrier_wait(shared_address(barriers + s.at), s.phase); };
        float factor[2];
        full(sh.k_full, stage);
        score(shared_address(sh.k[stage.at]));
        products_wait<0>();
        hold(s);
        free(sh.k_free, stage.at);
        soften(block, begin * T, factor);
        round_weights();
        UNROLL_NOT for (i32 tile = begin + step; tile < end; tile += step) {
            Stage next = stage;
            next.advance(step);
            full(sh.k_full, next);
            score(shared_address(sh.k[next.at]));
            full(sh.v_full, stage);
            clean(block, (tile - step) * T, sh.v[stage.at]);
            weigh(shared_address(sh.v[stage.at]));
            products_wait<1>();
            hold(s);
            free(sh.k_free, next.at);
            const bool grown = soften(block, tile * T, factor);
            products_wait<0>();
            hold(o), hold(p);
            free(sh.v_free, stage.at);
            if (__any_sync(ALL, grown)) rescale(factor);
            round_weights();
            stage = next;
        }
        full(sh.v_full, stage);
        clean(block, (end - 1 - (end - 1 - begin) % step) * T, sh.v[stage.at]);
        weigh(shared_address(sh.v[stage.at]));
        products_wait<0>();
        hold(o);
        free(sh.v_free, stage.at);
    }

    __device__ __forceinline__ void sum_lanes() {
#pragma unroll
        for (i32 h = 0; h < 2; h++) l[h] += __shfl_xor_sync(ALL, l[h], 1), l[h] += __shfl_xor_sync(ALL, l[h], 2);
    }
    // The second group's state joins the first's.
    __device__ __forceinline__ void join() {
        float* const at = sh.join + thread;
        if (group == 1) {
#pragma unroll
            for (i32 i = 0; i < OUTPUTS; i++) at[i * GROUP] = o[i];
#pragma unroll
            for (i32 h = 0; h < 2; h++) at[(OUTPUTS + h) * GROUP] = m[h], at[(OUTPUTS + 2 + h) * GROUP] = l[h];
        }
        meet<GROUP * GROUPS>(1);
        if (group == 1) return;
        float mine[2], other[2];
#pragma unroll
        for (i32 h = 0; h < 2; h++) {
            const float m2 = at[(OUTPUTS + h) * GROUP], top = fmaxf(m[h], m2);
            mine[h] = m[h] == NOTHING ? 0.f : exp2_of(m[h] - top), other[h] = m2 == NOTHING ? 0.f : exp2_of(m2 - top);
            l[h] = l[h] * mine[h] + at[(OUTPUTS + 2 + h) * GROUP] * other[h], m[h] = top;
        }
#pragma unroll
        for (i32 i = 0; i < OUTPUTS; i++)
            o[i] = o[i] * mine[i / 2 % 2] + at[i * GROUP] * other[i / 2 % 2];
    }

    __device__ __forceinline__ void store(const Block& block, i32 head, bool whole, i64 slot) {
#pragma unroll
        for (i32 h = 0; h < 2; h++) {
            const i32 r = query(h), token = u32(r) / u32(a.G), query_head = head * a.G + r - token * a.G;
            if (token >= block.count) continue;
            if (!whole) {
                const i64 at = slot * (i64(a.block) * a.G) + r;
                float* const to = a.part_o + at * DV + lane % 4 * 2;
#pragma unroll
                for (i32 i = 0; i < OUTPUTS / 4; i++)
                    *reinterpret_cast<float2*>(to + i * 8) = make_float2(o[4 * i + 2 * h], o[4 * i + 2 * h + 1]);
                if (lane % 4 == 0) a.part_m[at] = m[h], a.part_l[at] = l[h];
                continue;
            }
            float factor = 1, top = m[h], sum = l[h];
            if (SINKS) {
                const float sink = __ldg(a.sinks + query_head) * LOG2_E;
                top = fmaxf(m[h], sink);
                factor = m[h] == NOTHING ? 0.f : exp2_of(m[h] - top);
                sum = sum * factor + (sink == NOTHING ? 0.f : exp2_of(sink - top));
            }
            factor = l[h] == 0 ? 0.f : factor * __frcp_rn(sum);
            u16* const row = a.out + (block.first + token) * a.o_b + query_head * a.o_h;
            u32* const to = reinterpret_cast<u32*>(row) + lane % 4;
#pragma unroll
            for (i32 i = 0; i < OUTPUTS / 4; i++)
                to[i * 4] = pack(o[4 * i + 2 * h] * factor, o[4 * i + 2 * h + 1] * factor);
            if (lane % 4 == 0)
                a.lse[(block.first + token) * a.l_b + query_head * a.l_h] = (top + __log2f(sum)) * LN2;
        }
    }
};

// Results of query tokens that see no key, and of those before and past all requests, where no merge comes after.
__device__ __forceinline__ void write_empty(const Args& a, i32 thread, i32 threads) {
    const i32 programs = gridDim.x, heads = a.KH * a.G, used = used_tokens(a);
    auto nothing = [&](i64 token, bool sinks) {
        for (i32 x = thread; x < heads * (DV / 2); x += threads) {
            const i32 head = x / (DV / 2), column = x % (DV / 2);
            reinterpret_cast<u32*>(a.out + token * a.o_b + head * a.o_h)[column] = 0;
            if (column == 0) a.lse[token * a.l_b + head * a.l_h] = SINKS && sinks ? __ldg(a.sinks + head) : NOTHING;
        }
    };
    for (i32 row = blockIdx.x; row < used_rows(a); row += programs) {
        const Block block(a, row);
        if (block.stop > block.start) continue;
        for (i32 token = 0; token < block.count; token++) nothing(block.first + token, true);
    }
    const i32 first = used_rows(a) ? __ldg(a.rows + 3 * i64(a.B)) : used;
    for (i32 token = blockIdx.x; token < first; token += programs) nothing(token, false);
    for (i32 token = used + blockIdx.x; token < a.tokens; token += programs) nothing(token, false);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    many(const __grid_constant__ Maps maps, const __grid_constant__ Args a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared& sh = *reinterpret_cast<Shared*>(memory);
    const i32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (KIND != ROUNDS) asm volatile("griddepcontrol.launch_dependents;");
    if (threadIdx.x == 0) {
        prefetch(maps.k), prefetch(maps.v);
        for (i32 i = 0; i < STAGES; i++) {
            barrier_init(shared_address(sh.k_full + i), 1), barrier_init(shared_address(sh.v_full + i), 1);
            barrier_init(shared_address(sh.k_free + i), READERS), barrier_init(shared_address(sh.v_free + i), READERS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    const i32 param = Walk::parameter(a, lane);
    __syncthreads();
    if (warp < 4) {
        fewer_registers<56>();
        if (warp < 2) bring(maps, a, sh, param, warp, lane);
        if (KIND == ROUNDS && warp >= 2 && a.param == 1) write_empty(a, threadIdx.x - 64, 64);
        return;
    }
    more_registers<224>();
    Attention it = {a, sh, i32(threadIdx.x % GROUP), i32(threadIdx.x / GROUP) - 1, warp % 4, lane};
    Stage stage;
    for (Walk walk(a, param, lane); walk.more(); walk.next()) {
        const Cursor& c = walk.c;
        const Block block(a, c.row);
        it.meet_readers(); // products that read the queries before these are done
        it.load_queries(block, c.head);
        it.begin(block, c.head);
        writes_end();
        it.meet_readers();
        if (lane == 0) sh.places[warp - 4] = walk;
        __syncwarp();
        it.attend(block, c, stage);
        static_cast<Place&>(walk) = sh.places[warp - 4];
        __syncwarp();
        it.sum_lanes();
        if (TOGETHER) it.join();
        const bool whole = walk.whole();
        if (!TOGETHER || it.group == 0) it.store(block, c.head, whole, whole ? 0 : walk.slot(lane));
        stage.advance((c.end - c.t) % STAGES), stage.phase ^= (c.end - c.t) / STAGES & 1;
    }
}

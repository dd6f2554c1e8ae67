// Attention of several query tokens a request, for GPUs of compute capability 9.0: drafts, chunks of prompts, prompts.
//
// A unit is a (row, KV head); a row is a block of query tokens of one request (rows.py), which with the G heads of the
// KV head are the QUERIES rows of the products. A program goes through segments of units, as in decode.cu. Two of its
// warps bring K and V into rings through the copy engine; two groups of four warps each multiply. Where a unit has more
// than 64 queries, each group has 64 of them and both read every tile; else (TOGETHER) both have all queries and every
// other tile, and join their states at the end of the segment.
//
// For drafts (JOINED) every program makes the rows for itself. Parts of a unit become one in the last of its programs
// to arrive, or, where there are twice as many programs as units and so many parts of each, in a kernel of their own,
// `join`.
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
    const i32 *table, *rows;  // where JOINED there are no rows but
    const i32 *starts, *seq;  // offsets and lengths of requests
    const i64* before;
    u16* out;
    float *lse, *part_o, *part_m, *part_l;
    const float *sinks, *slopes;
    const i32* mask;
    u32* counters; // as in decode.cu, where JOINED
    i64 q_b, q_h, o_b, o_h, l_b, l_h, t_b, mask_row;
    float scale, cap; // of the scores times log2(e); where CAPPED, of the products what the tanh takes, and its factor
    i32 B, KH, G, block, tokens; // rows; query tokens of a row at most, and of the call
    i32 causal, window, param, rule, words;
    i32 requests, limit; // where JOINED; keys that a request can have
    i32 programs, apart; // of the grid; whether `join` comes after, where JOINED
    i32 early;           // whether the kernel after this one may begin with it
};
struct __align__(64) Map {
    u64 words[16];
};
struct Maps {
    Map k, v;
};

#include "instructions.cuh"
#include "wgmma.cuh"

constexpr i32 PIECES = D / 64, BOXES_OF = T / BOX, PIECE = T * 128, Q_PIECE = QUERIES * 128;
constexpr i32 SIDE = PIECES * PIECE, Q_BYTES = PIECES * Q_PIECE; // bytes of K or V of a tile, of the queries
constexpr bool TOGETHER = QUERIES == 64;
constexpr bool JOINED = TOGETHER && KIND == STREAM_K && !SCANNED;
constexpr i32 GROUP = 128, GROUPS = 2, THREADS = GROUP * (GROUPS + 1), PLANES = 7; // of rows
constexpr i32 READERS = TOGETHER ? 4 : 8; // warps that read a tile
constexpr i32 SIDES = TOGETHER ? 2 : 1;   // segments whose queries are there
constexpr i32 SCORES = T / 2, OUTPUTS = DV / 2; // registers of a thread
constexpr i32 VECTORS = OUTPUTS / 4 + 1;        // of a thread's state, the last one its maxima and sums
constexpr i32 STATE_WRITTEN = 4, STATE_READ = 5; // where groups meet
constexpr i32 TURN = 4;                          // of the groups, two barriers, where they do not join states
constexpr i64 L2_BYTES = 36 << 20; // of K and V that programs share, most of what there is
constexpr float LN2 = 0.69314718056f;
static_assert(D == DV && PIECES * BOXES_OF <= 32, "a lane asks for a box");
// A group that reads every other tile must find its tiles in stages of its own: it does not see the other ones filled,
// and the parity of a barrier tells a stage only from the one before. So segments count as of an even number, too.
static_assert(!TOGETHER || STAGES % 2 == 0, "an even ring");

// Which stage a program's i-th tile lies in, and the parity of its barriers' phase then.
struct Stage {
    i32 at = 0;
    u32 phase = 0;

    __device__ __forceinline__ void advance(i32 tiles) {
        at += tiles;
        while (at >= STAGES) at -= STAGES, phase ^= 1;
    }
};

// Where a program is.
struct Place {
    Cursor c;
    Tiles at, stop;
    i32 round, used, heads;
    bool opened;
};

struct Shared {
    i32 rows[JOINED ? PLANES * MOST_ROWS + 2 : 1];
    alignas(1024) unsigned char q[SIDES][Q_BYTES], k[STAGES][SIDE], v[STAGES][SIDE];
    float4 state[TOGETHER ? VECTORS : 1][TOGETHER ? GROUP : 1];
    u64 k_full[STAGES], k_free[STAGES], v_full[STAGES], v_free[STAGES], q_full[SIDES], q_free[SIDES];
    Place places[GROUPS * 4]; // of the warps that multiply, whose registers are full meanwhile
    i32 last;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "as many.py has it");
extern __shared__ __align__(1024) unsigned char memory[];

// Not by __ldg, which may be moved ahead of the wait for the kernel that makes the rows.
__device__ __forceinline__ i32 row_word(const Args& a, i64 at) {
    return JOINED ? reinterpret_cast<const i32*>(memory)[at] : a.rows[at];
}

#include "scan.cuh"
#include "walk.cuh"
#include "states.cuh"

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
        // Where groups read every other tile each has stages of its own, so that there is an even number of tiles.
        const i32 end = c.first + c.end + (TOGETHER ? (c.end - c.t) % 2 : 0);
        i32 tile = c.first + c.t, id = id_of(tile);
        for (; tile < end; tile++, stage.advance(1)) {
            const i32 at = tile * T + box;
            const bool seen = at + BOX > block.start && at < block.stop && tile < c.first + c.end;
            const u32 bytes = __popc(__ballot_sync(ALL, seen && piece == 0)) * PIECES * BOX * 128;
            const i32 next_id = tile + 1 < end ? id_of(tile + 1) : 0;
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

// The block's queries, [pieces, QUERIES, 128 bytes]: `share` of them from `from` on, by so many threads.
__device__ __forceinline__ void load_queries(const Args& a, unsigned char* to, const Block& block, i32 head, i32 from,
                                             i32 share, i32 thread, i32 threads) {
    const i32 queries = block.count * a.G;
    UNROLL_NOT for (i32 x = thread; x < share * D / 8; x += threads) {
        const i32 r = from + x / (D / 8), column = x % (D / 8), token = u32(r) / u32(a.G);
        const bool there = r < queries;
        const u16* row = a.q + (block.first + token) * a.q_b + (i64(head) * a.G + r - token * a.G) * a.q_h;
        copy_16(shared_address(to) + column / 8 * Q_PIECE + r * 128 + ((column % 8) ^ (r & 7)) * 16,
                there ? row + column * 8 : a.q, there);
    }
    copies_end();
    writes_end();
}

// Two warps bring the queries of segments as soon as there is room; those of the first more threads bring sooner.
__device__ __forceinline__ void bring_queries(const Args& a, Shared& sh, i32 param, i32 thread, i32 lane) {
    i32 segments = 0;
    for (Walk walk(a, param, lane); walk.more(); walk.next(), segments++) {
        const i32 side = segments % SIDES;
        barrier_wait(shared_address(sh.q_free + side), segments / SIDES % 2 ^ 1);
        if (segments) load_queries(a, sh.q[side], Block(a, walk.c.row), walk.c.head, 0, QUERIES, thread, 64);
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(sh.q_full + side));
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

    __device__ __forceinline__ void score(u32 k, i32 side) {
        const u64 queries = pieces_at(shared_address(sh.q[side]) + (TOGETHER ? 0 : group * 64 * 128), 16);
        const u64 keys = pieces_at(k, 16);
        products_begin();
#pragma unroll
        for (i32 j = 0; j < D / 16; j++)
            Product<T>::shared(s, queries + (j / 4 * Q_PIECE + j % 4 * 32) / 16, keys + (j / 4 * PIECE + j % 4 * 32) / 16,
                               j > 0);
        products_issued();
    }
    __device__ __forceinline__ void weigh(u32 v) {
        const u64 values = pieces_at(v, PIECE);
        products_begin();
#pragma unroll
        for (i32 j = 0; j < T / 16; j++) Product<DV>::registers(o, p + 4 * j, values + j * 2048 / 16);
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

    // Groups that read the same tiles ask for products in turns: one turns scores into weights while the products of the
    // other run. The second group gives the first turn.
    __device__ __forceinline__ void take_turn() const {
        if (!TOGETHER) meet<GROUP * GROUPS>(TURN + group);
    }
    __device__ __forceinline__ void give_turn() const {
        if (!TOGETHER) signal<GROUP * GROUPS>(TURN + 1 - group);
    }

    // side: where the queries are.
    __device__ __forceinline__ void attend(const Block& block, const Cursor& c, Stage stage, i32 side) {
        const i32 step = TOGETHER ? 2 : 1, begin = c.first + c.t + (TOGETHER ? group : 0), end = c.first + c.end;
        if (TOGETHER) stage.advance(group);
        auto free = [&](u64* barriers, i32 at) {
            if (lane == 0) barrier_arrive(shared_address(barriers + at));
        };
        auto free_queries = [&](i32 tile) { // after the last products that read them
            if (tile + step >= end) free(sh.q_free, side);
        };
        auto full = [&](u64* barriers, const Stage& s) { barrier_wait(shared_address(barriers + s.at), s.phase); };
        auto pass = [&]() { // the tile that makes their number even
            full(sh.k_full, stage), free(sh.k_free, stage.at);
            full(sh.v_full, stage), free(sh.v_free, stage.at);
        };
        if (begin >= end) return free_queries(begin), pass();
        float factor[2];
        full(sh.k_full, stage);
        score(shared_address(sh.k[stage.at]), side);
        products_wait<0>();
        hold(s);
        free(sh.k_free, stage.at), free_queries(begin);
        soften(block, begin * T, factor);
        round_weights();
        UNROLL_NOT for (i32 tile = begin + step; tile < end; tile += step) {
            Stage next = stage;
            next.advance(step);
            full(sh.k_full, next);
            take_turn();
            score(shared_address(sh.k[next.at]), side);
            full(sh.v_full, stage);
            clean(block, (tile - step) * T, sh.v[stage.at]);
            weigh(shared_address(sh.v[stage.at]));
            give_turn();
            products_wait<1>();
            hold(s);
            free(sh.k_free, next.at), free_queries(tile);
            const bool grown = __any_sync(ALL, soften(block, tile * T, factor));
            if (grown) {
                products_wait<0>();
                hold(o), hold(p);
                rescale(factor);
            } else {
                products_wait<0>();
                hold(o), hold(p);
            }
            free(sh.v_free, stage.at);
            round_weights();
            stage = next;
        }
        full(sh.v_full, stage);
        clean(block, (end - 1 - (end - 1 - begin) % step) * T, sh.v[stage.at]);
        weigh(shared_address(sh.v[stage.at]));
        products_wait<0>();
        hold(o);
        free(sh.v_free, stage.at);
        if (TOGETHER && group == 1 && (end - begin) % 2 == 0) stage.advance(2), pass();
    }

    __device__ __forceinline__ void sum_lanes() {
#pragma unroll
        for (i32 h = 0; h < 2; h++) l[h] += __shfl_xor_sync(ALL, l[h], 1), l[h] += __shfl_xor_sync(ALL, l[h], 2);
    }
    // The second group's state joins the first's, which need not be ready for it.
    __device__ __forceinline__ void join(bool first) {
        if (group == 1) {
            if (!first) meet<GROUP * GROUPS>(STATE_READ);
            put(&sh.state[0][thread], GROUP);
            signal<GROUP * GROUPS>(STATE_WRITTEN);
            return;
        }
        meet<GROUP * GROUPS>(STATE_WRITTEN);
        const float4 other = sh.state[VECTORS - 1][thread];
        float weights[2][2];
        weights_of(make_float4(m[0], m[1], l[0], l[1]), other, weights);
        l[0] = l[0] * weights[0][0] + other.z * weights[1][0], m[0] = fmaxf(m[0], other.x);
        l[1] = l[1] * weights[0][1] + other.w * weights[1][1], m[1] = fmaxf(m[1], other.y);
#pragma unroll
        for (i32 i = 0; i < OUTPUTS / 4; i++) {
            float4 mine = make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]);
            combine(mine, sh.state[i][thread], weights);
            o[4 * i] = mine.x, o[4 * i + 1] = mine.y, o[4 * i + 2] = mine.z, o[4 * i + 3] = mine.w;
        }
        signal<GROUP * GROUPS>(STATE_READ);
    }

    // The state in vectors that lie `along` apart.
    __device__ __forceinline__ void put(float4* to, i32 along) const {
#pragma unroll
        for (i32 i = 0; i < OUTPUTS / 4; i++)
            to[i * along] = make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]);
        to[(VECTORS - 1) * along] = make_float4(m[0], m[1], l[0], l[1]);
    }

    __device__ __forceinline__ void store(const Block& block, i32 head, bool whole, i64 slot) {
        if (JOINED && !whole) {
            if (query(0) < block.count * a.G) put(parts_at(a, slot) + thread, GROUP);
            return;
        }
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
            const Result result(a, m[h], l[h], query_head);
            u32* const to = out_at(a, block.first + token, query_head) + lane % 4;
#pragma unroll
            for (i32 i = 0; i < OUTPUTS / 4; i++)
                to[i * 4] = pack(o[4 * i + 2 * h] * result.factor, o[4 * i + 2 * h + 1] * result.factor);
            if (lane % 4 == 0) a.lse[(block.first + token) * a.l_b + query_head * a.l_h] = result.lse;
        }
    }
};

#if !JOIN
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    many(const __grid_constant__ Maps maps, const __grid_constant__ Args a) {
    Shared& sh = *reinterpret_cast<Shared*>(memory);
    const i32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (JOINED && a.early) asm volatile("griddepcontrol.launch_dependents;");
    if (threadIdx.x == 0) {
        prefetch(maps.k), prefetch(maps.v);
        for (i32 i = 0; i < STAGES; i++) {
            barrier_init(shared_address(sh.k_full + i), 1), barrier_init(shared_address(sh.v_full + i), 1);
            barrier_init(shared_address(sh.k_free + i), READERS), barrier_init(shared_address(sh.v_free + i), READERS);
        }
        for (i32 i = 0; i < SIDES; i++)
            barrier_init(shared_address(sh.q_full + i), 2), barrier_init(shared_address(sh.q_free + i), GROUPS * 4);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (PAGE && JOINED && warp == 0) { // the table, if it is small, by the time that page ids are asked for
        const i64 at = (i64(blockIdx.x) * 32 + lane) * 32;
        if (at < (a.requests - 1) * a.t_b + a.limit / (PAGE ? PAGE : 1)) prefetch(a.table + at);
    }
    if (JOINED && warp == 1) make_rows(a, sh.rows, lane);
    if (!JOINED) {
        asm volatile("griddepcontrol.wait;" ::: "memory"); // for the rows
        if (a.early) asm volatile("griddepcontrol.launch_dependents;");
    }
    const i32 param = Walk::parameter(a, lane);
    __syncthreads();
    if (warp < 4) {
        fewer_registers<56>();
        if (warp < 2) bring(maps, a, sh, param, warp, lane);
        if (warp >= 2) bring_queries(a, sh, param, threadIdx.x - 64, lane);
        if ((JOINED || (KIND == ROUNDS && a.param == 1)) && warp >= 2) write_empty(a, threadIdx.x - 64, 64);
        return;
    }
    more_registers<224>();
    Attention it = {a, sh, i32(threadIdx.x % GROUP), i32(threadIdx.x / GROUP) - 1, warp % 4, lane};
    if (it.group == 1) it.give_turn();
    Stage stage;
    i32 segments = 0;
    for (Walk walk(a, param, lane); walk.more(); walk.next(), segments++) {
        const Block block(a, walk.c.row);
        const i32 side = segments % SIDES;
        it.begin(block, walk.c.head);
        if (segments == 0) {
            load_queries(a, sh.q[0], block, walk.c.head, it.group * (QUERIES / 2), QUERIES / 2, it.thread, GROUP);
            meet<GROUP * GROUPS>(1);
        }
        barrier_wait(shared_address(sh.q_full + side), segments / SIDES % 2);
        if (lane == 0) sh.places[warp - 4] = walk;
        __syncwarp();
        it.attend(block, walk.c, stage, side);
        static_cast<Place&>(walk) = sh.places[warp - 4];
        __syncwarp();
        it.sum_lanes();
        const bool whole = walk.whole();
        if (TOGETHER) it.join(segments == 0);
        if (!TOGETHER || it.group == 0) it.store(block, walk.c.head, whole, whole ? 0 : walk.slot(lane));
        if (JOINED && !whole && !a.apart) arrive(a, sh.last, walk, block, runs_of(a, batch_of(a, lane)));
        const i32 tiles = walk.c.end - walk.c.t + (TOGETHER ? (walk.c.end - walk.c.t) % 2 : 0);
        stage.advance(tiles % STAGES), stage.phase ^= tiles / STAGES & 1;
    }
    if (TOGETHER && it.group == 1 && segments) meet<GROUP * GROUPS>(STATE_READ);
}
#else
// The parts of every unit that was cut, after `many`: what can be known of them is worked out while that still runs.
extern "C" __global__ void __launch_bounds__(JOINERS, 1) join(const __grid_constant__ Args a) {
    const i32 lane = threadIdx.x % 32;
    if (threadIdx.x < 32) make_rows(a, reinterpret_cast<i32*>(memory), lane);
    __syncthreads();
    const Runs runs = runs_of(a, batch_of(a, lane));
    bool waited = false;
    UNROLL_NOT for (i32 item = blockIdx.x; item < used_rows(a) * a.KH * SLICES; item += gridDim.x) {
        const i32 unit = item / SLICES, row = unit / a.KH, head = unit - row * a.KH;
        const i32 n = row_at(a, row).n;
        i32 before = 0;
        UNROLL_NOT for (i32 r = lane; r < row; r += 32) before += row_at(a, r).n;
        const Tiles begin = all(Tiles(before)) * a.KH + Tiles(head) * n;
        if (n == 0) continue;
        const Parts parts(runs, begin, n);
        if (parts.count == 1) continue;
        if (!waited) asm volatile("griddepcontrol.wait;" ::: "memory");
        waited = true;
        parts.join_slice(a, Block(a, row), head, item % SLICES);
    }
    if (!waited) asm volatile("griddepcontrol.wait;" ::: "memory"); // the end of this grid means that of the other
}
#endif

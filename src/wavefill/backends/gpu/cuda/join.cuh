// How softmax states of parts of a unit become one, always in the same order: of a program's warps (shared memory), of
// a team's programs (distributed shared memory), of the teams that shared the unit (device memory, by the last of
// them).
#pragma once

constexpr i32 THREADS = WARPS * 32, HEADS = 8 * NT, TEAM = 16;     // programs of a team at most
constexpr i32 O_ROW = HEADS * (DV + 4) * 4 <= STAGE ? DV + 4 : DV; // floats
constexpr i32 VECTORS = DV / 4;                                    // of an output row
constexpr i32 STATE = RING - STAGE;                                // in the ring
static_assert(HEADS * O_ROW * 4 <= STAGE, "a warp's state must fit a stage");

struct Shared {
    float2 warps[WARPS][HEADS];             // maximum and sum of each warp
    float2 stats[2][TEAM][HEADS];           // of each program of the team
    float4 sums[2][HEADS * VECTORS + TEAM]; // this program's share of all programs' outputs
    u64 barriers[2], copies[WARPS][STAGES];
    i32 last;
};

// A team of 2^log_size programs of a cluster: this one's rank in it, and the rank of its first one in the cluster.
struct Team {
    i32 log_size, rank, leader;

    __device__ __forceinline__ i32 size() const { return 1 << log_size; }
};

// Four columns of a head's output before the division by `l`, the sum of the weights 2^(score - m).
struct Part {
    float4 o;
    float m, l;
};

__device__ __forceinline__ float weight(float m, float top) { return m == NOTHING ? 0.f : exp2_of(m - top); }

__device__ __forceinline__ void add(float4& x, float w, const float4& y) {
    x.x += w * y.x, x.y += w * y.y, x.z += w * y.z, x.w += w * y.w;
}

// N parts become one; parts of nothing (l = 0) count for nothing.
template <i32 N> __device__ __forceinline__ Part joined(const Part (&parts)[N]) {
    Part all = {make_float4(0, 0, 0, 0), NOTHING, 0};
#pragma unroll
    for (i32 i = 0; i < N; i++) all.m = fmaxf(all.m, parts[i].m);
#pragma unroll
    for (i32 i = 0; i < N; i++) {
        const float w = weight(parts[i].m, all.m);
        all.l += w * parts[i].l;
        add(all.o, w, parts[i].o);
    }
    return all;
}

// The parts of `lanes` neighbouring lanes become one, in each of them.
__device__ __forceinline__ void join_lanes(Part& x, i32 lanes) {
    UNROLL_NOT for (i32 d = 1; d < lanes; d *= 2) {
        const float other = __shfl_xor_sync(ALL, x.m, d), top = fmaxf(x.m, other), w = weight(x.m, top);
        x.m = top, x.l *= w, x.o.x *= w, x.o.y *= w, x.o.z *= w, x.o.w *= w;
        x.l += __shfl_xor_sync(ALL, x.l, d);
        x.o.x += __shfl_xor_sync(ALL, x.o.x, d), x.o.y += __shfl_xor_sync(ALL, x.o.y, d);
        x.o.z += __shfl_xor_sync(ALL, x.o.z, d), x.o.w += __shfl_xor_sync(ALL, x.o.w, d);
    }
}

// Part of a warp's state, written by `keep` over the last stage of its ring.
__device__ __forceinline__ Part of_warp(const Shared& sh, const unsigned char* rings, i32 warp, i32 x) {
    const i32 head = x / VECTORS;
    const float2 stat = sh.warps[warp][head];
    return {*reinterpret_cast<const float4*>(rings + warp * RING + STATE + (head * O_ROW + x % VECTORS * 4) * 4),
            stat.x, stat.y};
}

// A warp's state goes to shared memory, [HEADS, O_ROW] over the last stage of its ring.
__device__ __forceinline__ void keep(Shared& sh, unsigned char* rings, i32 warp, i32 lane, State& s) {
    float* const to = reinterpret_cast<float*>(rings + warp * RING + STATE) + lane % 4 * 2 * O_ROW + lane / 4;
#pragma unroll
    for (i32 n = 0; n < NT; n++)
#pragma unroll
        for (i32 h = 0; h < 2; h++) {
            float l = s.l[n][h];
            l += __shfl_xor_sync(ALL, l, 4);
            l += __shfl_xor_sync(ALL, l, 8);
            l += __shfl_xor_sync(ALL, l, 16);
            if (lane < 4) sh.warps[warp][n * 8 + lane * 2 + h] = make_float2(s.m[n][h], l);
#pragma unroll
            for (i32 j = 0; j < DV / 16; j++) {
                to[(n * 8 + h) * O_ROW + j * 16] = s.o[n][j][h];
                to[(n * 8 + h) * O_ROW + j * 16 + 8] = s.o[n][j][h + 2];
            }
        }
}

// Four columns of a head's result, and its LSE beside the first of them.
__device__ __forceinline__ void store(const Args& a, i32 row, i32 query, i32 column, Part p) {
    u16* to = a.out + row * a.o_b + query * a.o_h + column;
    float f = p.l == 0 ? 0 : 1; // 0: no keys
    if (SINKS) {
        const float sink = sink_at(a, query), top = fmaxf(p.m, sink);
        f *= weight(p.m, top), p.l = p.l * weight(p.m, top) + weight(sink, top), p.m = top;
    }
    if (p.l != 0) f *= __frcp_rn(p.l);
    const u32 low = pack(p.o.x * f, p.o.y * f), high = pack(p.o.z * f, p.o.w * f);
    if ((reinterpret_cast<u64>(to) & 7) == 0) {
        *reinterpret_cast<uint2*>(to) = make_uint2(low, high);
    } else {
        to[0] = u16(low), to[1] = u16(low >> 16), to[2] = u16(high), to[3] = u16(high >> 16);
    }
    if (column == 0) a.lse[row * a.l_b + query * a.l_h] = (p.m + __log2f(p.l)) * 0.69314718056f;
}

// A partial state in device memory: its outputs [G, DV], and for each program of a team maxima and sums [G].
__device__ __forceinline__ void store_part(const Args& a, i64 slot, i64 stats, i32 head, i32 column, bool first,
                                           const Part& p) {
    *reinterpret_cast<float4*>(a.part_o + (slot * a.G + head) * DV + column) = p.o;
    if (first) a.part_m[stats * a.G + head] = p.m, a.part_l[stats * a.G + head] = p.l;
}
__device__ __forceinline__ Part load_part(const Args& a, i64 slot, i64 stats, i32 head, i32 column) {
    return {__ldcg(reinterpret_cast<const float4*>(a.part_o + (slot * a.G + head) * DV + column)),
            __ldcg(a.part_m + stats * a.G + head), __ldcg(a.part_l + stats * a.G + head)};
}

// A segment that was read: `tiles` of the n of a unit that starts at linear tile `begin`; `slot` of its partial state.
struct Segment {
    i32 row, head, n, tiles;
    bool whole;
    Tiles begin;
    i64 slot;
};

// The states that `keep` left become the result, or a partial state of it, and all of them the result when it is the
// last. `rounds` counts the exchanges of the team.
__device__ __forceinline__ void finish(const Args& a, Shared& sh, const unsigned char* rings, u32* counters,
                                       const Runs& runs, const Segment& segment, const Team& team, i32& rounds, i32 g0,
                                       i32 G) {
    const i32 thread = threadIdx.x, programs = team.size(), vectors = G * VECTORS, query0 = segment.head * a.G + g0;
    const i32 each = (vectors + programs - 1) >> team.log_size, from = team.rank * each,
              upto = least(from + each, vectors);
    auto put = [&](i32 x, const Part& p) {
        const i32 head = x / VECTORS, column = x % VECTORS * 4;
        if (segment.whole)
            store(a, segment.row, query0 + head, column, p);
        else
            store_part(a, segment.slot, segment.slot * programs + team.rank, g0 + head, column,
                       x == from || column == 0, p);
    };
    const u32 barrier = shared_address(sh.barriers) + 8 * (rounds & 1);
    const u32 sums = shared_address(&sh.sums[rounds & 1][from]),
              stats = shared_address(sh.stats[rounds & 1][team.rank]);
    if (programs > 1) {
        if (rounds == 0) cluster_wait();
        if (thread == 0) barrier_expect(barrier, programs * (most(upto - from, 0) * 16 + G * 8));
    }
    UNROLL_NOT for (i32 x = thread; x < vectors; x += THREADS) {
        Part parts[WARPS];
#pragma unroll
        for (i32 w = 0; w < WARPS; w++) parts[w] = of_warp(sh, rings, w, x);
        const Part p = joined(parts);
        if (programs == 1) {
            put(x, p);
        } else { // each program gets its share of the columns from all, and their statistics
            const i32 head = x / VECTORS, column = x % VECTORS, to = x / each;
            send(remote(sums + (x - to * each) * 16, team.leader + to), remote(barrier, team.leader + to), p.o);
            if (column < programs)
                send(remote(stats + head * 8, team.leader + column), remote(barrier, team.leader + column),
                     make_float2(p.m, p.l));
        }
    }
    if (programs > 1) {
        barrier_wait(barrier, rounds >> 1 & 1);
        const i32 sub = thread % 4; // four lanes a vector
        UNROLL_NOT for (i32 x0 = from; x0 < upto; x0 += THREADS / 4) {
            const i32 x = x0 + thread / 4, head = least(x, vectors - 1) / VECTORS;
            Part parts[TEAM / 4];
#pragma unroll
            for (i32 i = 0; i < TEAM / 4; i++) {
                const i32 r = i * 4 + sub;
                parts[i] = {make_float4(0, 0, 0, 0), NOTHING, 0};
                if (r < programs && x < upto) {
                    const float2 stat = sh.stats[rounds & 1][r][head];
                    parts[i] = {sh.sums[rounds & 1][r * each + x - from], stat.x, stat.y};
                }
            }
            Part p = joined(parts);
            join_lanes(p, 4);
            if (sub == 0 && x < upto) put(x, p);
        }
        rounds++;
    }
    if (KIND != STREAM_K || segment.whole) return;

    __syncthreads();
    const i32 run0 = runs.owner(segment.begin);
    u32* const counter = counters + (run0 << team.log_size) + team.rank;
    u32 arrived = 0;
    if (thread == 0) arrived = add_ordered(counter, segment.tiles) + segment.tiles;
    const i32 count = runs.owner(segment.begin + segment.n - 1) - run0 + 1;
    const bool middle = runs.cut(run0) < segment.begin; // the unit is the first run's second segment, then
    if (thread == 0) {
        sh.last = arrived == u32(segment.n);
        if (arrived == u32(segment.n)) *counter = 0;
    }
    __syncthreads();
    if (!sh.last) return;
    i32 lanes = 1; // that share a vector's parts
    UNROLL_NOT while (lanes < 8 && each * lanes * 2 <= THREADS && lanes * 8 < count) lanes *= 2;
    const i32 sub = thread & (lanes - 1);
    UNROLL_NOT for (i32 x0 = from; x0 < upto; x0 += THREADS / lanes) {
        const i32 x = x0 + thread / lanes, head = least(x, vectors - 1) / VECTORS, column = x % VECTORS * 4;
        Part p = {make_float4(0, 0, 0, 0), NOTHING, 0};
        UNROLL_NOT for (i32 i0 = sub; i0 < count && x < upto; i0 += 8 * lanes) {
            Part some[9]; // their loads are under way together
            some[8] = p;
#pragma unroll
            for (i32 i = 0; i < 8; i++) {
                const i32 part = i0 + i * lanes;
                some[i] = {make_float4(0, 0, 0, 0), NOTHING, 0};
                if (part < count) {
                    const i64 slot = 2 * i64(run0 + part) + (part == 0 && middle);
                    some[i] = load_part(a, slot, slot * programs + team.rank, g0 + head, column);
                }
            }
            p = joined(some);
        }
        join_lanes(p, lanes);
        if (sub == 0 && x < upto) store(a, segment.row, query0 + head, column, p);
    }
}

// How states of parts of a unit of drafts become one through device memory, always in the same order.
//
// A state is [VECTORS, GROUP] float4 in the order of the accumulators: of thread i of a group, vector n has the columns
// 8n + 2 (i % 4) and one further of its two queries, and the last vector their maxima and sums.
#pragma once

constexpr i32 NEAR = 16, SLICES = GROUP / NEAR * ((VECTORS - 2) / (16 / LANES) + 1); // see `join_slice`
static_assert(!JOIN || SLICES == UNIT_PROGRAMS, "as many.py has it");

// What a query's maximum and sum make of its outputs.
struct Result {
    float factor, lse;

    __device__ __forceinline__ Result(const Args& a, float m, float l, i32 query_head) {
        float top = m, sum = l;
        factor = 1;
        if (SINKS) {
            const float sink = sink_at(a, query_head);
            top = fmaxf(m, sink);
            factor = m == NOTHING ? 0.f : exp2_of(m - top);
            sum = sum * factor + (sink == NOTHING ? 0.f : exp2_of(sink - top));
        }
        factor = l == 0 ? 0.f : factor * __frcp_rn(sum);
        lse = (top + __log2f(sum)) * LN2;
    }
};

__device__ __forceinline__ u32* out_at(const Args& a, i64 token, i32 query_head) {
    return reinterpret_cast<u32*>(a.out + token * a.o_b + query_head * a.o_h);
}
__device__ __forceinline__ float4* parts_at(const Args& a, i64 slot) {
    return reinterpret_cast<float4*>(a.part_o) + slot * (VECTORS * GROUP);
}

// What two states of both queries weigh in their sum: [state][query]. `x` and `y` are maxima; nothing weighs nothing.
__device__ __forceinline__ void weights_of(const float4& one, const float4& other, float (&weights)[2][2]) {
    const float top0 = fmaxf(one.x, other.x), top1 = fmaxf(one.y, other.y);
    weights[0][0] = one.x == NOTHING ? 0.f : exp2_of(one.x - top0);
    weights[0][1] = one.y == NOTHING ? 0.f : exp2_of(one.y - top1);
    weights[1][0] = other.x == NOTHING ? 0.f : exp2_of(other.x - top0);
    weights[1][1] = other.y == NOTHING ? 0.f : exp2_of(other.y - top1);
}
__device__ __forceinline__ void combine(float4& o, const float4& other, const float (&weights)[2][2]) {
    o.x = o.x * weights[0][0] + other.x * weights[1][0], o.y = o.y * weights[0][0] + other.y * weights[1][0];
    o.z = o.z * weights[0][1] + other.z * weights[1][1], o.w = o.w * weights[0][1] + other.w * weights[1][1];
}

// N vectors of a state: outputs, and maxima and sums.
template <i32 N> struct Vectors {
    float4 o[N], stat;

    __device__ __forceinline__ Vectors() : stat(make_float4(NOTHING, NOTHING, 0, 0)) {
#pragma unroll
        for (i32 n = 0; n < N; n++) o[n] = make_float4(0, 0, 0, 0);
    }

    __device__ __forceinline__ void add(const float4& with, const float4 (&others)[N]) {
        float weights[2][2];
        weights_of(stat, with, weights);
        stat.z = stat.z * weights[0][0] + with.z * weights[1][0], stat.x = fmaxf(stat.x, with.x);
        stat.w = stat.w * weights[0][1] + with.w * weights[1][1], stat.y = fmaxf(stat.y, with.y);
#pragma unroll
        for (i32 n = 0; n < N; n++) combine(o[n], others[n], weights);
    }

    // The result of the thread `place` of a state, in vectors from `first` on, APART from each other.
    template <i32 APART>
    __device__ __forceinline__ void store(const Args& a, const Block& block, i32 head, i32 place, i32 first) const {
#pragma unroll
        for (i32 h = 0; h < 2; h++) {
            const i32 r = place / 32 * 16 + place % 32 / 4 + h * 8, token = u32(r) / u32(a.G);
            if (token >= block.count) continue;
            const i32 query_head = head * a.G + r - token * a.G;
            const Result result(a, h ? stat.y : stat.x, h ? stat.w : stat.z, query_head);
            u32* const to = out_at(a, block.first + token, query_head) + place % 4;
#pragma unroll
            for (i32 n = 0; n < N; n++)
                to[(first + n * APART) * 4] =
                    pack((h ? o[n].z : o[n].x) * result.factor, (h ? o[n].w : o[n].y) * result.factor);
            if (first == 0 && place % 4 == 0)
                a.lse[(block.first + token) * a.l_b + query_head * a.l_h] = result.lse;
        }
    }
};

// The parts of a unit of n tiles from the linear tile `begin` on.
struct Parts {
    i32 run0, count;
    bool middle; // the unit is the first run's second segment

    __device__ __forceinline__ Parts(const Runs& runs, Tiles begin, i32 n) {
        run0 = runs.owner(begin), count = runs.owner(begin + n - 1) - run0 + 1;
        middle = runs.cut(run0) < begin;
    }

    // Adds every `step`th part from `from` on: N vectors of the thread `place`, AT_ONCE parts at a time.
    template <i32 N, i32 APART, i32 AT_ONCE>
    __device__ __forceinline__ void add_to(Vectors<N>& all, const Args& a, i32 place, i32 first, i32 from,
                                           i32 step) const {
        UNROLL_NOT for (i32 i0 = from; i0 < count; i0 += AT_ONCE * step) {
            float4 stats[AT_ONCE], some[AT_ONCE][N];
#pragma unroll
            for (i32 i = 0; i < AT_ONCE; i++) {
                const i32 part = i0 + i * step;
                const float4* const at = parts_at(a, 2 * i64(run0 + part) + (part == 0 && middle)) + place;
                const bool there = part < count;
                stats[i] = there ? __ldcg(at + (VECTORS - 1) * GROUP) : make_float4(NOTHING, NOTHING, 0, 0);
#pragma unroll
                for (i32 n = 0; n < N; n++)
                    some[i][n] = there ? __ldcg(at + (first + n * APART) * GROUP) : make_float4(0, 0, 0, 0);
            }
#pragma unroll
            for (i32 i = 0; i < AT_ONCE; i++) all.add(stats[i], some[i]);
        }
    }

    // Whether the block has no queries for a thread of the state, nor for those that follow it in its sixteen.
    static __device__ __forceinline__ bool unused(const Args& a, const Block& block, i32 place) {
        return place / 32 * 16 + place % 32 / 4 >= block.count * a.G;
    }

    // By all threads that multiply: each has a thread of the state, and every other one of its vectors.
    __device__ __forceinline__ void join(const Args& a, const Block& block, i32 head) const {
        constexpr i32 N = 4, APART = (VECTORS - 1) / N;
        const i32 place = threadIdx.x % GROUP;
        if (unused(a, block, place)) return;
        UNROLL_NOT for (i32 first = threadIdx.x / GROUP - 1; first < APART; first += GROUPS) {
            Vectors<N> all;
            add_to<N, APART, 4>(all, a, place, first, 0, 1);
            all.store<APART>(a, block, head, place, first);
        }
    }

    // By a program of JOINERS threads: `near` threads of the state and some vectors of theirs, and LANES threads that
    // share the parts of each.
    __device__ __forceinline__ void join_slice(const Args& a, const Block& block, i32 head, i32 slice) const {
        __shared__ Vectors<1> sums[JOINERS];
        const i32 thread = threadIdx.x, lane = thread / NEAR % LANES;
        const i32 place = slice % (GROUP / NEAR) * NEAR + thread % NEAR;
        const i32 n = slice / (GROUP / NEAR) * (16 / LANES) + thread / (NEAR * LANES);
        const bool used = n < VECTORS - 1 && !unused(a, block, place / NEAR * NEAR);
        Vectors<1> all;
        if (used) add_to<1, 1, 8>(all, a, place, n, lane, LANES);
#pragma unroll
        for (i32 d = LANES / 2; d; d /= 2) {
            if (lane >= d) sums[thread] = all;
            __syncthreads();
            if (lane < d) all.add(sums[thread + d * NEAR].stat, sums[thread + d * NEAR].o);
            __syncthreads();
        }
        if (used && lane == 0) all.store<1>(a, block, head, place, n);
    }
};

// After a part has been written by the threads that multiply: the last of a unit's programs to come here joins them.
__device__ __forceinline__ void arrive(const Args& a, i32& last, const Walk& walk, const Block& block,
                                       const Runs& runs) {
    const Cursor& c = walk.c;
    const Parts parts(runs, walk.at - c.t, c.n);
    meet<GROUP * GROUPS>(1);
    if (threadIdx.x == GROUP) {
        u32* const counter = a.counters + parts.run0;
        const u32 tiles = c.end - c.t;
        last = add_ordered(counter, tiles) + tiles == u32(c.n);
        if (last) *counter = 0;
    }
    meet<GROUP * GROUPS>(1);
    if (last) parts.join(a, block, c.head);
}

// Instructions that CUDA C++ has no names for.
#pragma once

constexpr float LOG2_E = 1.44269504089f;
#define NOTHING __int_as_float(0xff800000) // minus infinity, the maximum of no scores
#if BF16
#define ELEMENT "bf16"
#else
#define ELEMENT "f16"
#endif

struct Map; // where the copy engine finds a cache

__device__ __forceinline__ u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

// What a warp read and wrote in shared memory comes before what it asks the copy engine to put there.
__device__ __forceinline__ void reads_end() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
}
// So many threads wait for each other.
template <i32 THREADS_> __device__ __forceinline__ void meet(i32 barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(THREADS_) : "memory");
}
// 16 bytes on their way to shared memory, zeros unless `there`; and the end of all that a thread asked for.
__device__ __forceinline__ void copy_16(u32 to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copies_end() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// What a thread asked for since the last time is a group; and the end of all groups but the last COUNT.
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <i32 COUNT> __device__ __forceinline__ void copies_left() {
    asm volatile("cp.async.wait_group %0;" ::"n"(COUNT) : "memory");
}
// The copy engine brings a row and counts its bytes at a barrier. Multiples of 16, size and addresses.
__device__ __forceinline__ void copy_row(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
// A box of 16 tokens and 64 columns of a cache seen as [pages, heads, tokens, columns]; zeros past its edges.
__device__ __forceinline__ void copy_box(u32 to, const Map& map, i32 column, i32 token, i32 head, i32 page,
                                         u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
        "[%6];" ::"r"(to),
        "l"(&map), "r"(column), "r"(token), "r"(head), "r"(page), "r"(barrier)
        : "memory");
}
__device__ __forceinline__ void prefetch(const Map& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
__device__ __forceinline__ void store_zeros(u32 at) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
}

__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}
__device__ __forceinline__ void load_transposed(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

// c [16, 8] += a [16, 16] b [16, 8]
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." ELEMENT "." ELEMENT
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                 "{%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two floats rounded to elements, the first in the low half.
__device__ __forceinline__ u32 pack(float low, float high) {
    u32 r;
    asm("cvt.rn." ELEMENT "x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

// An 8x8 matrix of elements, two of a row in each lane, transposed.
__device__ __forceinline__ u32 transpose(u32 x) {
    u32 r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
    return r;
}

__device__ __forceinline__ float exp2_of(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// A head's sink in base 2; one past 2.3e38 would become infinite.
template <class A> __device__ __forceinline__ float sink_at(const A& a, i32 head) {
    return fminf(__ldg(a.sinks + head) * LOG2_E, 3.4e38f);
}

// Within a few units in the last place; near zero, where the quotient would cancel, by a series.
__device__ __forceinline__ float tanh_of(float x) {
    const float y = x * x, e = exp2_of(-2 * LOG2_E * fabsf(x));
    const float near = x + x * y * (-0.33333299f + y * (0.13331958f + y * (-0.05378668f + y * (0.02080538f -
                                                                                             y * 0.00590586f))));
    return fabsf(x) < 0.6f ? near : copysignf(__fdividef(1 - e, 1 + e), x);
}

__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Adds to a counter after all that this program's threads wrote, as far as they met at a barrier, and before all that
// they read after the next one; returns what was there.
__device__ __forceinline__ u32 add_ordered(u32* counter, u32 x) {
    u32 r;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(r) : "l"(counter), "r"(x) : "memory");
    return r;
}

// ------------------------------------------------------------------------------------------ clusters of programs

__device__ __forceinline__ u32 cluster_rank() {
    u32 r;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
__device__ __forceinline__ u32 cluster_size() {
    u32 r;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(r));
    return r;
}
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// The address of `at` in the shared memory of another program of the cluster.
__device__ __forceinline__ u32 remote(u32 at, u32 rank) {
    u32 r;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(at), "r"(rank));
    return r;
}
// Stores to another program that count their bytes at its barrier.
__device__ __forceinline__ void send(u32 at, u32 barrier, float4 x) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(at),
        "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(barrier)
        : "memory");
}
__device__ __forceinline__ void send(u32 at, u32 barrier, float2 x) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(at),
                 "f"(x.x), "f"(x.y), "r"(barrier)
                 : "memory");
}
__device__ __forceinline__ void barrier_init(u32 at, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 at) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}
__device__ __forceinline__ void barrier_init(u32 at) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_expect(u32 at, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 at, u32 phase) {
    u32 done;
    do {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(at), "r"(phase)
                     : "memory");
    } while (!done);
}

// Products of a group of four warps (wgmma): what they read in shared memory, and how they are waited for.
//
// Shared memory holds pieces of 64 columns, [rows, 128 bytes], with the 16 bytes of a row swizzled by its number, as
// the copy engine leaves them.
#pragma once

#define FLOATS_8(c, i) \
    "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), \
        "+f"(c[i + 7])
#define FLOATS_32(c) FLOATS_8(c, 0), FLOATS_8(c, 8), FLOATS_8(c, 16), FLOATS_8(c, 24)
#define FLOATS_64(c) FLOATS_32(c), FLOATS_8(c, 32), FLOATS_8(c, 40), FLOATS_8(c, 48), FLOATS_8(c, 56)
#define PLACES_32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PLACES_64 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// Rows in pieces as a product reads them, for all lanes from the address of the first: products take it from registers
// of the warp, and wait for each other where that has to be worked out by lanes. `along` is the distance between pieces
// where the columns are those of the result (V); where they are summed over (Q, K) a step adds its bytes / 16.
__device__ __forceinline__ u64 pieces_at(u32 at, u32 along) {
    return u64((__shfl_sync(0xffffffff, at, 0) & 0x3ffff) >> 4) | u64(along >> 4) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}

// c [64, N] += a [64, 16] b [16, N], or = where `keep` is 0. `shared`: a and b by descriptor, both with their 16
// columns side by side. `registers`: a in registers, as a row of the accumulators of a product is; b with N side by
// side.
template <i32 N> struct Product;

template <> struct Product<64> {
    static __device__ __forceinline__ void shared(float (&c)[32], u64 a, u64 b, i32 keep) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0; "
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32." ELEMENT "." ELEMENT " {" PLACES_32
                     "}, %32, %33, p, 1, 1, 0, 0; }"
                     : FLOATS_32(c)
                     : "l"(a), "l"(b), "r"(keep));
    }
    static __device__ __forceinline__ void registers(float (&c)[32], const u32* a, u64 b) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." ELEMENT "." ELEMENT " {" PLACES_32
                     "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                     : FLOATS_32(c)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
};

template <> struct Product<128> {
    static __device__ __forceinline__ void shared(float (&c)[64], u64 a, u64 b, i32 keep) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0; "
                     "wgmma.mma_async.sync.aligned.m64n128k16.f32." ELEMENT "." ELEMENT " {" PLACES_64
                     "}, %64, %65, p, 1, 1, 0, 0; }"
                     : FLOATS_64(c)
                     : "l"(a), "l"(b), "r"(keep));
    }
    static __device__ __forceinline__ void registers(float (&c)[64], const u32* a, u64 b) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." ELEMENT "." ELEMENT " {" PLACES_64
                     "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                     : FLOATS_64(c)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
};

// Registers of products that follow have been written.
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_issued() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// All products are done but those of the last `N` groups.
template <i32 N> __device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// Keeps registers where they are until the products that use them have been waited for.
template <i32 N> __device__ __forceinline__ void hold(float (&c)[N]) {
#pragma unroll
    for (i32 i = 0; i < N; i++) asm volatile("" : "+f"(c[i])::"memory");
}

template <i32 N> __device__ __forceinline__ void hold(u32 (&c)[N]) {
#pragma unroll
    for (i32 i = 0; i < N; i++) asm volatile("" : "+r"(c[i])::"memory");
}

// Threads of some warps meet; those that signal do not wait for the others.
template <i32 THREADS_> __device__ __forceinline__ void signal(i32 barrier) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(THREADS_) : "memory");
}
template <i32 COUNT> __device__ __forceinline__ void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <i32 COUNT> __device__ __forceinline__ void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
// What a thread wrote in shared memory comes before what products read there after a meeting.
__device__ __forceinline__ void writes_end() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

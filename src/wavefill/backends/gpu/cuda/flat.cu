// Products of a few rows with a matrix of weights, at the speed of memory, for GPUs of compute capability 9.0:
// y [M, N] = x [M, K] w [N, K]^T, M up to 8.
//
// Sixteen rows of weights are the rows of a tensor-core product and the rows of x its columns. A program takes tiles of
// sixteen rows; its warps share a tile's columns, 64 at a time by turns, straight from memory into registers, some
// steps ahead, on from tile to tile. The order of columns within a step is the lanes' own, since a sum has none.
//
// Weights do not depend on the kernel before: the first steps are on their way before it has ended. What comes after
// may begin when all programs run.
//
// variant.cuh has BF16, NORMED (rows of x are RMS-normalised first), GATED (a tile is eight gate rows and the eight up
// rows that belong to them, and the result silu(gate) * up), STAGED (x lies in shared memory; else it comes as weights
// do).

#include "variant.cuh"

#define UNROLL_NOT _Pragma("unroll 1")
typedef int i32;
typedef unsigned u32;
typedef long long i64;
typedef unsigned short u16;

#include "instructions.cuh"

struct Args {
    const u16 *x, *w, *bias, *norm, *residual; // bias and residual may be null
    u16* y;
    i64 x_s, r_s; // strides of rows
    float eps;
    i32 M, N, K; // N: rows of w
};

constexpr i32 WARPS = 8, THREADS = 32 * WARPS, RING = 4, STEP = 64, ROWS = 16;
constexpr u32 ALL = 0xffffffffu;

extern __shared__ __align__(128) unsigned char memory[]; // rows of x where STAGED

__device__ __forceinline__ uint4 stream(const u16* p) {
    uint4 r;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "l"(p));
    return r;
}
__device__ __forceinline__ float wide(u16 x) {
#if BF16
    return __uint_as_float(u32(x) << 16);
#else
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x));
    return r;
#endif
}
__device__ __forceinline__ u16 narrow(float x) { return u16(pack(x, 0)); }
__device__ __forceinline__ float rounded(float x) { return wide(narrow(x)); }

// Bytes from row to row of x in shared memory: eight lanes that read 64 bytes of two rows each meet no bank twice.
__device__ __forceinline__ i32 row_bytes(const Args& a) { return a.K * 2 + 64; }

// All rows of x into shared memory, normalised as transformers does it: rounded before the weight and after.
__device__ __forceinline__ void stage(const Args& a) {
    __shared__ float sums[8][WARPS];
    const i32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, vectors = a.K / 8;
    UNROLL_NOT for (i32 m = 0; m < a.M; m++) {
        float sum = 0;
        UNROLL_NOT for (i32 v = threadIdx.x; v < vectors; v += THREADS) {
            const uint4 x = *reinterpret_cast<const uint4*>(a.x + m * a.x_s + v * 8);
            *reinterpret_cast<uint4*>(memory + m * row_bytes(a) + v * 16) = x;
            if (NORMED) {
                const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
                for (i32 i = 0; i < 4; i++) {
                    const float low = wide(u16(words[i])), high = wide(u16(words[i] >> 16));
                    sum += low * low + high * high;
                }
            }
        }
        if (NORMED) {
#pragma unroll
            for (i32 d = 16; d; d /= 2) sum += __shfl_xor_sync(ALL, sum, d);
            if (lane == 0) sums[m][warp] = sum;
        }
    }
    __syncthreads();
    if (!NORMED) return;
    UNROLL_NOT for (i32 m = 0; m < a.M; m++) {
        float sum = 0;
#pragma unroll
        for (i32 i = 0; i < WARPS; i++) sum += sums[m][i];
        const float factor = rsqrtf(sum / float(a.K) + a.eps);
        UNROLL_NOT for (i32 v = threadIdx.x; v < vectors; v += THREADS) {
            uint4* const at = reinterpret_cast<uint4*>(memory + m * row_bytes(a) + v * 16);
            const uint4 x = *at, w = __ldg(reinterpret_cast<const uint4*>(a.norm) + v);
            u32 words[4] = {x.x, x.y, x.z, x.w};
            const u32 weights[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
            for (i32 i = 0; i < 4; i++)
                words[i] = pack(rounded(wide(u16(words[i])) * factor) * wide(u16(weights[i])),
                                rounded(wide(u16(words[i] >> 16)) * factor) * wide(u16(weights[i] >> 16)));
            *at = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) flat(const __grid_constant__ Args a) {
    __shared__ float parts[2][WARPS][32][4];
    const i32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const i32 steps = a.K / STEP, rounds = (steps + WARPS * RING - 1) / (WARPS * RING), tiles = a.N / ROWS;
    const i64 apart = i64(GATED ? a.N / 2 : 8) * a.K; // from a lane's first row of weights to its second
    const uint4 zeros = make_uint4(0, 0, 0, 0);
    uint4 w[RING][4], x[RING][2];

    auto load = [&](uint4 (&to)[4], i32 tile, i32 step) {
        const bool there = tile < tiles && step < steps;
        const u16* const row = a.w + i64(tile * (GATED ? 8 : ROWS) + g) * a.K + step * STEP + t * 8;
        to[0] = there ? stream(row) : zeros, to[1] = there ? stream(row + 32) : zeros;
        to[2] = there ? stream(row + apart) : zeros, to[3] = there ? stream(row + apart + 32) : zeros;
    };
    // Columns past the rows of x are never stored; they see the last row.
    const i32 m = g < a.M ? g : a.M - 1;
    auto load_x = [&](uint4 (&to)[2], i32 step) {
        const bool there = step < steps;
        if (STAGED) {
            const unsigned char* const from = memory + m * row_bytes(a) + step * (STEP * 2) + t * 16;
            to[0] = there ? *reinterpret_cast<const uint4*>(from) : zeros;
            to[1] = there ? *reinterpret_cast<const uint4*>(from + 64) : zeros;
        } else {
            const u16* const from = a.x + m * a.x_s + step * STEP + t * 8;
            to[0] = there ? *reinterpret_cast<const uint4*>(from) : zeros;
            to[1] = there ? *reinterpret_cast<const uint4*>(from + 32) : zeros;
        }
    };

#pragma unroll
    for (i32 r = 0; r < RING; r++) load(w[r], blockIdx.x, r * WARPS + warp);
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (STAGED) {
        stage(a);
    } else {
#pragma unroll
        for (i32 r = 0; r < RING; r++) load_x(x[r], r * WARPS + warp);
    }

    i32 side = 0;
    UNROLL_NOT for (i32 tile = blockIdx.x; tile < tiles; tile += gridDim.x, side ^= 1) {
        float even[4] = {}, odd[4] = {};
        UNROLL_NOT for (i32 round = 0; round < rounds; round++) {
            const bool on = round + 1 < rounds;
            const i32 next = on ? tile : tile + i32(gridDim.x), base = on ? (round + 1) * WARPS * RING : 0;
#pragma unroll
            for (i32 r = 0; r < RING; r++) {
                if (STAGED) load_x(x[r], (round * RING + r) * WARPS + warp);
#pragma unroll
                for (i32 i = 0; i < 2; i++) {
                    const u32 first[4] = {w[r][i].x, w[r][i + 2].x, w[r][i].y, w[r][i + 2].y};
                    const u32 second[4] = {w[r][i].z, w[r][i + 2].z, w[r][i].w, w[r][i + 2].w};
                    mma(even, first, x[r][i].x, x[r][i].y);
                    mma(odd, second, x[r][i].z, x[r][i].w);
                }
                load(w[r], next, base + r * WARPS + warp);
                if (!STAGED) load_x(x[r], base + r * WARPS + warp);
            }
        }
        *reinterpret_cast<float4*>(parts[side][warp][lane]) =
            make_float4(even[0] + odd[0], even[1] + odd[1], even[2] + odd[2], even[3] + odd[3]);
        __syncthreads(); // once a tile: who writes this side again has passed the next one, which its readers had to
        const i32 n = threadIdx.x / ROWS, r = threadIdx.x % ROWS;
        if (n >= a.M || (GATED && r >= 8)) continue;
        auto sum = [&](i32 row) { // of the tile, of all warps
            float found = 0;
#pragma unroll
            for (i32 i = 0; i < WARPS; i++) found += parts[side][i][row % 8 * 4 + n / 2][row / 8 * 2 + n % 2];
            return found;
        };
        if (GATED) {
            const i32 row = tile * 8 + r;
            float gate = sum(r), up = sum(r + 8);
            if (a.bias) gate += wide(__ldg(a.bias + row)), up += wide(__ldg(a.bias + a.N / 2 + row));
            gate = rounded(gate);
            a.y[i64(n) * (a.N / 2) + row] = narrow(rounded(gate / (1 + expf(-gate))) * rounded(up));
        } else {
            const i32 row = tile * ROWS + r;
            float value = sum(r);
            if (a.bias) value += wide(__ldg(a.bias + row));
            if (a.residual) value = rounded(value) + wide(a.residual[n * a.r_s + row]);
            a.y[i64(n) * a.N + row] = narrow(value);
        }
    }
}

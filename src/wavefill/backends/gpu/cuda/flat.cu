// Products of a few rows with a matrix of weights, at the speed of memory, for GPUs of compute capability 9.0:
// y [M, N] = x [M, K] w [N, K]^T, M up to 8.
//
// Sixteen rows of weights are the rows of a tensor-core product and the rows of x its columns. A program takes tiles of
// sixteen rows; its warps share a tile's columns, 64 at a time by turns, each through a ring of its own in shared memory
// that goes on from tile to tile, and join what they have at the end of a tile.
//
// An SM has room for two programs and gets one of a launch: weights do not depend on the kernel before, so the next
// launch fills its rings while this one ends.
//
// variant.cuh has BF16, NORMED (rows of x are RMS-normalised first, and stay in shared memory; else they come with the
// weights), GATED (a tile is eight gate rows and the eight up rows that belong to them, and the result silu(gate) * up),
// STAGES of a ring.

#include "variant.cuh"

#define UNROLL_NOT _Pragma("unroll 1")
typedef int i32;
typedef unsigned u32;
typedef long long i64;
typedef unsigned short u16;
typedef unsigned long long u64;

#include "instructions.cuh"
#include "elements.cuh"

struct Args {
    const u16 *x, *w, *bias, *norm, *residual; // bias and residual may be null
    u16* y;
    i64 x_s, r_s; // strides of rows
    float eps;
    i32 M, N, K;  // N: rows of w
};

constexpr i32 WARPS = 8, THREADS = 32 * WARPS, STEP = 64, ROWS = 16, LINE = STEP * 2;
constexpr u32 ALL = 0xffffffffu;

extern __shared__ __align__(128) unsigned char memory[]; // the rings, and rows of x where NORMED

__device__ __forceinline__ i32 least(i32 x, i32 y) { return x < y ? x : y; }

// Bytes of a stage: lines of weights, and of x unless NORMED; and from row to row of x that stays.
__device__ __forceinline__ i32 stage_bytes(const Args& a) { return LINE * (NORMED ? ROWS : ROWS + a.M); }
__device__ __forceinline__ i32 x_bytes(const Args& a) { return a.K * 2 + 16; }

// Rows of x into shared memory, normalised as transformers does it: rounded before the weight and after. A warp takes a
// row; a single row is shared by all of them.
__device__ __forceinline__ void normalise(const Args& a, unsigned char* to) {
    __shared__ float sums[WARPS];
    const i32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, vectors = a.K / 8;
    const bool alone = a.M == 1;
    const i32 m = alone ? 0 : warp, first = alone ? threadIdx.x : lane, by = alone ? THREADS : 32;
    unsigned char* const row = to + m * x_bytes(a);
    float sum = 0;
    if (m < a.M) {
        UNROLL_NOT for (i32 v0 = first; v0 < vectors; v0 += 8 * by) {
            uint4 some[8]; // under way together
#pragma unroll
            for (i32 i = 0; i < 8; i++)
                if (v0 + i * by < vectors)
                    some[i] = *reinterpret_cast<const uint4*>(a.x + m * a.x_s + (v0 + i * by) * 8);
#pragma unroll
            for (i32 i = 0; i < 8; i++) {
                if (v0 + i * by >= vectors) continue;
                *reinterpret_cast<uint4*>(row + (v0 + i * by) * 16) = some[i];
                const u32 words[4] = {some[i].x, some[i].y, some[i].z, some[i].w};
#pragma unroll
                for (i32 j = 0; j < 4; j++) {
                    const float low = wide(u16(words[j])), high = wide(u16(words[j] >> 16));
                    sum += low * low + high * high;
                }
            }
        }
    }
#pragma unroll
    for (i32 d = 16; d; d /= 2) sum += __shfl_xor_sync(ALL, sum, d);
    if (alone) {
        if (lane == 0) sums[warp] = sum;
        __syncthreads();
        sum = 0;
#pragma unroll
        for (i32 i = 0; i < WARPS; i++) sum += sums[i];
    }
    const float factor = rsqrtf(sum / float(a.K) + a.eps);
    if (m < a.M) {
        UNROLL_NOT for (i32 v = first; v < vectors; v += by) { // each thread what it wrote itself
            uint4* const at = reinterpret_cast<uint4*>(row + v * 16);
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

// Where a line has its 16 bytes of number `at`: those of eight lines are then in different banks.
__device__ __forceinline__ i32 place(i32 line, i32 at) { return line * LINE + ((at ^ (line & 7)) << 4); }

// A warp's ring. What a lane copies at once, and its place; rounds count on from tile to tile.
struct Ring {
    const Args& a;
    const i32 lane, warp, bytes;
    const u32 begin;
    i32 tile, round;

    __device__ __forceinline__ Ring(const Args& a, i32 lane, i32 warp)
        : a(a), lane(lane), warp(warp), bytes(stage_bytes(a)), begin(shared_address(memory) + warp * STAGES * bytes),
          tile(blockIdx.x), round(0) {}

    // The warp's columns of a round, weights or x or both, on their way to a stage; zeros past the last column.
    __device__ __forceinline__ void ask(i32 slot, bool weights, bool x) {
        const i32 column = (round * WARPS + warp) * STEP + lane % 8 * 8;
        const bool there = tile < a.N / ROWS && column < a.K;
        const u32 to = begin + slot * bytes;
        if (weights) {
            const u16* const from = a.w + column;
#pragma unroll
            for (i32 i = 0; i < 4; i++) {
                const i32 line = i * 4 + lane / 8;
                const i64 row = GATED ? i64(tile) * 8 + line % 8 + (line / 8) * i64(a.N / 2) : i64(tile) * ROWS + line;
                copy_16(to + place(line, lane % 8), from + row * a.K, there);
            }
        }
        if (!NORMED && x)
#pragma unroll
            for (i32 i = 0; i < 2; i++) {
                const i32 line = i * 4 + lane / 8;
                if (line < a.M)
                    copy_16(to + place(ROWS + line, lane % 8), a.x + line * a.x_s + column, there);
            }
        if (++round * WARPS * STEP >= a.K) round = 0, tile += gridDim.x;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 2) flat(const __grid_constant__ Args a) {
    __shared__ float parts[2][WARPS][32][4];
    const i32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, tiles = a.N / ROWS;
    Ring ring(a, lane, warp);
    UNROLL_NOT for (i32 i = 0; i < STAGES - !NORMED; i++) ring.ask(i, true, false);
    copies_commit();
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    unsigned char* const kept = memory + WARPS * STAGES * ring.bytes;
    if (NORMED) {
        normalise(a, kept);
        copies_left<0>();
    } else { // x for what is there, and a whole stage, which is not waited for
        ring.tile = blockIdx.x, ring.round = 0;
        UNROLL_NOT for (i32 i = 0; i < STAGES - 1; i++) ring.ask(i, false, true);
        copies_commit();
        ring.ask(STAGES - 1, true, true);
        copies_commit();
        copies_left<1>();
    }
    __syncwarp();

    // The lane's rows in `load_matrices`: of weights sixteen by two halves, of x eight by four quarters.
    const i32 m = least(lane % 8, a.M - 1); // columns past the rows of x are never stored; they see the last row
    const u32 at_x = shared_address(kept) + m * x_bytes(a) + lane / 8 * 16 + warp * LINE;
    i32 slot = 0, side = 0;
    UNROLL_NOT for (i32 tile = blockIdx.x; tile < tiles; tile += gridDim.x, side ^= 1) {
        float sums[2][4] = {};
        UNROLL_NOT for (i32 from = 0; from < a.K; from += WARPS * STEP) {
            const u32 at = ring.begin + slot * ring.bytes;
            if (from + warp * STEP < a.K) {
#pragma unroll
                for (i32 i = 0; i < 2; i++) {
                    u32 b[4], first[4], second[4];
                    load_matrices(b, NORMED ? at_x + from * 2 + i * 64 : at + place(ROWS + m, i * 4 + lane / 8));
                    load_matrices(first, at + place(lane % 16, i * 4 + lane / 16));
                    load_matrices(second, at + place(lane % 16, i * 4 + 2 + lane / 16));
                    mma(sums[0], first, b[0], b[1]);
                    mma(sums[1], second, b[2], b[3]);
                }
            }
            __syncwarp();
            ring.ask(slot, true, true);
            copies_commit();
            copies_left<STAGES - 1>();
            __syncwarp();
            if (++slot == STAGES) slot = 0;
        }
        *reinterpret_cast<float4*>(parts[side][warp][lane]) =
            make_float4(sums[0][0] + sums[1][0], sums[0][1] + sums[1][1], sums[0][2] + sums[1][2],
                        sums[0][3] + sums[1][3]);
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

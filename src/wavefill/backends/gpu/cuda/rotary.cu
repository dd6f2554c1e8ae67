// What lies between a decoding step's product for q, k and v and its attention, for GPUs of compute capability 9.0: heads
// of q are rotated in place, those of k rotated into the cache, those of v copied there. A warp takes a head.
//
// variant.cuh has BF16, NORMED (heads of q and k are RMS-normalised first, each as a whole).

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
    u16* qkv; // rows of HQ + 2 KH heads
    const u16 *cos, *sin, *q_norm, *k_norm;
    u16 *k, *v; // pages
    const i64* slots;
    i64 s_r, s_cb, s_ct, k_p, k_t, k_h, v_p, v_t, v_h;
    float eps;
    i32 T, HQ, KH, D, half, pages, page_size;
};

constexpr i32 WARPS = 4;
constexpr u32 ALL = 0xffffffffu;

extern "C" __global__ void __launch_bounds__(WARPS * 32) rotary(const __grid_constant__ Args a) {
    const i32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = blockIdx.y, head = blockIdx.x * WARPS + warp;
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (head >= a.HQ + 2 * a.KH) return;
    u16* const x = a.qkv + row * a.s_r + i64(head) * a.D;
    const bool is_q = head < a.HQ, is_v = head >= a.HQ + a.KH;
    u16* to = x;
    if (!is_q) {
        const i64 slot = a.slots[row];
        if (slot < 0 || slot >= i64(a.pages) * a.page_size) return;
        const i64 page = slot / a.page_size, token = slot % a.page_size;
        to = is_v ? a.v + page * a.v_p + token * a.v_t + (head - a.HQ - a.KH) * a.v_h
                  : a.k + page * a.k_p + token * a.k_t + (head - a.HQ) * a.k_h;
    }
    if (is_v) {
        UNROLL_NOT for (i32 d = lane * 8; d < a.D; d += 256)
            *reinterpret_cast<uint4*>(to + d) = *reinterpret_cast<const uint4*>(x + d);
        return;
    }
    const u16* const norm = is_q ? a.q_norm : a.k_norm;
    float scale = 1;
    if (NORMED) {
        float sum = 0;
        UNROLL_NOT for (i32 d = lane; d < a.D; d += 32) sum += wide(x[d]) * wide(x[d]);
#pragma unroll
        for (i32 d = 16; d; d /= 2) sum += __shfl_xor_sync(ALL, sum, d);
        scale = rsqrtf(sum / float(a.D) + a.eps);
    }
    const i64 angle = row / a.T * a.s_cb + row % a.T * a.s_ct;
    UNROLL_NOT for (i32 d = lane; d < a.half; d += 32) {
        float low = wide(x[d]), high = wide(x[d + a.half]);
        if (NORMED) {
            low = rounded(rounded(low * scale) * wide(__ldg(norm + d)));
            high = rounded(rounded(high * scale) * wide(__ldg(norm + d + a.half)));
        }
        const float c0 = wide(a.cos[angle + d]), c1 = wide(a.cos[angle + d + a.half]);
        const float s0 = wide(a.sin[angle + d]), s1 = wide(a.sin[angle + d + a.half]);
        to[d] = narrow(rounded(low * c0) - rounded(high * s0));
        to[d + a.half] = narrow(rounded(high * c1) + rounded(low * s1));
    }
    if (!is_q) // what does not turn
        UNROLL_NOT for (i32 d = 2 * a.half + lane; d < a.D; d += 32) to[d] = x[d];
}

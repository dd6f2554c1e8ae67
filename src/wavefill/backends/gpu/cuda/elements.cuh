// Numbers of 16 bits, bfloat16 where BF16, as float32 and back.
#pragma once

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

// The few vector operations that the kernel needs, for the instruction set this file is compiled for. V holds kW floats.
// Everything is static and only C headers are included: a shared inline function compiled with AVX-512 could otherwise
// be the copy that the linker keeps for code that runs on any CPU.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define WF_INLINE inline __attribute__((always_inline))
#define WF_LAMBDA __attribute__((always_inline))

// Keeps a loaded vector in its register: compilers would rather load it again for every use, and two loads a cycle are
// what bounds the dot products.
#if defined(__AVX2__)
#define WF_KEEP(reg) asm("" : "+v"(reg))
#else
#define WF_KEEP(reg) ((void)0)
#endif

// sum += a * b in the register of the sum: compilers put it into that of a factor where it is its last use, and with
// every register taken pay for that with moves through memory.
#if defined(__AVX2__)
#define WF_ADD_PRODUCT(sum, a, b) asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b))
#else
#define WF_ADD_PRODUCT(sum, a, b) ((sum) = vfma(a, b, sum))
#endif

namespace {

// Calls f with 0 .. N - 1 as constants: arrays indexed by them are registers from the start.
template <int I>
struct Index {
  constexpr operator int() const { return I; }
};
template <int N, int I = 0, class F>
WF_INLINE void each(const F &f) {
  if constexpr (I < N) {
    f(Index<I>{});
    each<N, I + 1>(f);
  }
}
struct f16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};
#if defined(__AVX512F__)

using V = __m512;
constexpr int kW = 16;
inline V vzero() { return _mm512_setzero_ps(); }
inline V vset(float x) { return _mm512_set1_ps(x); }
inline V vload(const float *p) { return _mm512_loadu_ps(p); }
inline void vstore(float *p, V a) { _mm512_storeu_ps(p, a); }
inline V vfma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
inline V vadd(V a, V b) { return _mm512_add_ps(a, b); }
inline V vsub(V a, V b) { return _mm512_sub_ps(a, b); }
inline V vmul(V a, V b) { return _mm512_mul_ps(a, b); }
inline V vmax(V a, V b) { return _mm512_max_ps(a, b); }
inline float vhmax(V a) { return _mm512_reduce_max_ps(a); }
inline float vhsum(V a) { return _mm512_reduce_add_ps(a); }
inline V vround(V a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// a * 2^n for whole n; n in [-126, 0]
inline V vscale2(V a, V n) { return _mm512_scalef_ps(a, n); }
inline V vzero_below(V a, V x, float limit) {
  return _mm512_mask_mov_ps(a, _mm512_cmp_ps_mask(x, vset(limit), _CMP_LT_OQ), vzero());
}
inline V vdiv(V a, V b) { return _mm512_div_ps(a, b); }
// yes where x < limit, no elsewhere and where x is NaN
inline V vbelow(V x, float limit, V yes, V no) {
  return _mm512_mask_mov_ps(no, _mm512_cmp_ps_mask(x, vset(limit), _CMP_LT_OQ), yes);
}
inline __m256 fold(V a) {
  return _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
}
template <int H>
WF_INLINE V load_half(const f16 *p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p + H * kW)));
}
template <int H>
WF_INLINE V load_half(const bf16 *p) {
  const __m512i x = _mm512_loadu_si512(p);
  return _mm512_castsi512_ps(H ? _mm512_and_si512(x, _mm512_set1_epi32((int)0xffff0000u)) : _mm512_slli_epi32(x, 16));
}
// Element i of the result: p[i / R]; p has kW elements at least.
template <int R>
WF_INLINE V vspread(const float *p) {
  if constexpr (R == 1) return vload(p);
  const __m512i at = _mm512_srli_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), R / 2);
  return _mm512_permutexvar_ps(at, vload(p));
}
inline bool vdiffer(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ) != 0; }
// Element i of the result: the one at i ^ N; N a power of two.
template <int N>
inline V vswap(V a) {
  if constexpr (N == 8) return _mm512_shuffle_f32x4(a, a, 0x4E);
  if constexpr (N == 4) return _mm512_shuffle_f32x4(a, a, 0xB1);
  if constexpr (N == 2) return _mm512_permute_ps(a, 0x4E);
  return _mm512_permute_ps(a, 0xB1);
}

#elif defined(__AVX2__)

using V = __m256;
constexpr int kW = 8;
inline V vzero() { return _mm256_setzero_ps(); }
inline V vset(float x) { return _mm256_set1_ps(x); }
inline V vload(const float *p) { return _mm256_loadu_ps(p); }
inline void vstore(float *p, V a) { _mm256_storeu_ps(p, a); }
inline V vfma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
inline V vadd(V a, V b) { return _mm256_add_ps(a, b); }
inline V vsub(V a, V b) { return _mm256_sub_ps(a, b); }
inline V vmul(V a, V b) { return _mm256_mul_ps(a, b); }
inline V vmax(V a, V b) { return _mm256_max_ps(a, b); }
inline float vhmax(V a) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
}
inline float vhsum(V a) {
  __m128 m = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  m = _mm_add_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_add_ss(m, _mm_shuffle_ps(m, m, 1)));
}
inline V vround(V a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline V vscale2(V a, V n) {
  __m256i e = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(a, _mm256_castsi256_ps(e));
}
inline V vzero_below(V a, V x, float limit) { return _mm256_andnot_ps(_mm256_cmp_ps(x, vset(limit), _CMP_LT_OQ), a); }
inline V vdiv(V a, V b) { return _mm256_div_ps(a, b); }
inline V vbelow(V x, float limit, V yes, V no) {
  return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(x, vset(limit), _CMP_LT_OQ));
}
inline __m256 fold(V a) { return a; }
template <int H>
WF_INLINE V load_half(const f16 *p) {
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + H * kW)));
}
template <int H>
WF_INLINE V load_half(const bf16 *p) {
  const __m256i x = _mm256_loadu_si256((const __m256i *)p);
  return _mm256_castsi256_ps(H ? _mm256_and_si256(x, _mm256_set1_epi32((int)0xffff0000u)) : _mm256_slli_epi32(x, 16));
}
// Element i of the result: p[i / R]; p has kW elements at least.
template <int R>
WF_INLINE V vspread(const float *p) {
  if constexpr (R == 1) return vload(p);
  const __m256i at = _mm256_srli_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), R / 2);
  return _mm256_permutevar8x32_ps(vload(p), at);
}
inline bool vdiffer(V a, V b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_NEQ_UQ)) != 0; }
// Element i of the result: the one at i ^ N; N a power of two.
template <int N>
inline V vswap(V a) {
  if constexpr (N == 4) return _mm256_permute2f128_ps(a, a, 1);
  if constexpr (N == 2) return _mm256_permute_ps(a, 0x4E);
  return _mm256_permute_ps(a, 0xB1);
}

#else  // any CPU: GCC's and Clang's vector extension

typedef float V __attribute__((vector_size(16)));
typedef int32_t VI __attribute__((vector_size(16)));
typedef uint32_t VU __attribute__((vector_size(16)));
constexpr int kW = 4;
inline V vset(float x) { return V{x, x, x, x}; }
inline V vzero() { return vset(0.0f); }
inline V vload(const float *p) {
  V a;
  memcpy(&a, p, sizeof a);
  return a;
}
inline void vstore(float *p, V a) { memcpy(p, &a, sizeof a); }
inline V vfma(V a, V b, V c) { return a * b + c; }
inline V vadd(V a, V b) { return a + b; }
inline V vsub(V a, V b) { return a - b; }
inline V vmul(V a, V b) { return a * b; }
inline V vselect(VI mask, V a, V b) { return (V)(((VI)a & mask) | ((VI)b & ~mask)); }
inline V vmax(V a, V b) { return vselect(a > b, a, b); }
inline float vhmax(V a) {
  float m = a[0];
  for (int i = 1; i < kW; ++i) m = a[i] > m ? a[i] : m;
  return m;
}
inline float vhsum(V a) { return (a[0] + a[2]) + (a[1] + a[3]); }
inline V vround(V a) {  // adding 1.5 * 2^23 drops the fraction bits, rounding to nearest
  const V big = vset(12582912.0f);
  return (a + big) - big;
}
inline V vscale2(V a, V n) {
  VI e = (__builtin_convertvector(n, VI) + 127) << 23;
  return a * (V)e;
}
inline V vzero_below(V a, V x, float limit) { return vselect(x < vset(limit), vzero(), a); }
inline V vdiv(V a, V b) { return a / b; }
inline V vbelow(V x, float limit, V yes, V no) { return vselect(x < vset(limit), yes, no); }
inline float f16_to_float(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000u) << 16, e = (h >> 10) & 31, m = h & 1023u;
  uint32_t bits;
  if (e == 31) bits = sign | 0x7f800000u | (m << 13);
  else if (e) bits = sign | ((e + 112) << 23) | (m << 13);
  else {
    const float x = (float)m * 5.9604644775390625e-8f;  // 2^-24
    memcpy(&bits, &x, 4);
    bits |= sign;
  }
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
template <int H>
WF_INLINE V load_half(const f16 *p) {
  V a;
  for (int i = 0; i < kW; ++i) a[i] = f16_to_float(p[H * kW + i].bits);
  return a;
}
template <int H>
WF_INLINE V load_half(const bf16 *p) {
  VU x;
  memcpy(&x, p, sizeof x);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  return (V)(H ? x << 16 : x & 0xffff0000u);
#else
  return (V)(H ? x & 0xffff0000u : x << 16);
#endif
}
// Element i of the result: p[i / R].
template <int R>
WF_INLINE V vspread(const float *p) {
  return V{p[0], p[1 / R], p[2 / R], p[3 / R]};
}
inline bool vdiffer(V a, V b) {
  const VI e = a != b;
  return e[0] | e[1] | e[2] | e[3];
}
// Element i of the result: the one at i ^ N; N a power of two.
template <int N>
inline V vswap(V a) {
  if constexpr (N == 2) return V{a[2], a[3], a[0], a[1]};
  return V{a[1], a[0], a[3], a[2]};
}

#endif

// A block of the cache is two vectors, taken one half at a time.
template <int H>
WF_INLINE V load_half(const float *p) {
  return vload(p + H * kW);
}

// Vectors whose elements belong to R rows in turn (R divides kW): every element becomes the maximum, or the sum, over
// those of its row.
template <int R, int N = kW / 2>
inline V vmax_rows(V a) {
  if constexpr (N >= R) a = vmax_rows<R, N / 2>(vmax(a, vswap<N>(a)));
  return a;
}
template <int R, int N = kW / 2>
inline V vsum_rows(V a) {
  if constexpr (N >= R) a = vsum_rows<R, N / 2>(vadd(a, vswap<N>(a)));
  return a;
}
// One value a row, spread over such a vector, and back.
template <int R>
inline V vload_rows(const float *p) {
  if constexpr (R == 1) return vset(*p);
#if defined(__AVX512F__)
  if constexpr (R == 2) return _mm512_castpd_ps(_mm512_set1_pd(*(const double *)p));
  return _mm512_broadcast_f32x4(_mm_loadu_ps(p));
#elif defined(__AVX2__)
  if constexpr (R == 2) return _mm256_castpd_ps(_mm256_broadcast_sd((const double *)p));
  return _mm256_broadcast_ps((const __m128 *)p);
#else
  if constexpr (R == 2) return V{p[0], p[1], p[0], p[1]};
  return vload(p);
#endif
}
template <int R>
inline void vstore_rows(float *p, V a) {
  float x[kW];
  vstore(x, a);
  memcpy(p, x, R * sizeof(float));
}

// Sums of four vectors, in order.
#if defined(__AVX2__)
inline __m128 vsum4(V a, V b, V c, V d) {
  const __m256 x = fold(a), y = fold(b), z = fold(c), w = fold(d);
  const __m256 xy = _mm256_add_ps(_mm256_unpacklo_ps(x, y), _mm256_unpackhi_ps(x, y));
  const __m256 zw = _mm256_add_ps(_mm256_unpacklo_ps(z, w), _mm256_unpackhi_ps(z, w));
  const __m256 s = _mm256_add_ps(_mm256_shuffle_ps(xy, zw, 0x44), _mm256_shuffle_ps(xy, zw, 0xEE));
  return _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
}
inline void store4(float *p, __m128 s) { _mm_storeu_ps(p, s); }
inline float f16_scalar(f16 x) { return _cvtsh_ss(x.bits); }
inline uint16_t to_f16_bits(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
#else
struct Sum4 {
  float s[4];
};
inline Sum4 vsum4(V a, V b, V c, V d) { return {{vhsum(a), vhsum(b), vhsum(c), vhsum(d)}}; }
inline void store4(float *p, Sum4 s) { memcpy(p, s.s, sizeof s.s); }
inline float f16_scalar(f16 x) { return f16_to_float(x.bits); }
inline uint16_t to_f16_bits(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  const uint32_t sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
  if (a >= 0x47800000u) return (uint16_t)(sign | 0x7c00u);  // 65536 and up
  if (a < 0x38800000u) {                                    // below 2^-14: a multiple of 2^-24
    float y;
    memcpy(&y, &a, 4);
    return (uint16_t)(sign | (uint32_t)nearbyintf(y * 16777216.0f));
  }
  const uint32_t r = a + 0xfffu + ((a >> 13) & 1u);  // round to nearest even; may carry into the exponent
  return (uint16_t)(sign | ((r - 0x38000000u) >> 13));
}
#endif

inline float to_float(float x) { return x; }
inline float to_float(f16 x) { return f16_scalar(x); }
inline float to_float(bf16 x) {
  const uint32_t u = (uint32_t)x.bits << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
inline void from_float(float x, float &y) { y = x; }
inline void from_float(float x, f16 &y) { y.bits = to_f16_bits(x); }
inline void from_float(float x, bf16 &y) {
  uint32_t u;
  memcpy(&u, &x, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) y.bits = (uint16_t)((u >> 16) | 0x40u);  // NaN stays NaN
  else y.bits = (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

// load_half splits a bf16 block into its even and its odd elements, which costs one operation a vector instead of two.
// Dot products do not care about the order; q and the accumulators keep it, and outputs go back through lane_element.
template <class T>
inline int lane_element(int lane) {
  return lane;
}
template <>
inline int lane_element<bf16>(int lane) {
  const int block = lane / (2 * kW), i = lane % (2 * kW);
  return block * 2 * kW + (i < kW ? 2 * i : 2 * (i - kW) + 1);
}
// exp(x) for x <= 0 to within 1.5 units in the last place; NaN stays NaN, anything below -87.3 gives 0.
inline V vexp(V x) {
  // The order of the operands lets a NaN through on every instruction set.
  const V clamped = vmax(vset(-88.0f), x);
  const V n = vround(vmul(clamped, vset(1.44269504088896341f)));
  V r = vfma(n, vset(-0.693359375f), clamped);
  r = vfma(n, vset(2.12194440e-4f), r);
  V p = vset(1.9875691500e-4f);
  p = vfma(p, r, vset(1.3981999507e-3f));
  p = vfma(p, r, vset(8.3334519073e-3f));
  p = vfma(p, r, vset(4.1665795894e-2f));
  p = vfma(p, r, vset(1.6666665459e-1f));
  p = vfma(p, r, vset(5.0000001201e-1f));
  p = vadd(vfma(vmul(r, r), p, r), vset(1.0f));
  return vzero_below(vscale2(p, n), x, -87.3f);
}

inline V vabs(V a) { return vmax(a, vsub(vzero(), a)); }

// c tanh(s / c) for c > 0, to within a few units in the last place; NaN stays NaN.
inline V vcap(V s, V c) {
  const V y = vdiv(s, c), size = vabs(y), z = vmul(y, y);
  // Below 0.625 the tanh is y + y^3 P(y^2), with P fitted to the least relative error, 4e-9. In terms of s nothing
  // cancels, and a cap far above the score leaves it as it is.
  V p = vset(-5.70498e-3f);
  p = vfma(p, z, vset(2.063908e-2f));
  p = vfma(p, z, vset(-5.373971e-2f));
  p = vfma(p, z, vset(1.3331442e-1f));
  p = vfma(p, z, vset(-3.3333282e-1f));
  const V low = vfma(vmul(s, z), p, s);
  const V e = vexp(vmul(size, vset(-2.0f)));
  const V top = vmul(c, vdiv(vsub(vset(1.0f), e), vadd(vset(1.0f), e)));
  return vbelow(size, 0.625f, low, vbelow(s, 0.0f, vsub(vzero(), top), top));
}

}  // namespace

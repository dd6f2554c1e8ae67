// Codes of a quantised cache as vectors of floats, or of bf16 pairs, and their scales.
// Everything is in the translation unit's own anonymous namespace.
#pragma once
#include "problem.h"
#include "vec.h"

namespace {

constexpr int kPrefetchLevel = 3;  // __builtin_prefetch locality: 3 L1, 2 L2

// Codes of a quantised cache, whose values are code x scale.
struct e4m3 {
  uint8_t bits;
};
struct i8 {
  int8_t bits;
};
template <class T>
constexpr bool is_code = false;
template <>
constexpr bool is_code<e4m3> = true;
template <>
constexpr bool is_code<i8> = true;
// Codes that meet a q in bf16, in dot products of pairs.
template <class C>
struct paired {
  C code;
};
template <class C>
constexpr bool is_code<paired<C>> = true;
// What a loaded code is still to be multiplied by.
template <class T>
constexpr float unit_of = 1.0f;
#if !defined(__AVX512BF16__)
template <>
constexpr float unit_of<e4m3> = 256.0f;  // read as the float16 with its bits, whose exponents are 8 less
#endif

#if defined(__AVX512F__)

#if defined(__AVX512BF16__)
// The bytes of the bf16 numbers of e4m3's magnitudes, NaN included: the lower ones of all 128, then the upper ones.
struct Magnitudes {
  alignas(64) uint8_t bytes[256];
};
constexpr Magnitudes magnitudes() {
  Magnitudes t{};
  for (int c = 0; c < 128; ++c) {
    int e = c >> 3, m = c & 7;
    if (c > 0 && c < 8)
      for (e = 1; m < 8; --e) m <<= 1;  // below 2^-6 there is no leading one: shift until there is
    const int bits = c == 127 ? 0x7fc0 : c == 0 ? 0 : (e + 120) << 7 | (m & 7) << 4;
    t.bytes[c] = (uint8_t)(bits & 255);
    t.bytes[128 + c] = (uint8_t)(bits >> 8);
  }
  return t;
}
constexpr Magnitudes kMagnitudes = magnitudes();
// 32 numbers as bf16, in order.
WF_INLINE __m512i load_pairs(const bf16 *p) { return _mm512_loadu_si512(p); }
WF_INLINE __m512i load_pairs(const e4m3 *p) {
  const __m512i twice = _mm512_set_epi64(0x1f1f1e1e1d1d1c1c, 0x1b1b1a1a19191818, 0x1717161615151414, 0x1313121211111010,
                                         0x0f0f0e0e0d0d0c0c, 0x0b0b0a0a09090808, 0x0707060605050404, 0x0303020201010000);
  const __m512i x = _mm512_permutexvar_epi8(twice, _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)p)));
  auto table = [](int at) { return _mm512_load_si512(kMagnitudes.bytes + at); };
  const __m512i low = _mm512_permutex2var_epi8(table(0), x, table(64));
  const __m512i high = _mm512_permutex2var_epi8(table(128), x, table(192));
  const __m512i size = _mm512_mask_mov_epi8(low, 0xaaaaaaaaaaaaaaaaull, high);
  return _mm512_ternarylogic_epi64(size, x, _mm512_set1_epi16((short)0x8000), 0xf8);  // size | (x & sign)
}
WF_INLINE __m512i load_pairs(const i8 *p) {
  auto floats = [&](int at) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(p + at))));
  };
  return (__m512i)_mm512_cvtne2ps_pbh(floats(kW), floats(0));
}
template <class C>
WF_INLINE __m512i load_pairs(const paired<C> *p) {
  return load_pairs((const C *)p);
}
template <int H>
WF_INLINE V load_half(const e4m3 *p) {
  const __m512i x = load_pairs(p);
  return _mm512_castsi512_ps(H ? _mm512_and_si512(x, _mm512_set1_epi32((int)0xffff0000u)) : _mm512_slli_epi32(x, 16));
}
#else
// float16 numbers of e4m3 codes that lie in the upper bytes of 16 bits; the exponent of NaN is not the largest there.
WF_INLINE __m256i widen_e4m3(__m256i x) {
  const __m256i y = _mm256_and_si256(_mm256_srai_epi16(x, 1), _mm256_set1_epi16((short)0xbf80));
  const __m256i size = _mm256_and_si256(y, _mm256_set1_epi16(0x3f80));
  return _mm256_or_si256(y, _mm256_cmpeq_epi16(size, _mm256_set1_epi16(0x3f80)));
}
template <int H>
WF_INLINE V load_half(const e4m3 *p) {
  const __m256i x = _mm256_loadu_si256((const __m256i *)p);
  return _mm512_cvtph_ps(widen_e4m3(H ? x : _mm256_slli_epi16(x, 8)));
}
#endif
template <int H>
WF_INLINE V load_half(const i8 *p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(p + H * kW))));
}

#elif defined(__AVX2__)

// float16 numbers of e4m3 codes that lie in the upper bytes of 16 bits; the exponent of NaN is not the largest there.
WF_INLINE __m128i widen_e4m3(__m128i x) {
  const __m128i y = _mm_and_si128(_mm_srai_epi16(x, 1), _mm_set1_epi16((short)0xbf80));
  const __m128i size = _mm_and_si128(y, _mm_set1_epi16(0x3f80));
  return _mm_or_si128(y, _mm_cmpeq_epi16(size, _mm_set1_epi16(0x3f80)));
}
template <int H>
WF_INLINE V load_half(const e4m3 *p) {
  const __m128i x = _mm_loadu_si128((const __m128i *)p);
  return _mm256_cvtph_ps(widen_e4m3(H ? x : _mm_slli_epi16(x, 8)));
}
template <int H>
WF_INLINE V load_half(const i8 *p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p + H * kW))));
}

#else

// e4m3 as the float16 with its bits; the exponent of NaN is not the largest there.
inline float e4m3_to_float(uint8_t b) {
  const uint32_t size = b & 0x7fu;
  return f16_to_float((uint16_t)((uint32_t)(b & 0x80u) << 8 | (size == 0x7fu ? 0x7fffu : size << 7)));
}
template <int H>
WF_INLINE V load_half(const e4m3 *p) {
  V a;
  for (int i = 0; i < kW; ++i) a[i] = e4m3_to_float(p[2 * i + H].bits);
  return a;
}
template <int H>
WF_INLINE V load_half(const i8 *p) {
  V a;
  for (int i = 0; i < kW; ++i) a[i] = (float)p[H * kW + i].bits;
  return a;
}

#endif

template <int H, class C>
WF_INLINE V load_half(const paired<C> *p) {
  return load_half<H>((const C *)p);
}

// e4m3 comes in even and odd elements, as bf16 does.
template <>
inline int lane_element<e4m3>(int lane) {
  return lane_element<bf16>(lane);
}
template <>
inline int lane_element<paired<e4m3>>(int lane) {
  return lane_element<bf16>(lane);
}

// ---- scales

inline void widen(const f16 *x, int64_t n, float *to) {
  int64_t i = 0;
  for (; i + 2 * kW <= n; i += 2 * kW) {
    vstore(to + i, load_half<0>(x + i));
    vstore(to + i + kW, load_half<1>(x + i));
  }
  for (; i < n; ++i) to[i] = to_float(x[i]);
}

// What codes of head `head` are multiplied by wherever it is the same for all tokens: once in q, once in the result.
template <class T>
inline float scale_of_head(const wf::Scales &s, int64_t head) {
  return s.at && !s.tokens ? unit_of<T> * ((const float *)s.at)[head * s.to_head] : unit_of<T>;
}

// Scales of a head of the tile's tokens as floats.
inline void gather_scales(const wf::Scales &s, const char *const *at, int64_t head, int64_t n, float *to) {
  const int64_t size = s.half ? 2 : 4, offset = head * s.to_head * size;
  bool apart = false;  // a tile may lie in several pages
  for (int64_t i = 0; i < n; ++i) apart |= at[i] != at[0] + 2 * i;
  if (!s.half)
    for (int64_t i = 0; i < n; ++i) memcpy(to + i, at[i] + offset, 4);
  else if (!apart)
    widen((const f16 *)(at[0] + offset), n, to);
  else
    for (int64_t i = 0; i < n; ++i) to[i] = to_float(*(const f16 *)(at[i] + offset));
}

inline void prefetch_scales(const wf::Scales &s, const char *const *at, int64_t head, int64_t n) {
  const int64_t offset = head * s.to_head * (s.half ? 2 : 4);
  uintptr_t line = 0;
  for (int64_t i = 0; i < n; ++i) {
    const char *from = at[i] + offset;
    if ((uintptr_t)from / 64 == line) continue;
    line = (uintptr_t)from / 64;
    __builtin_prefetch(from, 0, kPrefetchLevel);
  }
}

// The addresses, for head 0, of the scales of n tokens of a page.
inline void locate_scales(const wf::Scales &s, int64_t page, int64_t offset, int64_t n, const char **to) {
  if (!s.tokens) return;
  const int64_t size = s.half ? 2 : 4;
  const char *at = s.at + (page * s.to_page + offset * s.to_token) * size;
  for (int64_t i = 0; i < n; ++i, at += s.to_token * size) to[i] = at;
}

}  // namespace

// New tokens on their way into a cache of codes: the rules of wavefill/quantise.py, to the bit. Steps are written on the
// bits of floats, whose order for magnitudes is that of unsigned numbers, so that compilers make vectors of the loops.
// Included by kernel.cpp only.
#pragma once
#include "codes.h"

namespace {

using wf::Append;

constexpr uint32_t kInfinity = 0x7f800000u, kSize = 0x7fffffffu;

inline uint32_t bits_of(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}
inline float float_of(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}
inline uint32_t umin(uint32_t a, uint32_t b) { return a < b ? a : b; }

// The bits of a magnitude that is at most `most`; NaN stays.
inline uint32_t within(uint32_t size, uint32_t most) { return size > kInfinity ? size : umin(size, most); }

// The nearest code, ties to even; what is past the outermost becomes that.
inline void encode(float x, e4m3 &to) {
  const uint32_t u = bits_of(x), size = within(u & kSize, bits_of(448.0f));
  const uint32_t normal = ((size + 0x7ffffu + (size >> 20 & 1u)) >> 20) - (120u << 3);
  const uint32_t small = bits_of(float_of(size) + 16384.0f) - bits_of(16384.0f);  // multiples of 2^-9
  const uint32_t code = size > kInfinity ? 0x7fu : size < bits_of(0.015625f) ? small : normal;
  to.bits = (uint8_t)((u >> 24 & 0x80u) | code);
}
inline void encode(float x, i8 &to) {
  const uint32_t u = bits_of(x), size = (u & kSize) > kInfinity ? 0u : umin(u & kSize, bits_of(127.0f));
  const int32_t code = (int32_t)(bits_of(float_of(size) + 8388608.0f) - bits_of(8388608.0f)), sign = (int32_t)u >> 31;
  to.bits = (int8_t)((code ^ sign) - sign);
}

template <class C>
constexpr float largest = 127.0f;
template <>
constexpr float largest<e4m3> = 448.0f;
template <class C>
constexpr bool has_nan = false;
template <>
constexpr bool has_nan<e4m3> = true;

// x [n] as floats of at most the largest magnitude that the format holds; returns the largest of them. NaN is none of
// e4m3's, which has a code for it, and otherwise makes the scale NaN.
template <class C, class Q>
inline float load_row(const Q *from, int64_t step, int64_t n, bool half, float *x) {
  const uint32_t most = bits_of(half ? largest<C> * 65504.0f : 0x1p127f);
  uint32_t top = 0;
  for (int64_t i = 0; i < n; ++i) x[i] = to_float(from[i * step]);
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t u = bits_of(x[i]), size = within(u & kSize, most);
    const uint32_t counted = has_nan<C> && size > kInfinity ? 0u : size;
    top = counted > top ? counted : top;
    x[i] = float_of((u & ~kSize) | size);
  }
  return float_of(top);
}

template <class C>
inline float scale_of(float size) {
  const float scale = size * (1.0f / largest<C>);
  return scale < 0x1p-126f ? 0.0f : scale;
}

// Tokens [begin, end) of K or V, whose slots were checked. `x` has room for a row of floats, and its codes.
template <class C, class Q>
void quantise_typed(const Append &a, const int64_t *slots, int64_t begin, int64_t end, int64_t page_size, float *x) {
  C *codes = (C *)(x + a.width);
  for (int64_t i = begin; i < end; ++i) {
    if (slots[i] < 0) continue;
    const int64_t page = slots[i] / page_size, offset = slots[i] % page_size;
    for (int64_t h = 0; h < a.heads; ++h) {
      const wf::Scales &s = a.scales;
      const float size = load_row<C>((const Q *)a.src + i * a.src_token + h * a.src_head, a.src_dim, a.width, s.half, x);
      float scale = s.at ? 0.0f : 1.0f;
      if (s.at) {
        char *at = (char *)s.at + (page * s.to_page + offset * s.to_token + h * s.to_head) * (s.half ? 2 : 4);
        if (!s.tokens) {
          memcpy(&scale, at, 4);
        } else if (s.half) {
          f16 short_scale;
          from_float(scale_of<C>(size), short_scale);
          memcpy(at, &short_scale, 2);
          scale = to_float(short_scale);
        } else {
          scale = scale_of<C>(size);
          memcpy(at, &scale, 4);
        }
      }
      const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
      for (int64_t d = 0; d < a.width; ++d) encode(x[d] * inverse, codes[d]);
      C *to = (C *)a.dst + page * a.to.page + offset * a.to.token + h * a.to.head;
      if (a.to.dim == 1)
        memcpy(to, codes, (size_t)a.width);
      else
        for (int64_t d = 0; d < a.width; ++d) to[d * a.to.dim] = codes[d];
    }
  }
}

template <class C>
void quantise_codes(const Append &a, const int64_t *slots, int64_t begin, int64_t end, int64_t page_size, float *x) {
  switch (a.dtype) {
    case wf::DType::f32: return quantise_typed<C, float>(a, slots, begin, end, page_size, x);
    case wf::DType::f16: return quantise_typed<C, f16>(a, slots, begin, end, page_size, x);
    case wf::DType::bf16: return quantise_typed<C, bf16>(a, slots, begin, end, page_size, x);
  }
}

}  // namespace

// y = x W' + bias for a few rows of x. The weights of an output are to the rows of x what a key is to its queries, so
// this is the scores' work on another shape: every weight is read once, and the memory bus sets the pace.
// Included by kernel.cpp only; everything is in the translation unit's own anonymous namespace.
#pragma once
#include "tile.h"

namespace {

using wf::Linear;

template <class T>
inline void spread(const Linear &l) {
  for (int64_t r = 0; r < l.rows; ++r)
    lay_out_row<T>((const T *)l.x + r * l.x_row, l.in, 1.0f, l.lanes + r * row_floats<T>(l.in));
}

// Outputs [begin, end) of rows r .. r + MR.
template <class T, int MR>
void products(const Linear &l, int64_t r, int64_t begin, int64_t end) {
  constexpr int NT = kTokens<MR>;
  constexpr int64_t block = 2 * kW;
  const int64_t stride = row_floats<T>(l.in), full = l.in / block * block;
  T tail[NT * block] = {};
  const T *at[NT], *tails[NT];
  for (int j = 0; j < NT; ++j) tails[j] = tail + j * block;
  for (int64_t o = begin; o < end; o += NT) {
    for (int j = 0; j < NT; ++j) {
      at[j] = (const T *)l.weight + (o + j < end ? o + j : end - 1) * l.weight_row;
      memcpy(tail + j * block, at[j] + full, (size_t)(l.in - full) * sizeof(T));
    }
    V acc[MR][NT];
    dots<T, MR, NT>(l.in, l.lanes + r * stride, stride, at, 0, tails, acc);
    for (int i = 0; i < MR; ++i)
      for (int j = 0; j < NT && o + j < end; ++j) {
        const float sum = vhsum(acc[i][j]) + (l.bias ? to_float(((const T *)l.bias)[o + j]) : 0.0f);
        from_float(sum, ((T *)l.out)[(r + i) * l.out_row + o + j]);
      }
  }
}

template <class T>
void linear_typed(const Linear &l, int64_t begin, int64_t end) {
  int64_t r = 0;
  for (; r + 4 <= l.rows; r += 4) products<T, 4>(l, r, begin, end);
  switch (l.rows - r) {
    case 1: return products<T, 1>(l, r, begin, end);
    case 2: return products<T, 2>(l, r, begin, end);
    case 3: return products<T, 3>(l, r, begin, end);
  }
}

}  // namespace

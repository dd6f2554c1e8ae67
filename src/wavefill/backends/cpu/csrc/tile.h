// One tile: scores of up to `tile` tokens against all query rows of a KV head, the online softmax, and P.V.
// Included by kernel.cpp only, inside no namespace; everything is in the translation unit's own anonymous namespace.
#pragma once
#include "problem.h"
#include "vec.h"

namespace {

using wf::Problem;
using wf::Row;

constexpr int kPrefetchLevel = 2;  // __builtin_prefetch locality: 3 L1, 2 L2

struct Dims {
  int64_t d_padded, dv_padded, tile_padded;
};

inline int64_t pad_to(int64_t a, int64_t b) { return (a + b - 1) / b * b; }

// Tokens of a tile: the address of KV head 0 of each.
struct Tokens {
  const char **k, **v;
  int64_t from, count;
};

// Running softmax state of the query rows (query tokens x G) of one KV head: accumulators, maxima and sums in one run
// of floats, so that a partial state is one copy.
struct State {
  float *q;  // [rows, d_padded] in lane order
  float *sums;
  int64_t rows, dv;
  float *acc() const { return sums; }
  float *max() const { return sums + rows * dv; }
  float *sum() const { return sums + rows * dv + rows; }
};

inline Dims dims_of(const Problem &p) {
  return {pad_to(p.D, 2 * kW), pad_to(p.DV, 2 * kW), pad_to(p.tile, kW)};
}

inline int64_t state_floats(const Problem &p, int64_t rows) { return rows * (dims_of(p).dv_padded + 2); }

inline void reset(State &s) {
  for (int64_t i = 0; i < s.rows * s.dv; ++i) s.sums[i] = 0.0f;
  for (int64_t i = 0; i < s.rows; ++i) s.max()[i] = -INFINITY, s.sum()[i] = 0.0f;
}

#if defined(__AVX512BF16__)
// Dot products of bf16 pairs take q in bf16, in its own order. Exact, because q has the cache's dtype.
template <class T>
struct PairDot {
  static constexpr bool value = false;
};
template <>
struct PairDot<bf16> {
  static constexpr bool value = true;
};
#else
template <class T>
struct PairDot {
  static constexpr bool value = false;
};
#endif

template <class T>
inline int64_t q_element(int lane) {
  return PairDot<T>::value ? lane : lane_element<T>(lane);
}
template <class T>
inline void store_q(float *q, int64_t at, const T *x) {
  if (PairDot<T>::value) {
    const T zero = {};
    ((T *)q)[at] = x ? *x : zero;
  } else {
    q[at] = x ? to_float(*x) : 0.0f;
  }
}

// Scores of MR query rows against NT tokens; k[j] points at a token's head, tail[j] at its zero-padded last block.
template <class T, int MR, int NT>
inline void dots(const Problem &p, const float *q, int64_t q_stride, const T *const *k, const T *const *tail, V (&acc)[MR][NT]) {
  const int64_t block = 2 * kW, full = p.D / block, blocks = (p.D + block - 1) / block;
  for (int i = 0; i < MR; ++i)
    for (int j = 0; j < NT; ++j) acc[i][j] = vzero();
  for (int64_t b = 0; b < blocks; ++b) {
    for (int j = 0; j < NT; ++j) {
      const T *src = b < full ? k[j] + b * block : tail[j];
#if defined(__AVX512BF16__)
      if constexpr (PairDot<T>::value) {
        const __m512bh x = (__m512bh)_mm512_loadu_si512(src);
        for (int i = 0; i < MR; ++i) {
          const __m512bh y = (__m512bh)_mm512_loadu_si512((const T *)q + i * q_stride + b * block);
          acc[i][j] = _mm512_dpbf16_ps(acc[i][j], x, y);
        }
        continue;
      }
#endif
      V x0, x1;
      load_pair(src, x0, x1);
      for (int i = 0; i < MR; ++i) {
        const float *y = q + i * q_stride + b * block;
        acc[i][j] = vfma(x0, vload(y), acc[i][j]);
        acc[i][j] = vfma(x1, vload(y + kW), acc[i][j]);
      }
    }
  }
}

#if defined(__AVX512F__)
constexpr int kTokens4 = 4;  // tokens at a time for four rows: 32 registers hold 16 sums
constexpr int kBlocks4 = 2;
#else
constexpr int kTokens4 = 2;
constexpr int kBlocks4 = 1;
#endif

template <class T>
struct TileWork {
  const Problem &p;
  const Row &row;
  float *scores;
  char *k_stage, *v_stage, *k_tail, *v_tail;

  // Adds the tile `now` to the state of `head`; `next`, if any, is prefetched meanwhile.
  void run(State &s, int64_t head, const Tokens &now, const Tokens *next) {
    const int64_t n = now.count;
    const Source k = source(now.k, n, head, p.ks, p.D, k_stage, k_tail);
    const Source v = source(now.v, n, head, p.vs, p.DV, v_stage, v_tail);
    score(s, k, n, head, next);
    soft_max(s, now.from, n);
    accumulate(s, v, n);
  }

 private:
  // Where the elements of a head lie: token i at base[i] + offset, its last partial block in `tail` when there is one.
  struct Source {
    const char *const *base;
    int64_t offset;
    const T *staged;  // set when the elements had to be gathered (innermost stride other than 1)
    int64_t width;
    const T *tail;
    const T *at(int64_t i) const { return staged ? staged + i * width : (const T *)(base[i] + offset); }
    const T *last(int64_t i) const { return tail + i * 2 * kW; }
  };

  static Source source(const char *const *tokens, int64_t n, int64_t head, const wf::Strides &st, int64_t width,
                       char *stage, char *tail) {
    Source s{tokens, head * st.head * (int64_t)sizeof(T), nullptr, width, (const T *)tail};
    if (st.dim != 1) {
      T *to = (T *)stage;
      for (int64_t i = 0; i < n; ++i) {
        const T *from = (const T *)(tokens[i] + s.offset);
        for (int64_t d = 0; d < width; ++d) to[i * width + d] = from[d * st.dim];
      }
      s.staged = to;
    }
    const int64_t block = 2 * kW, full = width / block * block;
    if (full < width) {
      T *to = (T *)tail;
      memset(tail, 0, (size_t)(n * block) * sizeof(T));
      for (int64_t i = 0; i < n; ++i) memcpy(to + i * block, s.at(i) + full, (size_t)(width - full) * sizeof(T));
    }
    return s;
  }

  static void prefetch(const char *from, int64_t bytes) {
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(from + b, 0, kPrefetchLevel);
  }

  void score(State &s, const Source &k, int64_t n, int64_t head, const Tokens *next) {
    const Dims dims = dims_of(p);
    const int64_t stride = dims.tile_padded;
    for (int64_t t = 0; t < n; t += 4) {
      if (next) {
        for (int64_t j = t; j < t + 4 && j < next->count; ++j) {
          prefetch(next->k[j] + head * p.ks.head * (int64_t)sizeof(T), p.D * (int64_t)sizeof(T));
          prefetch(next->v[j] + head * p.vs.head * (int64_t)sizeof(T), p.DV * (int64_t)sizeof(T));
        }
      }
      // Past the last token its address is repeated: those scores land in the padding and are overwritten.
      const T *kp[4], *tail[4];
      for (int64_t j = 0; j < 4; ++j) {
        const int64_t token = t + j < n ? t + j : n - 1;
        kp[j] = k.at(token), tail[j] = k.last(token);
      }
      const int64_t q_step = PairDot<T>::value ? dims.d_padded / 2 : dims.d_padded;  // floats between rows
      int64_t r = 0;
      for (; r + 4 <= s.rows; r += 4) rows4(s.q + r * q_step, dims.d_padded, kp, tail, scores + r * stride + t, stride);
      const float *q = s.q + r * q_step;
      float *to = scores + r * stride + t;
      switch (s.rows - r) {
        case 3: few<3>(q, dims.d_padded, kp, tail, to, stride); break;
        case 2: few<2>(q, dims.d_padded, kp, tail, to, stride); break;
        case 1: few<1>(q, dims.d_padded, kp, tail, to, stride); break;
      }
    }
  }

  void rows4(const float *q, int64_t q_stride, const T *const *kp, const T *const *tail, float *to, int64_t stride) {
    if constexpr (kTokens4 == 4) {
      few<4>(q, q_stride, kp, tail, to, stride);
    } else {
      for (int j = 0; j < 4; j += 2) {
        V acc[4][2];
        dots<T, 4, 2>(p, q, q_stride, kp + j, tail + j, acc);
        store22(to + j, to + stride + j, vsum4(acc[0][0], acc[0][1], acc[1][0], acc[1][1]));
        store22(to + 2 * stride + j, to + 3 * stride + j, vsum4(acc[2][0], acc[2][1], acc[3][0], acc[3][1]));
      }
    }
  }

  template <int MR>
  void few(const float *q, int64_t q_stride, const T *const *kp, const T *const *tail, float *to, int64_t stride) {
    V acc[MR][4];
    dots<T, MR, 4>(p, q, q_stride, kp, tail, acc);
    for (int i = 0; i < MR; ++i) store4(to + i * stride, vsum4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]));
  }

  // Turns scores into weights exp(score - max) in place and brings the state to the new maximum.
  void soft_max(State &s, int64_t from, int64_t n) {
    const Dims dims = dims_of(p);
    const int64_t padded = pad_to(n, kW);
    for (int64_t r = 0; r < s.rows; ++r) {
      float *x = scores + r * dims.tile_padded;
      for (int64_t t = n; t < padded; ++t) x[t] = -INFINITY;
      const int64_t pos = row.pos0 + r / p.G;
      int64_t lo = 0, hi = n;  // keys of this tile that the row sees
      if (p.causal && pos + 1 - from < hi) hi = pos + 1 - from < 0 ? 0 : pos + 1 - from;
      if (p.window && pos - p.window + 1 - from > lo) lo = pos - p.window + 1 - from;
      for (int64_t t = 0; t < n && t < lo; ++t) x[t] = -INFINITY;
      for (int64_t t = hi; t < n; ++t) x[t] = -INFINITY;

      const V scale = vset(p.scale);
      V top = vset(-INFINITY);
      for (int64_t t = 0; t < padded; t += kW) {
        const V y = vmul(vload(x + t), scale);
        vstore(x + t, y);
        top = vmax(top, y);
      }
      // A negative scale turns the masked -inf into +inf, so it masks again.
      if (p.scale <= 0.0f) top = vset(mask_again(x, lo, hi, n, padded));
      const float old_max = s.max()[r], new_max = fmaxf(old_max, vhmax(top));
      const float base = new_max == -INFINITY ? 0.0f : new_max;
      V sum = vzero();
      for (int64_t t = 0; t < padded; t += kW) {
        const V y = vexp(vsub(vload(x + t), vset(base)));
        vstore(x + t, y);
        sum = vadd(sum, y);
      }
      if (new_max != old_max) {
        const float w = expf(old_max - base);
        float *acc = s.acc() + r * dims.dv_padded;
        for (int64_t d = 0; d < dims.dv_padded; d += kW) vstore(acc + d, vmul(vload(acc + d), vset(w)));
        s.sum()[r] *= w;
        s.max()[r] = new_max;
      }
      s.sum()[r] += vhsum(sum);
    }
  }

  static float mask_again(float *x, int64_t lo, int64_t hi, int64_t n, int64_t padded) {
    float top = -INFINITY;
    for (int64_t t = 0; t < padded; ++t) {
      if (t < lo || t >= hi || t >= n) x[t] = -INFINITY;
      top = fmaxf(top, x[t]);
    }
    return top;
  }

  void accumulate(State &s, const Source &v, int64_t n) {
    const Dims dims = dims_of(p);
    const int64_t stride = dims.tile_padded;
    int64_t r = 0;
    for (; r + 4 <= s.rows; r += 4) weigh<4, kBlocks4>(s, r, v, n, stride, dims.dv_padded);
    switch (s.rows - r) {
      case 3: weigh<3, 2>(s, r, v, n, stride, dims.dv_padded); break;
      case 2: weigh<2, 2>(s, r, v, n, stride, dims.dv_padded); break;
      case 1: weigh<1, 4>(s, r, v, n, stride, dims.dv_padded); break;
    }
  }

  // acc[r .. r + MR] += P.V, NB blocks of the head size at a time.
  template <int MR, int NB>
  void weigh(State &s, int64_t r, const Source &v, int64_t n, int64_t stride, int64_t dv) {
    const int64_t block = 2 * kW, full = p.DV / block;
    int64_t b = 0;
    for (; b + NB <= full; b += NB) columns<MR, NB>(s, r, v, n, stride, dv, b, false);
    for (; b < full; ++b) columns<MR, 1>(s, r, v, n, stride, dv, b, false);
    if (full * block < p.DV) columns<MR, 1>(s, r, v, n, stride, dv, full, true);
  }

  template <int MR, int NB>
  void columns(State &s, int64_t r, const Source &v, int64_t n, int64_t stride, int64_t dv, int64_t b, bool tail) {
    const int64_t block = 2 * kW;
    V acc[MR][2 * NB];
    for (int i = 0; i < MR; ++i)
      for (int j = 0; j < 2 * NB; ++j) acc[i][j] = vload(s.acc() + (r + i) * dv + b * block + j * kW);
    const float *weights = scores + r * stride;
    for (int64_t t = 0; t < n; ++t) {
      const T *src = tail ? v.last(t) : v.at(t) + b * block;
      for (int j = 0; j < NB; ++j) {
        V x0, x1;
        load_pair(src + j * block, x0, x1);
        for (int i = 0; i < MR; ++i) {
          const V w = vset(weights[i * stride + t]);
          acc[i][2 * j] = vfma(w, x0, acc[i][2 * j]);
          acc[i][2 * j + 1] = vfma(w, x1, acc[i][2 * j + 1]);
        }
      }
    }
    for (int i = 0; i < MR; ++i)
      for (int j = 0; j < 2 * NB; ++j) vstore(s.acc() + (r + i) * dv + b * block + j * kW, acc[i][j]);
  }
};

}  // namespace

// One tile: scores of up to `tile` tokens against all query rows of a KV head, the online softmax, and P.V.
// Included by kernel.cpp only, inside no namespace; everything is in the translation unit's own anonymous namespace.
#pragma once
#include "problem.h"
#include "vec.h"

namespace {

#define WF_OUTLINE __attribute__((noinline))

using wf::Problem;
using wf::Row;

constexpr int kPrefetchLevel = 3;  // __builtin_prefetch locality: 3 L1, 2 L2

struct Dims {
  int64_t d_padded, dv_padded, tile_padded;
};

inline int64_t pad_to(int64_t a, int64_t b) { return (a + b - 1) / b * b; }

// Tokens of a tile: the address of KV head 0 of each.
struct Tokens {
  const char **k, **v;
  int64_t from, count;
};

// The (tile, head) that comes after the one at hand; count is 0 when there is none.
struct Ahead {
  const Tokens *tokens;
  int64_t head, count;
};

// K or V of the tile ahead as a stream that is advanced a few tokens at a time, so that the memory bus never rests.
class Stream {
 public:
  // `steps`: how many times `advance(1)` will be called.
  WF_INLINE Stream(const char *const *tokens, const Ahead &a, int64_t head_stride, int64_t width, int64_t element,
                   int64_t steps)
      : tokens_(tokens), at_(0), count_(a.count), offset_(a.head * head_stride * element), bytes_(width * element),
        share_((a.count + steps - 1) / steps) {}
  WF_INLINE void advance(int64_t steps) {
    for (int64_t end = at_ + share_ * steps; at_ < end && at_ < count_; ++at_)
      for (int64_t b = 0; b < bytes_; b += 64) __builtin_prefetch(tokens_[at_] + offset_ + b, 0, kPrefetchLevel);
  }

 private:
  const char *const *tokens_;
  int64_t at_, count_, offset_, bytes_, share_;
};

// A worker's memory for one tile.
struct Buffers {
  float *scores;        // [rows, tile_padded]: scores, then weights
  const char **k, **v;              // per token of the tile, the head that is worked on
  const char **k_tails, **v_tails;  // and the copy of its part that does not fill a block
  char *k_stage, *v_stage;          // null where the cache is read in place
  char *k_tail, *v_tail;
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

// One block (two vectors) of the dot products of MR query rows with NT tokens. Which side stays in registers while the
// other passes by is written out, because compilers left to choose keep both and spill the sums.
template <class T, int MR, int NT>
WF_INLINE void dot_block(const float *q, int64_t q_stride, const T *const (&k)[NT], V (&acc)[MR][NT]) {
#if defined(__AVX512BF16__)
  if constexpr (PairDot<T>::value) {
    __m512bh x[NT];
    for (int j = 0; j < NT; ++j) x[j] = (__m512bh)_mm512_loadu_si512(k[j]);
    for (int i = 0; i < MR; ++i) {
      const __m512bh y = (__m512bh)_mm512_loadu_si512(q + i * q_stride);
      for (int j = 0; j < NT; ++j) acc[i][j] = _mm512_dpbf16_ps(acc[i][j], x[j], y);
    }
    return;
  }
#endif
  if constexpr (MR > 2) {
    V x0[NT], x1[NT];
    for (int j = 0; j < NT; ++j) load_pair(k[j], x0[j], x1[j]);
    for (int i = 0; i < MR; ++i) {
      V y0 = vload(q + i * q_stride), y1 = vload(q + i * q_stride + kW);
      WF_KEEP(y0);
      WF_KEEP(y1);
      for (int j = 0; j < NT; ++j) acc[i][j] = vfma(x0[j], y0, acc[i][j]);
      for (int j = 0; j < NT; ++j) acc[i][j] = vfma(x1[j], y1, acc[i][j]);
    }
  } else {
    V y0[MR], y1[MR];
    for (int i = 0; i < MR; ++i) {
      y0[i] = vload(q + i * q_stride), y1[i] = vload(q + i * q_stride + kW);
      WF_KEEP(y0[i]);
      WF_KEEP(y1[i]);
    }
    for (int j = 0; j < NT; ++j) {
      V x0, x1;
      load_pair(k[j], x0, x1);
      for (int i = 0; i < MR; ++i) acc[i][j] = vfma(x0, y0[i], acc[i][j]);
      for (int i = 0; i < MR; ++i) acc[i][j] = vfma(x1, y1[i], acc[i][j]);
    }
  }
}

// Scores of MR query rows against NT tokens; k[j] points at a token's head, tail[j] at its zero-padded last block.
// q_stride counts floats between query rows.
template <class T, int MR, int NT>
WF_INLINE void dots(int64_t width, const float *q, int64_t q_stride, const T *const *k, const T *const *tail,
                    V (&acc)[MR][NT]) {
  constexpr int64_t block = 2 * kW, step = PairDot<T>::value ? block / 2 : block;
  const T *at[NT];
  for (int j = 0; j < NT; ++j) at[j] = k[j];
  for (int i = 0; i < MR; ++i)
    for (int j = 0; j < NT; ++j) acc[i][j] = vzero();
  for (int64_t b = width / block; b > 0; --b) {
    dot_block<T, MR, NT>(q, q_stride, at, acc);
    for (int j = 0; j < NT; ++j) at[j] += block;
    q += step;
  }
  if (width % block) {
    for (int j = 0; j < NT; ++j) at[j] = tail[j];
    dot_block<T, MR, NT>(q, q_stride, at, acc);
  }
}

#if defined(__AVX512F__)
constexpr int kBlocks4 = 2;  // 32 registers hold more sums
#else
constexpr int kBlocks4 = 1;
#endif

template <class T>
struct TileWork {
  const Problem &p;
  const Row &row;
  Buffers buffers;

  // Adds the tile `now` to the state of `head`; `ahead` is prefetched meanwhile.
  void run(State &s, int64_t head, const Tokens &now, const Ahead &ahead) {
    const int64_t n = now.count;
    gather(now.k, n, head, p.ks, p.D, buffers.k, buffers.k_tails, buffers.k_stage, buffers.k_tail);
    gather(now.v, n, head, p.vs, p.DV, buffers.v, buffers.v_tails, buffers.v_stage, buffers.v_tail);
    score(s, n, ahead);
    soft_max(s, now.from, n);
    accumulate(s, n, ahead);
  }

 private:
  // Finds `head` of every token of the tile. Elements that do not lie next to each other are copied to `stage`; the
  // part that does not fill a block goes to `tail`, padded with zeros, so that nothing past a head is ever read.
  static void gather(const char *const *tokens, int64_t n, int64_t head, const wf::Strides &st, int64_t width,
                     const char **out, const char **tails, char *stage, char *tail) {
    const int64_t offset = head * st.head * (int64_t)sizeof(T);
    for (int64_t i = 0; i < n; ++i) out[i] = tokens[i] + offset;
    if (stage) {
      T *to = (T *)stage;
      for (int64_t i = 0; i < n; ++i, to += width) {
        const T *from = (const T *)out[i];
        if (st.dim == 1)
          memcpy(to, from, (size_t)width * sizeof(T));
        else
          for (int64_t d = 0; d < width; ++d) to[d] = from[d * st.dim];
        out[i] = (const char *)to;
      }
    }
    constexpr int64_t block = 2 * kW;
    const int64_t full = width / block * block;
    if (full < width) {
      T *to = (T *)tail;
      memset(tail, 0, (size_t)(n * block) * sizeof(T));
      for (int64_t i = 0; i < n; ++i) {
        memcpy(to + i * block, (const T *)out[i] + full, (size_t)(width - full) * sizeof(T));
        tails[i] = (const char *)(to + i * block);
      }
    }
    // Scores are made four tokens at a time: past the last token its address is repeated, and what comes of it lands in
    // the padding of the scores and is overwritten.
    for (int64_t i = n; i % 4; ++i) {
      out[i] = out[n - 1];
      if (full < width) tails[i] = tails[n - 1];
    }
  }

  void score(State &s, int64_t n, const Ahead &ahead) {
    const Dims dims = dims_of(p);
    const int64_t stride = dims.tile_padded, q_stride = PairDot<T>::value ? dims.d_padded / 2 : dims.d_padded;
    const T *const *k = (const T *const *)buffers.k, *const *k_tails = (const T *const *)buffers.k_tails;
    Stream next(ahead.tokens->k, ahead, p.ks.head, p.D, sizeof(T), (n + 3) / 4);
    for (int64_t t = 0; t < n; t += 4) {
      next.advance(1);
      const float *q = s.q;
      float *to = buffers.scores + t;
      int64_t r = s.rows;
      for (; r >= 4; r -= 4, q += 4 * q_stride, to += 4 * stride) pairs<4>(p.D, q, q_stride, k + t, k_tails + t, to, stride);
      if (r == 3) pairs<3>(p.D, q, q_stride, k + t, k_tails + t, to, stride);
      if (r == 2) quads<2>(p.D, q, q_stride, k + t, k_tails + t, to, stride);
      if (r == 1) quads<1>(p.D, q, q_stride, k + t, k_tails + t, to, stride);
    }
  }

  // MR rows against four tokens: all at once, or two by two where that is what the registers hold.
  template <int MR>
  WF_OUTLINE static void quads(int64_t width, const float *q, int64_t q_stride, const T *const *k, const T *const *tail,
                               float *to, int64_t stride) {
    V acc[MR][4];
    dots<T, MR, 4>(width, q, q_stride, k, tail, acc);
    for (int i = 0; i < MR; ++i) store4(to + i * stride, vsum4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]));
  }

  template <int MR>
  WF_OUTLINE static void pairs(int64_t width, const float *q, int64_t q_stride, const T *const *k, const T *const *tail,
                               float *to, int64_t stride) {
#if defined(__AVX512F__)
    quads<MR>(width, q, q_stride, k, tail, to, stride);
#else
    for (int j = 0; j < 4; j += 2) {
      V acc[MR][2];
      dots<T, MR, 2>(width, q, q_stride, k + j, tail + j, acc);
      store22(to + j, to + stride + j, vsum4(acc[0][0], acc[0][1], acc[1][0], acc[1][1]));
      const int last = MR - 1;  // with three rows the third stands alone
      store22(to + 2 * stride + j, to + last * stride + j, vsum4(acc[2][0], acc[2][1], acc[last][0], acc[last][1]));
    }
#endif
  }

  // Turns scores into weights exp(score - max) in place and brings the state to the new maximum.
  void soft_max(State &s, int64_t from, int64_t n) {
    const Dims dims = dims_of(p);
    const int64_t padded = pad_to(n, kW);
    for (int64_t r = 0; r < s.rows; ++r) {
      float *x = buffers.scores + r * dims.tile_padded;
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

  void accumulate(State &s, int64_t n, const Ahead &ahead) {
    const Dims dims = dims_of(p);
    const int64_t passes = (s.rows + 3) / 4 * (dims.dv_padded / (2 * kW));
    Stream next(ahead.tokens->v, ahead, p.vs.head, p.DV, sizeof(T), passes);
    int64_t r = 0;
    for (; r + 4 <= s.rows; r += 4) weigh<4, kBlocks4>(s, r, n, dims, next);
    if (s.rows - r == 3) weigh<3, 2>(s, r, n, dims, next);
    if (s.rows - r == 2) weigh<2, 2>(s, r, n, dims, next);
    if (s.rows - r == 1) weigh<1, 4>(s, r, n, dims, next);
  }

  // acc[r .. r + MR] += P.V, NB blocks of the head size at a time.
  template <int MR, int NB>
  void weigh(State &s, int64_t r, int64_t n, const Dims &dims, Stream &next) {
    constexpr int64_t block = 2 * kW;
    const float *weights = buffers.scores + r * dims.tile_padded;
    const T *const *v = (const T *const *)buffers.v;
    float *acc = s.acc() + r * dims.dv_padded;
    const int64_t full = p.DV / block;
    int64_t b = 0;
    for (; b + NB <= full; b += NB) {
      next.advance(NB);
      columns<MR, NB>(acc + b * block, dims.dv_padded, weights, dims.tile_padded, v, b * block, n);
    }
    for (; b < full; ++b) {
      next.advance(1);
      columns<MR, 1>(acc + b * block, dims.dv_padded, weights, dims.tile_padded, v, b * block, n);
    }
    if (full * block == p.DV) return;
    next.advance(1);
    const T *const *tails = (const T *const *)buffers.v_tails;
    columns<MR, 1>(acc + b * block, dims.dv_padded, weights, dims.tile_padded, tails, 0, n);
  }

  template <int MR, int NB>
  WF_OUTLINE static void columns(float *acc_at, int64_t dv, const float *weights, int64_t stride, const T *const *v,
                                 int64_t offset, int64_t n) {
    V acc[MR][2 * NB];
    const float *w[MR];
    for (int i = 0; i < MR; ++i) {
      w[i] = weights + i * stride;
      for (int j = 0; j < 2 * NB; ++j) acc[i][j] = vload(acc_at + i * dv + j * kW);
    }
    for (int64_t t = 0; t < n; ++t) {
      const T *src = v[t] + offset;
      for (int j = 0; j < NB; ++j) {
        V x0, x1;
        load_pair(src + j * 2 * kW, x0, x1);
        for (int i = 0; i < MR; ++i) {
          const V y = vset(w[i][t]);
          acc[i][2 * j] = vfma(y, x0, acc[i][2 * j]);
          acc[i][2 * j + 1] = vfma(y, x1, acc[i][2 * j + 1]);
        }
      }
    }
    for (int i = 0; i < MR; ++i)
      for (int j = 0; j < 2 * NB; ++j) vstore(acc_at + i * dv + j * kW, acc[i][j]);
  }
};

}  // namespace

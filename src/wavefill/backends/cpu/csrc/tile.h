// One tile: scores of up to `tile` tokens against all query rows of a KV head, the online softmax, and P.V.
// Included by kernel.cpp only, inside no namespace; everything is in the translation unit's own anonymous namespace.
#pragma once
#include <float.h>

#include "codes.h"

namespace {

#define WF_OUTLINE __attribute__((noinline))

using wf::Problem;
using wf::Row;

constexpr int kMaxTokens = 4;      // that one pass over q makes scores for

struct Dims {
  int64_t d_padded, dv_padded, tile_padded;
};

inline int64_t pad_to(int64_t a, int64_t b) { return (a + b - 1) / b * b; }

// Tokens of a tile: the address of KV head 0 of each, and of its scale where each has one.
struct Tokens {
  const char **k, **v, **k_scales, **v_scales;
  int64_t from, count;
};

// The (tile, head) that comes after the one at hand; count is 0 when there is none.
struct Ahead {
  const Tokens *tokens;
  int64_t head, count;
};

// The tile ahead as a stream of tokens, K and V in turn, that is advanced a few at a time, so that the memory bus never
// rests. Two streams at once keep more of the memory's banks busy than one after the other.
class Stream {
 public:
  WF_INLINE Stream(const Ahead &a, const Problem &p, int64_t element)
      : k_(a.tokens->k), v_(a.tokens->v), k_offset_(a.head * p.ks.head * element),
        v_offset_(a.head * p.vs.head * element), k_bytes_(p.D * element), v_bytes_(p.DV * element), at_(0),
        stop_(2 * a.count) {}
  // Tokens, counting K and V each, that are still to come.
  WF_INLINE int64_t left() const { return stop_ - at_; }
  WF_INLINE void advance(int64_t tokens) {
    for (const int64_t end = at_ + tokens < stop_ ? at_ + tokens : stop_; at_ < end; ++at_)
      if (at_ & 1)
        fetch(v_[at_ >> 1] + v_offset_, v_bytes_);
      else
        fetch(k_[at_ >> 1] + k_offset_, k_bytes_);
  }

 private:
  WF_INLINE static void fetch(const char *from, int64_t bytes) {
    const char *const end = from + bytes;
    for (; from + 256 <= end; from += 256)
      each<4>([&](auto i) WF_LAMBDA { __builtin_prefetch(from + 64 * i, 0, kPrefetchLevel); });
    for (; from < end; from += 64) __builtin_prefetch(from, 0, kPrefetchLevel);
  }
  const char *const *k_, *const *v_;
  int64_t k_offset_, v_offset_, k_bytes_, v_bytes_, at_, stop_;
};

// Where K or V of a tile goes when it can't be read in place.
struct Staging {
  const char **at, **tails;  // per token: its copy, and the copy of the part that does not fill a block
  char *stage;               // null where the cache is read in place
  char *tail;
};

// A worker's memory for one tile.
struct Buffers {
  float *scores;  // [tile_padded, 4]: scores of up to four query rows, then weights
  float *k_scales, *v_scales;  // [tile_padded]: of the tile's tokens, where each has one
  Staging k, v;
};

// Running softmax state of the query rows (query tokens x G) of one KV head: accumulators, maxima and sums in one run
// of floats, so that a partial state is one copy.
struct State {
  float *q;  // [rows, d_padded] in lane order
  float *sums;
  int64_t rows, dv;
  float *acc() const { return sums; }
  float *max() const { return sums + rows * dv; }
  float *sum() const { return max() + pad_to(rows, 4); }
};

inline Dims dims_of(const Problem &p) {
  return {pad_to(p.D, 2 * kW), pad_to(p.DV, 2 * kW), pad_to(p.tile + kMaxTokens - 1, kW)};
}

// Whether scores are scaled in the exponent alone, which is exact and free. A scale that turns their order, a soft cap
// and ALiBi all have to come before the maximum.
inline bool scaled_last(const Problem &p) { return p.scale > 0.0f && p.softcap == 0.0f && !p.slopes; }

// What the scores of a state's maxima are still to be multiplied by.
inline float scale_of_max(const Problem &p) { return scaled_last(p) ? p.scale : 1.0f; }

inline int64_t state_floats(const Problem &p, int64_t rows) {
  return rows * dims_of(p).dv_padded + 2 * pad_to(rows, 4);
}

inline void reset(State &s) {
  for (int64_t i = 0; i < s.rows * s.dv; ++i) s.sums[i] = 0.0f;
  for (int64_t i = 0; i < pad_to(s.rows, 4); ++i) s.max()[i] = -INFINITY, s.sum()[i] = 0.0f;
}

#if defined(__AVX512BF16__)
// Dot products of bf16 pairs take q in bf16, in its own order. Exact, because q is in bf16, and the cache is too or holds
// codes, all of which are numbers in bf16.
template <class T>
struct PairDot {
  static constexpr bool value = false;
};
template <>
struct PairDot<bf16> {
  static constexpr bool value = true;
};
template <class C>
struct PairDot<paired<C>> {
  static constexpr bool value = true;
};
#else
template <class T>
struct PairDot {
  static constexpr bool value = false;
};
#endif

// A row of q as dot products take it: in lane order, padded with zeros to whole blocks.
template <class T>
inline int64_t row_floats(int64_t width) {
  const int64_t padded = pad_to(width, 2 * kW);
  return PairDot<T>::value ? padded / 2 : padded;
}
// T is the cache's type; q's own is another where the cache holds codes, whose scale it then takes, but for pairs.
template <class T, class Q>
inline void lay_out_row(const Q *x, int64_t width, float scale, float *q) {
  const Q zero = {};
  for (int64_t lane = 0; lane < pad_to(width, 2 * kW); ++lane) {
    const int64_t e = PairDot<T>::value ? lane : lane_element<T>((int)lane);
    const Q value = e < width ? x[e] : zero;
    if (PairDot<T>::value)
      ((Q *)q)[lane] = value;
    else
      q[lane] = is_code<T> ? to_float(value) * scale : to_float(value);
  }
}

// One half (a vector) of a block of the dot products of MR query rows with NT tokens. Which side stays in registers while
// the other passes by is written out, because compilers left to choose keep both and spill the sums.
template <class T, int MR, int NT, int H>
WF_INLINE void dot_half(const float *q, int64_t q_stride, const T *const (&k)[NT], V (&acc)[MR][NT]) {
  if constexpr (MR > NT) {
    V x[NT];
    each<NT>([&](auto j) WF_LAMBDA {
      x[j] = load_half<H>(k[j]);
      WF_KEEP(x[j]);
    });
    each<MR>([&](auto i) WF_LAMBDA {
      V y = vload(q + i * q_stride + H * kW);
      WF_KEEP(y);
      each<NT>([&](auto j) WF_LAMBDA { WF_ADD_PRODUCT(acc[i][j], x[j], y); });
    });
  } else {
    V y[MR];
    each<MR>([&](auto i) WF_LAMBDA {
      y[i] = vload(q + i * q_stride + H * kW);
      WF_KEEP(y[i]);
    });
    each<NT>([&](auto j) WF_LAMBDA {
      V x = load_half<H>(k[j]);
      WF_KEEP(x);
      each<MR>([&](auto i) WF_LAMBDA { WF_ADD_PRODUCT(acc[i][j], x, y[i]); });
    });
  }
}

template <class T, int MR, int NT>
WF_INLINE void dot_block(const float *q, int64_t q_stride, const T *const (&k)[NT], V (&acc)[MR][NT]) {
#if defined(__AVX512BF16__)
  if constexpr (PairDot<T>::value) {
    __m512bh x[NT];
    for (int j = 0; j < NT; ++j) x[j] = (__m512bh)load_pairs(k[j]);
    for (int i = 0; i < MR; ++i) {
      const __m512bh y = (__m512bh)_mm512_loadu_si512(q + i * q_stride);
      for (int j = 0; j < NT; ++j) acc[i][j] = _mm512_dpbf16_ps(acc[i][j], x[j], y);
    }
    return;
  }
#endif
  dot_half<T, MR, NT, 0>(q, q_stride, k, acc);
  dot_half<T, MR, NT, 1>(q, q_stride, k, acc);
}

// Scores of MR query rows against NT tokens; k[j] + offset points at a token's head, tail[j] at its zero-padded last
// block. q_stride counts floats between query rows.
template <class T, int MR, int NT>
WF_INLINE void dots(int64_t width, const float *q, int64_t q_stride, const T *const *k, int64_t offset,
                    const T *const *tail, V (&acc)[MR][NT]) {
  constexpr int64_t block = 2 * kW, step = PairDot<T>::value ? block / 2 : block;
  const T *at[NT];
  for (int j = 0; j < NT; ++j) at[j] = k[j] + offset;
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

// Query rows are worked on up to four at a time; their scores lie token by token, kRows of them each, so that one vector
// holds all rows of a few tokens and the softmax never adds across a vector.
template <int MR>
constexpr int kRows = MR == 3 ? 4 : MR;

// Tokens a pass over q, and blocks of V a pass over the tokens: as many sums as the registers hold.
#if defined(__AVX512F__)
template <int MR>
constexpr int kTokens = 4;
template <int MR>
constexpr int kBlocks = MR == 1 ? 4 : 2;
#else
template <int MR>
constexpr int kTokens = MR == 4 ? 2 : MR == 3 ? 3 : 4;
template <int MR>
constexpr int kBlocks = MR == 4 ? 1 : MR == 1 ? 4 : 2;
#endif

template <class T>
struct TileWork {
  const Problem &p;
  const Row &row;
  Buffers buffers;

  // Adds the tile `now` to the state of `head`; `ahead` is prefetched meanwhile.
  void run(State &s, int64_t head, const Tokens &now, const Ahead &ahead) {
    const Side<T> k = side(now.k, now.count, head, p.ks, p.D, buffers.k);
    const Side<T> v = side(now.v, now.count, head, p.vs, p.DV, buffers.v);
    Stream next(ahead, p, sizeof(T));
    if (is_code<T>) {
      scales(p.k_scales, now.k_scales, head, now.count, ahead, ahead.tokens->k_scales, buffers.k_scales);
      scales(p.v_scales, now.v_scales, head, now.count, ahead, ahead.tokens->v_scales, buffers.v_scales);
    }
    const int64_t groups = (s.rows + 3) / 4, share = (next.left() + groups - 1) / groups;
    for (int64_t r = 0; r < s.rows; r += 4) {
      switch (s.rows - r) {
        case 1: group<1>(s, r, head, now, k, v, next, share); break;
        case 2: group<2>(s, r, head, now, k, v, next, share); break;
        case 3: group<3>(s, r, head, now, k, v, next, share); break;
        default: group<4>(s, r, head, now, k, v, next, share);
      }
    }
  }

 private:
  // K or V of one head of the tile: token t lies at at[t] + offset, the part that does not fill a block at tails[t].
  template <class X>
  struct Side {
    const X *const *at;
    int64_t offset;
    const X *const *tails;
  };

  static void scales(const wf::Scales &s, const char *const *now, int64_t head, int64_t n, const Ahead &ahead,
                     const char *const *next, float *to) {
    if (!s.tokens) return;
    gather_scales(s, now, head, n, to);
    prefetch_scales(s, next, ahead.head, ahead.count);
  }

  // Elements that do not lie next to each other are copied to the stage; the part that does not fill a block goes to the
  // tail, padded with zeros, so that nothing past a head is ever read.
  static Side<T> side(const char *const *tokens, int64_t n, int64_t head, const wf::Strides &st, int64_t width,
                      const Staging &b) {
    constexpr int64_t block = 2 * kW;
    const int64_t full = width / block * block;
    const T *const *from = (const T *const *)tokens;
    const T **at = (const T **)b.at, **tails = (const T **)b.tails;
    int64_t offset = head * st.head;
    if (b.stage) {
      T *to = (T *)b.stage;
      for (int64_t i = 0; i < n; ++i, to += width) {
        const T *x = from[i] + offset;
        if (st.dim == 1)
          memcpy(to, x, (size_t)width * sizeof(T));
        else
          for (int64_t d = 0; d < width; ++d) to[d] = x[d * st.dim];
        at[i] = to;
      }
      for (int64_t i = n; i < n + kMaxTokens - 1; ++i) at[i] = at[n - 1];
      from = at, offset = 0;
    }
    if (full < width) {
      T *to = (T *)b.tail;
      memset(to, 0, (size_t)(n * block) * sizeof(T));
      for (int64_t i = 0; i < n; ++i, to += block) {
        memcpy(to, from[i] + offset + full, (size_t)(width - full) * sizeof(T));
        tails[i] = to;
      }
      for (int64_t i = n; i < n + kMaxTokens - 1; ++i) tails[i] = tails[n - 1];
    }
    return {from, offset, tails};
  }

  // Scores, softmax and P.V of query rows r .. r + MR.
  template <int MR>
  void group(State &s, int64_t r, int64_t head, const Tokens &now, const Side<T> &k, const Side<T> &v, Stream &next,
             int64_t share) {
    const Dims dims = dims_of(p);
    const int64_t q_stride = row_floats<T>(p.D);
    score<MR>(p.D, s.q + r * q_stride, q_stride, k, now.count, buffers.scores, next, share / 2);
    soft_max<MR>(s, r, head, now);
    weigh<MR>(s.acc() + r * dims.dv_padded, dims.dv_padded, v, now.count, next, share - share / 2);
  }

  template <int MR>
  WF_OUTLINE static void score(int64_t width, const float *q, int64_t q_stride, const Side<T> &k, int64_t n, float *to,
                               Stream &next, int64_t share) {
    constexpr int R = kRows<MR>, NT = kTokens<MR>;
    const int step = (int)(share * NT + n - 1) / (int)n;
    for (int64_t t = 0; t < n; t += NT) {
      next.advance(step);
      V acc[MR][NT];
      dots<T, MR, NT>(width, q, q_stride, k.at + t, k.offset, k.tails + t, acc);
      for (int j = 0; j < NT * R; j += 4, to += 4) {
        auto sum = [&](int i) { return acc[i % R < MR ? i % R : MR - 1][i / R]; };
        store4(to, vsum4(sum(j), sum(j + 1), sum(j + 2), sum(j + 3)));
      }
    }
  }

  // Turns scores into weights exp(score - max) in place and brings the state of the rows to the new maximum.
  template <int MR>
  WF_OUTLINE void soft_max(State &s, int64_t r, int64_t head, const Tokens &now) {
    constexpr int R = kRows<MR>;
    const int64_t used = now.count * R, padded = pad_to(used, kW);
    float *x = buffers.scores;
    const bool last = scaled_last(p);
    const V scale = vset(last ? p.scale : 1.0f);
    if (is_code<T> && (p.k_scales.tokens || PairDot<T>::value)) {
      const V all = vset(scale_of_head<T>(p.k_scales, head));
      for (int64_t i = 0; i < used; i += kW)
        vstore(x + i, vmul(vload(x + i), p.k_scales.tokens ? vspread<R>(buffers.k_scales + i / R) : all));
    }
    if (!last) finish<MR>(r, head, now);
    for (int64_t i = used; i < padded; ++i) x[i] = -INFINITY;
    for (int i = 0; i < MR; ++i) hide<R>(x + i, row.pos0 + (r + i) / p.G, now);
    if (p.mask) hide_drafts<MR>(r, now);

    V top = vload(x);
    for (int64_t i = kW; i < padded; i += kW) top = vmax(top, vload(x + i));
    float *max = s.max() + r, *sum = s.sum() + r;
    // Where the scale comes last maxima stay unscaled: the largest score is then exactly 0 below itself, however large it is.
    const V old_max = vload_rows<R>(max), new_max = vmax(vmax_rows<R>(top), old_max);
    const V base = vzero_below(new_max, new_max, -FLT_MAX);  // -inf where no key has been seen
    V total = vzero();
    for (int64_t i = 0; i < padded; i += kW) {
      const V y = vexp(vmul(vsub(vload(x + i), base), scale));
      vstore(x + i, is_code<T> && p.v_scales.tokens ? vmul(y, vspread<R>(buffers.v_scales + i / R)) : y);
      total = vadd(total, y);
    }
    total = vsum_rows<R>(total);
    if (!vdiffer(new_max, old_max)) return vstore_rows<R>(sum, vadd(vload_rows<R>(sum), total));
    const V w = vexp(vmul(vsub(old_max, base), scale));
    vstore_rows<R>(sum, vfma(vload_rows<R>(sum), w, total));
    vstore_rows<R>(max, new_max);
    float each[kW];
    vstore(each, w);
    const int64_t dv = dims_of(p).dv_padded;
    for (int i = 0; i < MR; ++i) {
      float *acc = s.acc() + (r + i) * dv;
      for (int64_t d = 0; d < dv; d += kW) vstore(acc + d, vmul(vload(acc + d), vset(each[i])));
    }
  }

  // Scores as they go into the softmax: scaled, then capped, then less slope times distance.
  template <int MR>
  WF_OUTLINE void finish(int64_t r, int64_t head, const Tokens &now) {
    constexpr int R = kRows<MR>;
    // The scores of a vector are of R rows in turn, kW / R tokens one after the other.
    float slopes[4], starts[4], tokens[kW];
    for (int i = 0; i < R; ++i) {
      const int64_t at = r + (i < MR ? i : MR - 1);
      slopes[i] = p.slopes ? p.slopes[head * p.G + at % p.G] : 0.0f;
      starts[i] = (float)(row.pos0 + at / p.G - now.from);
    }
    for (int i = 0; i < kW; ++i) tokens[i] = (float)(i / R);
    const V scale = vset(p.scale), cap = vset(p.softcap), slope = vload_rows<R>(slopes);
    const V start = vsub(vload_rows<R>(starts), vload(tokens));
    float *x = buffers.scores;
    for (int64_t i = 0; i < now.count * R; i += kW) {
      V y = vmul(vload(x + i), scale);
      if (p.softcap != 0.0f) y = vcap(y, cap);
      if (p.slopes) y = vsub(y, vmul(slope, vabs(vsub(start, vset((float)(i / R))))));
      vstore(x + i, y);
    }
  }

  // Masks the keys of the tile that a query at `pos` does not see; its scores are x[0], x[R], ...
  template <int R>
  WF_INLINE void hide(float *x, int64_t pos, const Tokens &now) {
    const int64_t n = now.count;
    if (p.causal && pos + 1 - now.from < n)
      for (int64_t t = pos + 1 < now.from ? 0 : pos + 1 - now.from; t < n; ++t) x[t * R] = -INFINITY;
    if (p.window)
      for (int64_t t = 0; t < n && t < pos - p.window + 1 - now.from; ++t) x[t * R] = -INFINITY;
  }

  // The same for the tokens of the draft that the rows of the mask leave out.
  template <int MR>
  WF_OUTLINE void hide_drafts(int64_t r, const Tokens &now) {
    for (int i = 0; i < MR; ++i) {
      const uint32_t *seen = p.mask + (row.q0 + (r + i) / p.G) * p.mask_words;
      for (int64_t t = now.from < row.draft ? row.draft - now.from : 0; t < now.count; ++t) {
        const int64_t j = now.from + t - row.draft;
        if (!(seen[j / 32] >> (j % 32) & 1u)) buffers.scores[t * kRows<MR> + i] = -INFINITY;
      }
    }
  }

  // acc[0 .. MR] += P.V, kBlocks<MR> blocks of the head size at a time.
  template <int MR>
  void weigh(float *acc, int64_t dv, const Side<T> &v, int64_t n, Stream &next, int64_t share) {
    constexpr int64_t block = 2 * kW;
    constexpr int NB = kBlocks<MR>;
    const int64_t full = p.DV / block, step = (share * block + dv - 1) / dv;
    int64_t b = 0;
    for (; b + NB <= full; b += NB) {
      next.advance(NB * step);
      columns<MR, NB>(acc + b * block, dv, buffers.scores, v.at, v.offset + b * block, n);
    }
    for (; b < full; ++b) {
      next.advance(step);
      columns<MR, 1>(acc + b * block, dv, buffers.scores, v.at, v.offset + b * block, n);
    }
    if (full * block == p.DV) return;
    next.advance(step);
    columns<MR, 1>(acc + b * block, dv, buffers.scores, v.tails, 0, n);
  }

  template <int MR, int NB>
  WF_OUTLINE static void columns(float *acc_at, int64_t dv, const float *weights, const T *const *v, int64_t offset,
                                 int64_t n) {
    constexpr int R = kRows<MR>;
    V acc[MR][2 * NB];
    each<MR>([&](auto i) WF_LAMBDA {
      each<2 * NB>([&](auto j) WF_LAMBDA { acc[i][j] = vload(acc_at + i * dv + j * kW); });
    });
    for (int64_t t = 0; t < n; ++t, weights += R) {
      const T *src = v[t] + offset;
      if constexpr (MR > 2 * NB) {
        V x[2 * NB];
        each<2 * NB>([&](auto j) WF_LAMBDA {
          x[j] = load_half<j % 2>(src + j / 2 * 2 * kW);
          WF_KEEP(x[j]);
        });
        each<MR>([&](auto i) WF_LAMBDA {
          V y = vset(weights[i]);
          WF_KEEP(y);
          each<2 * NB>([&](auto j) WF_LAMBDA { WF_ADD_PRODUCT(acc[i][j], x[j], y); });
        });
      } else {
        V y[MR];
        each<MR>([&](auto i) WF_LAMBDA {
          y[i] = vset(weights[i]);
          WF_KEEP(y[i]);
        });
        each<2 * NB>([&](auto j) WF_LAMBDA {
          V x = load_half<j % 2>(src + j / 2 * 2 * kW);
          WF_KEEP(x);
          each<MR>([&](auto i) WF_LAMBDA { WF_ADD_PRODUCT(acc[i][j], x, y[i]); });
        });
      }
    }
    each<MR>([&](auto i) WF_LAMBDA {
      each<2 * NB>([&](auto j) WF_LAMBDA { vstore(acc_at + i * dv + j * kW, acc[i][j]); });
    });
  }
};

}  // namespace

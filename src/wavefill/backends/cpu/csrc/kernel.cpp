// Decode attention over tiles of the KV cache: scores, online softmax and the weighted sum of V for all query heads of
// one KV head, in float32. Compiled once per instruction set with WF_ISA as its name.
#include "kernel.h"

#include "linear.h"
#include "quantise.h"
#include "tile.h"

namespace wf {
namespace WF_ISA {

namespace {

inline int64_t round_up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }
inline int64_t imin(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t imax(int64_t a, int64_t b) { return a > b ? a : b; }

// Hands out 64-byte aligned pieces of a worker's scratch memory; with a null base it only counts.
struct Arena {
  char *base;
  int64_t used = 0;
  template <class X>
  X *take(int64_t n) {
    X *p = base ? (X *)(base + used) : nullptr;
    used += round_up(n * (int64_t)sizeof(X), 64);
    return p;
  }
};

struct Scratch {
  Tokens tokens[2];
  Buffers buffers;
  State *states;
  int64_t used;
};

Staging staging(Arena &a, const Problem &p, int64_t width, bool copies) {
  Staging s;
  s.at = a.take<const char *>(copies ? p.tile + kMaxTokens : 0);
  s.stage = copies ? a.take<char>(p.tile * width * 4) : nullptr;
  const bool ragged = width % (2 * kW) != 0;
  s.tails = a.take<const char *>(ragged ? p.tile + kMaxTokens : 0);
  s.tail = a.take<char>(ragged ? p.tile * 2 * kW * 4 : 0);
  return s;
}

Scratch lay_out(const Problem &p, int64_t query_rows, int64_t heads, char *base) {
  const Dims dims = dims_of(p);
  Arena a{base};
  Scratch s;
  for (Tokens &t : s.tokens) {
    t.k = a.take<const char *>(p.tile + kMaxTokens);
    t.v = a.take<const char *>(p.tile + kMaxTokens);
    t.k_scales = a.take<const char *>(p.k_scales.tokens ? p.tile : 0);
    t.v_scales = a.take<const char *>(p.v_scales.tokens ? p.tile : 0);
  }
  Buffers &b = s.buffers;
  b.scores = a.take<float>(4 * dims.tile_padded);
  b.k_scales = a.take<float>(p.k_scales.tokens ? dims.tile_padded + kW : 0);
  b.v_scales = a.take<float>(p.v_scales.tokens ? dims.tile_padded + kW : 0);
  // K is read once a tile, V once for every few columns. Tokens a power of two apart share a few sets of the first-level
  // cache and would drive each other out between those passes, so V is packed unless its tokens lie side by side.
  const bool pack_v = p.vs.dim != 1 || p.vs.token != p.DV;
  b.k = staging(a, p, p.D, p.ks.dim != 1);
  b.v = staging(a, p, p.DV, pack_v);
  s.states = a.take<State>(heads);
  for (int64_t i = 0; i < heads; ++i) {
    float *q = a.take<float>(query_rows * dims.d_padded);
    float *sums = a.take<float>(state_floats(p, query_rows));
    if (base) s.states[i].q = q, s.states[i].sums = sums;
  }
  s.used = a.used;
  return s;
}

int64_t partial_floats(const Problem &p, int64_t query_rows) { return round_up(state_floats(p, query_rows), 16); }

int64_t scratch_bytes(const Problem &p, int64_t query_rows, int64_t heads) {
  return lay_out(p, query_rows, heads, nullptr).used;
}

// Finds the tokens of tile `index` of a row. `Tokens` holds the address of head 0 of each.
template <class T>
void locate(const Problem &p, const Row &row, int64_t index, Tokens &out) {
  const int64_t from = imax(index * p.tile, row.start), to = imin((index + 1) * p.tile, row.stop);
  out.from = from;
  out.count = to - from;
  const int64_t k_step = p.ks.token * (int64_t)sizeof(T), v_step = p.vs.token * (int64_t)sizeof(T);
  for (int64_t t = from; t < to;) {
    const int64_t slot = t / p.page_size, offset = t % p.page_size;
    const int64_t page = p.table ? (int64_t)p.table[row.request * p.table_stride + slot] : row.request;
    const int64_t run = imin(to - t, p.page_size - offset);
    const char *k = p.k + (page * p.ks.page + offset * p.ks.token) * (int64_t)sizeof(T);
    const char *v = p.v + (page * p.vs.page + offset * p.vs.token) * (int64_t)sizeof(T);
    for (int64_t i = 0; i < run; ++i, k += k_step, v += v_step) {
      out.k[t - from + i] = k;
      out.v[t - from + i] = v;
    }
    if (is_code<T>) {
      locate_scales(p.k_scales, page, offset, run, out.k_scales + (t - from));
      locate_scales(p.v_scales, page, offset, run, out.v_scales + (t - from));
    }
    t += run;
  }
  // Scores are made a few tokens at a time: past the last one its address is repeated, and what comes of it is not used.
  for (int64_t i = out.count; i < out.count + kMaxTokens - 1; ++i) out.k[i] = out.k[out.count - 1];
}

// Calls f with a value of q's type, which is that of the cache unless it holds codes.
template <class T, class F>
inline void with_query_type(DType dtype, const F &f) {
  if constexpr (!is_code<T>) return f(T{});
  if constexpr (PairDot<T>::value) return f(bf16{});
  switch (dtype) {
    case DType::f32: return f(float{});
    case DType::f16: return f(f16{});
    case DType::bf16: return f(bf16{});
  }
}

template <class T>
void load_q(const Problem &p, const Row &row, int64_t head, State &s) {
  const float scale = scale_of_head<T>(p.k_scales, head);
  with_query_type<T>(p.dtype, [&](auto type) {
    using Q = decltype(type);
    for (int64_t i = 0; i < s.rows; ++i)
      lay_out_row<T>((const Q *)p.q + (row.q0 + i / p.G) * p.q_token + (head * p.G + i % p.G) * p.q_head, p.D, scale,
                     s.q + i * row_floats<T>(p.D));
  });
}

// What a row's sums are multiplied by, and its LSE. The sink joins here, where all of a row's keys have been seen, and so
// counts once however the keys were split.
struct Denominator {
  float inverse, lse;
};
inline Denominator denominator(const Problem &p, int64_t head, float max, float sum) {
  const float top = sum == 0.0f ? -INFINITY : max * scale_of_max(p), sink = p.sinks ? p.sinks[head] : -INFINITY;
  if (sink == -INFINITY) return {sum == 0.0f ? 0.0f : 1.0f / sum, sum == 0.0f ? top : top + logf(sum)};
  const float base = fmaxf(top, sink), weight = expf(top - base), total = weight * sum + expf(sink - base);
  return {weight / total, base + logf(total)};
}

template <class T>
void write_out(const Problem &p, const Row &row, int64_t head, const State &s) {
  const Dims dims = dims_of(p);
  const float scale = is_code<T> ? scale_of_head<T>(p.v_scales, head) : 1.0f;
  with_query_type<T>(p.dtype, [&](auto type) {
    using Q = decltype(type);
    for (int64_t i = 0; i < s.rows; ++i) {
      const int64_t token = row.q0 + i / p.G, h = head * p.G + i % p.G;
      const Denominator all = denominator(p, h, s.max()[i], s.sum()[i]);
      const float factor = is_code<T> ? all.inverse * scale : all.inverse;
      const float *acc = s.acc() + i * dims.dv_padded;
      Q *dst = (Q *)p.out + token * p.o_token + h * p.o_head;
      for (int64_t lane = 0; lane < dims.dv_padded; ++lane) {
        const int64_t e = lane_element<T>((int)lane);
        if (e < p.DV) from_float(acc[lane] * factor, dst[e]);
      }
      if (p.lse) p.lse[token * p.lse_token + h * p.lse_head] = all.lse;
    }
  });
}

// The one merge: brings states to their common maximum and adds them, in the order of their segments.
template <class T>
void merge_group(const Job &job, const Group &g, State &s) {
  const Problem &p = *job.problem;
  const int64_t dv = dims_of(p).dv_padded;
  const Segment &first = job.segments[g.first];
  const Row &row = job.rows[first.row];
  auto part = [&](int64_t i) {
    State x;
    x.rows = s.rows, x.dv = s.dv;
    x.sums = job.partials + job.segments[g.first + i].partial * job.partial_floats;
    return x;
  };
  for (int64_t r = 0; r < s.rows; ++r) {
    float top = -INFINITY;
    for (int64_t i = 0; i < g.count; ++i) top = fmaxf(top, part(i).max()[r]);
    const float base = top == -INFINITY ? 0.0f : top;
    float sum = 0.0f;
    float *acc = s.acc() + r * dv;
    for (int64_t d = 0; d < dv; d += kW) vstore(acc + d, vzero());
    for (int64_t i = 0; i < g.count; ++i) {
      const State x = part(i);
      const float w = expf((x.max()[r] - base) * scale_of_max(p));
      if (w == 0.0f && x.sum()[r] == 0.0f) continue;
      sum += w * x.sum()[r];
      const float *from = x.acc() + r * dv;
      for (int64_t d = 0; d < dv; d += kW) vstore(acc + d, vfma(vset(w), vload(from + d), vload(acc + d)));
    }
    s.max()[r] = top;
    s.sum()[r] = sum;
  }
  write_out<T>(p, row, first.head, s);
}

template <class T>
void run_typed(const Job &job, int64_t first, int64_t count, char *memory) {
  const Problem &p = *job.problem;
  const Segment *segs = job.segments + first;
  const Row &row = job.rows[segs[0].row];
  const int64_t query_rows = (row.q1 - row.q0) * p.G;
  Scratch scratch = lay_out(p, query_rows, count, memory);
  int64_t begin = segs[0].begin, end = segs[0].end;
  for (int64_t i = 0; i < count; ++i) {
    begin = imin(begin, segs[i].begin);
    end = imax(end, segs[i].end);
    scratch.states[i].rows = query_rows;
    scratch.states[i].dv = dims_of(p).dv_padded;
    reset(scratch.states[i]);
    load_q<T>(p, row, segs[i].head, scratch.states[i]);
  }
  TileWork<T> work{p, row, scratch.buffers};
  locate<T>(p, row, begin, scratch.tokens[0]);
  for (int64_t t = begin; t < end; ++t) {
    const Tokens &now = scratch.tokens[(t - begin) & 1];
    Tokens &later = scratch.tokens[(t - begin + 1) & 1];
    if (t + 1 < end) locate<T>(p, row, t + 1, later);
    for (int64_t i = 0; i < count; ++i) {
      if (t < segs[i].begin || t >= segs[i].end) continue;
      // While a tile is computed the one after it starts to move: of another head here, or of the first head further on.
      Ahead ahead{&now, 0, 0};
      for (int64_t j = i + 1; j < count && !ahead.count; ++j)
        if (t >= segs[j].begin && t < segs[j].end) ahead = {&now, segs[j].head, now.count};
      for (int64_t j = 0; j < count && !ahead.count && t + 1 < end; ++j)
        if (t + 1 >= segs[j].begin && t + 1 < segs[j].end) ahead = {&later, segs[j].head, later.count};
      work.run(scratch.states[i], segs[i].head, now, ahead);
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    State &s = scratch.states[i];
    if (segs[i].partial < 0) {
      write_out<T>(p, row, segs[i].head, s);
      continue;
    }
    memcpy(job.partials + segs[i].partial * job.partial_floats, s.sums, (size_t)state_floats(p, query_rows) * 4);
    const Group &g = job.groups[segs[i].group];
    // The last of the group's workers to arrive merges; nobody waits.
    if (__atomic_add_fetch(job.finished + segs[i].group, 1, __ATOMIC_ACQ_REL) == g.count) merge_group<T>(job, g, s);
  }
}

template <class C>
void run_codes(const Job &job, int64_t first, int64_t count, char *memory) {
  if constexpr (PairDot<paired<C>>::value)
    if (job.problem->dtype == DType::bf16) return run_typed<paired<C>>(job, first, count, memory);
  run_typed<C>(job, first, count, memory);
}

void run(const Job &job, int64_t first, int64_t count, char *scratch) {
  switch (job.problem->codes) {
    case Codes::none: break;
    case Codes::e4m3: return run_codes<e4m3>(job, first, count, scratch);
    case Codes::int8: return run_codes<i8>(job, first, count, scratch);
  }
  switch (job.problem->dtype) {
    case DType::f32: return run_typed<float>(job, first, count, scratch);
    case DType::f16: return run_typed<f16>(job, first, count, scratch);
    case DType::bf16: return run_typed<bf16>(job, first, count, scratch);
  }
}

template <class T>
void merge_typed(const T *outs, const float *lses, T *out, float *lse, int64_t n, int64_t rows, int64_t d,
                 int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    float top = -INFINITY;
    for (int64_t i = 0; i < n; ++i) top = fmaxf(top, lses[i * rows + r]);
    const float base = top == -INFINITY ? 0.0f : top;
    float sum = 0.0f;
    for (int64_t i = 0; i < n; ++i) sum += expf(lses[i * rows + r] - base);
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    constexpr int64_t kChunk = 64;
    for (int64_t d0 = 0; d0 < d; d0 += kChunk) {
      const int64_t width = imin(kChunk, d - d0);
      float acc[kChunk] = {};
      for (int64_t i = 0; i < n; ++i) {
        const float w = expf(lses[i * rows + r] - base) * inverse;
        if (w == 0.0f) continue;  // a state without keys carries no output, whatever its bytes
        const T *from = outs + (i * rows + r) * d + d0;
        for (int64_t j = 0; j < width; ++j) acc[j] += w * to_float(from[j]);
      }
      for (int64_t j = 0; j < width; ++j) from_float(acc[j], out[r * d + d0 + j]);
    }
    lse[r] = sum == 0.0f ? -INFINITY : top + logf(sum);
  }
}

void merge(const char *outs, const float *lses, char *out, float *lse, int64_t n, int64_t rows, int64_t d, DType dtype,
           int64_t begin, int64_t end) {
  switch (dtype) {
    case DType::f32: return merge_typed((const float *)outs, lses, (float *)out, lse, n, rows, d, begin, end);
    case DType::f16: return merge_typed((const f16 *)outs, lses, (f16 *)out, lse, n, rows, d, begin, end);
    case DType::bf16: return merge_typed((const bf16 *)outs, lses, (bf16 *)out, lse, n, rows, d, begin, end);
  }
}

int64_t linear_floats(const Linear &l) { return pad_to(l.in, 2 * kW); }

void spread(const Linear &l) {
  switch (l.dtype) {
    case DType::f32: return ::spread<float>(l);
    case DType::f16: return ::spread<f16>(l);
    case DType::bf16: return ::spread<bf16>(l);
  }
}

void linear(const Linear &l, int64_t begin, int64_t end) {
  switch (l.dtype) {
    case DType::f32: return linear_typed<float>(l, begin, end);
    case DType::f16: return linear_typed<f16>(l, begin, end);
    case DType::bf16: return linear_typed<bf16>(l, begin, end);
  }
}

void quantise(const Append &a, const int64_t *slots, int64_t begin, int64_t end, int64_t page_size, float *row) {
  switch (a.codes) {
    case Codes::none: return;
    case Codes::e4m3: return quantise_codes<e4m3>(a, slots, begin, end, page_size, row);
    case Codes::int8: return quantise_codes<i8>(a, slots, begin, end, page_size, row);
  }
}

float read(const char *data, int64_t bytes) {
  // Two streams of plain loads: what the hardware prefetches by itself is faster than anything that asks for it.
  const int64_t n = bytes / 4, half = n / 2, step = 4 * kW;
  const float *p = (const float *)data, *q = p + half;
  V s[8];
  for (V &x : s) x = vzero();
  int64_t i = 0;
  for (; i + step <= half; i += step)
    each<4>([&](auto j) WF_LAMBDA {
      s[j] = vmax(s[j], vload(p + i + j * kW));
      s[j + 4] = vmax(s[j + 4], vload(q + i + j * kW));
    });
  float top = 0.0f;
  for (V x : s) top = fmaxf(top, vhmax(x));
  for (; i < half; ++i) top = fmaxf(top, fmaxf(p[i], q[i]));
  return n % 2 ? fmaxf(top, p[n - 1]) : top;
}

#define WF_TEXT_(x) #x
#define WF_TEXT(x) WF_TEXT_(x)

}  // namespace

extern const Kernel kernel = {WF_TEXT(WF_ISA), partial_floats, scratch_bytes, run, merge, linear_floats, spread, linear,
                              quantise, read};

}  // namespace WF_ISA
}  // namespace wf

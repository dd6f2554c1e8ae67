#include "launch.h"

#include <string.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <limits>

#include "pool.h"

namespace wf {

// --- which kernel -----------------------------------------------------------------------------------------------

std::vector<const Kernel *> available_kernels() {
  std::vector<const Kernel *> found;
#if defined(WF_HAS_avx2)
  __builtin_cpu_init();
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi"))
    found.push_back(&avx512bf16::kernel);
  if (avx512) found.push_back(&avx512::kernel);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
    found.push_back(&avx2::kernel);
#endif
  found.push_back(&portable::kernel);
  return found;
}

static std::atomic<const Kernel *> chosen{nullptr};

const Kernel &kernel() {
  const Kernel *k = chosen.load(std::memory_order_relaxed);
  if (!k) chosen = k = available_kernels().front();
  return *k;
}

bool choose_kernel(const char *name) {
  for (const Kernel *k : available_kernels())
    if (!strcmp(k->name, name)) return chosen = k, true;
  return false;
}

// --- rows and checks --------------------------------------------------------------------------------------------

static int64_t queries_end(const Problem &p) { return p.cu_q ? p.cu_q[p.B] : p.T; }

void build_rows(const Problem &p, std::vector<Row> &rows) {
  rows.clear();
  const int64_t block = std::max<int64_t>(1, kQueryRows / p.G);
  for (int64_t b = 0; b < p.B; ++b) {
    const int64_t q0 = p.cu_q ? p.cu_q[b] : b, q1 = p.cu_q ? p.cu_q[b + 1] : b + 1;
    const int64_t length = p.seq_lens[b], offset = length - (q1 - q0);
    for (int64_t q = q0; q < q1; q += block) {
      Row r{b, q, std::min(q + block, q1), offset + (q - q0), 0, length, offset};
      const int64_t last = r.pos0 + (r.q1 - r.q0) - 1;
      if (p.causal) r.stop = std::min(length, last + 1);
      if (p.window) r.start = std::max<int64_t>(0, r.pos0 - p.window + 1);
      rows.push_back(r);
    }
  }
}

static Report check(const Problem &p, const std::vector<Row> &rows) {
  for (const Row &r : rows) {
    if (!p.table || r.stop <= r.start) continue;
    const int32_t *ids = p.table + r.request * p.table_stride;
    for (int64_t s = r.start / p.page_size, end = (r.stop - 1) / p.page_size; s <= end; ++s)
      if (ids[s] < 0 || ids[s] >= p.pages) return {Fault::page_out_of_range, r.request, ids[s], s};
  }
  return {};
}

static Report check_lengths(const Problem &p) {
  const int64_t capacity = p.page_size * p.max_pages;
  for (int64_t b = 0; b < p.B; ++b) {
    if (p.seq_lens[b] < 0) return {Fault::negative_length, b, p.seq_lens[b], 0};
    if (p.seq_lens[b] > capacity) return {Fault::length_over_capacity, b, p.seq_lens[b], 0};
  }
  auto sign = [](float x) { return (int64_t)(x > 0) - (int64_t)(x < 0); };
  for (int64_t h = 0; p.sinks && h < p.HQ; ++h)
    if (!(p.sinks[h] < std::numeric_limits<float>::infinity())) return {Fault::sink_no_number, h, sign(p.sinks[h]), 0};
  for (int64_t h = 0; p.slopes && h < p.HQ; ++h)
    if (!std::isfinite(p.slopes[h])) return {Fault::slope_no_number, h, sign(p.slopes[h]), 0};
  for (int64_t side = 0; side < 2; ++side) {
    const Scales &s = side ? p.v_scales : p.k_scales;
    for (int64_t h = 0; s.at && !s.tokens && h < p.KH; ++h)
      if (const float x = *((const float *)s.at + h * s.to_head); !std::isfinite(x))
        return {Fault::scale_no_number, h, sign(x), side};
  }
  if (!p.cu_q) return {};
  if (p.cu_q[0] != 0) return {Fault::offsets_start, 0, p.cu_q[0], 0};
  for (int64_t b = 0; b < p.B; ++b)
    if (p.cu_q[b + 1] < p.cu_q[b]) return {Fault::offsets_decrease, b, p.cu_q[b + 1], 0};
  if (p.cu_q[p.B] > p.T) return {Fault::offsets_past_end, 0, p.cu_q[p.B], 0};
  for (int64_t b = 0; p.mask && b < p.B; ++b)
    if (const int64_t n = p.cu_q[b + 1] - p.cu_q[b]; n > 32 * p.mask_words)
      return {Fault::mask_too_narrow, b, n, p.mask_words};
  return {};
}

// --- the call ---------------------------------------------------------------------------------------------------

static int64_t element_bytes(DType t) { return t == DType::f32 ? 4 : 2; }
static int64_t kv_bytes(const Problem &p) { return p.codes == Codes::none ? element_bytes(p.dtype) : 1; }

// Query tokens that see no key: nothing but the sinks is in their softmax. Padding has not even those.
static void write_empty(const Problem &p, int64_t from, int64_t to, const float *sinks) {
  const int64_t size = element_bytes(p.dtype);
  for (int64_t t = from; t < to; ++t)
    for (int64_t h = 0; h < p.HQ; ++h) {
      memset(p.out + (t * p.o_token + h * p.o_head) * size, 0, (size_t)(p.DV * size));
      if (p.lse) p.lse[t * p.lse_token + h * p.lse_head] = sinks ? sinks[h] : -std::numeric_limits<float>::infinity();
    }
}

namespace {

// Memory that the calls of one thread use again and again.
struct Workspace {
  std::vector<Row> rows;
  Plan plan;
  std::vector<char> scratch;
  std::vector<float> partials;
  std::vector<int32_t> finished;
  std::vector<int64_t> worker_begin;
};

// A workspace above this size is given back at the end of its call.
constexpr size_t kKeepBytes = size_t(256) << 20;
// Softmax states that one worker walks the context for at a time; they should stay in the second-level cache.
constexpr int64_t kBundleBytes = 128 << 10;

// Below this many KV bytes (some 10 us of work) waking other threads costs more than they give. The schedule, and with
// it every bit of the result, stays the same.
constexpr int64_t kAloneBytes = 64 << 10;

struct Call {
  Job job;
  const Kernel *kernel;
  const Plan *plan;
  const int64_t *worker_begin;  // stream_k: first segment of each worker; null: segments are claimed one by one
  int64_t units, bundle, scratch_bytes;
  char *scratch;
  std::atomic<int64_t> next{0};
  std::atomic<int> threads{0};
};

char *align64(char *p) { return (char *)(((uintptr_t)p + 63) & ~(uintptr_t)63); }

void run_range(Call &c, int64_t begin, int64_t end, char *scratch) {
  const auto &segs = c.plan->segments;
  while (begin < end) {
    int64_t stop = begin + 1;
    while (stop < end && stop - begin < c.bundle && segs[stop].row == segs[begin].row) ++stop;
    c.kernel->run(c.job, begin, stop - begin, scratch);
    begin = stop;
  }
}

void work(void *arg) {
  Call &c = *(Call *)arg;
  char *scratch = c.scratch + c.threads++ * c.scratch_bytes;
  for (int64_t unit; (unit = c.next++) < c.units;) {
    if (c.worker_begin)
      run_range(c, c.worker_begin[unit], c.worker_begin[unit + 1], scratch);
    else
      run_range(c, unit, unit + 1, scratch);
  }
}

}  // namespace

Report attention(const Problem &p, Kind kind, int64_t param, int64_t workers, int threads) {
  static thread_local Workspace kept;
  Workspace &ws = kept;
  Report report = check_lengths(p);
  if (report.fault != Fault::none) return report;
  build_rows(p, ws.rows);
  report = check(p, ws.rows);
  if (report.fault != Fault::none) return report;

  for (const Row &r : ws.rows)
    if (r.stop <= r.start) write_empty(p, r.q0, r.q1, p.sinks);
  write_empty(p, queries_end(p), p.T, nullptr);
  build_plan(ws.rows.data(), (int64_t)ws.rows.size(), p.KH, p.tile, kind, param, workers, ws.plan);
  const auto &segs = ws.plan.segments;
  if (segs.empty()) return {};

  Call call;
  call.kernel = &kernel();
  call.plan = &ws.plan;
  call.worker_begin = nullptr;
  call.units = (int64_t)segs.size();
  if (kind == Kind::stream_k) {
    ws.worker_begin.clear();
    for (int64_t i = 0; i < (int64_t)segs.size(); ++i)
      if (i == 0 || segs[i].worker != segs[i - 1].worker) ws.worker_begin.push_back(i);
    call.units = (int64_t)ws.worker_begin.size();
    ws.worker_begin.push_back((int64_t)segs.size());
    call.worker_begin = ws.worker_begin.data();
  }
  int64_t tiles = 0;
  for (const Segment &s : segs) tiles += s.end - s.begin;
  const bool small = tiles * p.tile * (p.D + p.DV) * kv_bytes(p) < kAloneBytes;
  const int team = small ? 1 : (int)std::min<int64_t>(threads, call.units);

  int64_t query_rows = p.G;
  if (p.cu_q)
    for (const Row &r : ws.rows) query_rows = std::max(query_rows, (r.q1 - r.q0) * p.G);
  const int64_t state_bytes = query_rows * (p.D + p.DV + 2) * 4;
  call.bundle = std::clamp<int64_t>(kBundleBytes / state_bytes, 1, p.KH);
  call.scratch_bytes = call.kernel->scratch_bytes(p, query_rows, call.bundle);
  const int64_t slot = call.kernel->partial_floats(p, query_rows);
  ws.scratch.resize((size_t)(call.scratch_bytes * team + 64));
  ws.partials.resize((size_t)(slot * ws.plan.partials));
  ws.finished.assign(ws.plan.partials ? ws.plan.groups.size() : 0, 0);
  call.scratch = align64(ws.scratch.data());
  call.job = {&p, ws.rows.data(), segs.data(), ws.plan.groups.data(), ws.partials.data(), slot, ws.finished.data()};
  run_parallel(team, work, &call);

  if (ws.scratch.capacity() + ws.partials.capacity() * 4 + segs.capacity() * sizeof(Segment) > kKeepBytes)
    kept = Workspace{};
  return {};
}

// --- merge ------------------------------------------------------------------------------------------------------

namespace {

struct MergeCall {
  const Kernel *kernel;
  const char *outs;
  const float *lses;
  char *out;
  float *lse;
  int64_t n, rows, d, block;
  DType dtype;
  std::atomic<int64_t> next{0};
};

void merge_work(void *arg) {
  MergeCall &c = *(MergeCall *)arg;
  for (int64_t begin; (begin = c.next.fetch_add(c.block)) < c.rows;)
    c.kernel->merge(c.outs, c.lses, c.out, c.lse, c.n, c.rows, c.d, c.dtype, begin, std::min(begin + c.block, c.rows));
}

}  // namespace

void merge_states(const char *outs, const float *lses, char *out, float *lse, int64_t n, int64_t rows, int64_t d,
                  DType dtype, int threads) {
  MergeCall call;
  call.kernel = &kernel();
  call.outs = outs, call.lses = lses, call.out = out, call.lse = lse;
  call.n = n, call.rows = rows, call.d = d, call.dtype = dtype;
  // Rows at a time: enough work (about 64K elements) to pay for handing it out.
  call.block = std::max<int64_t>(1, (64 << 10) / std::max<int64_t>(1, n * d));
  run_parallel((int)std::min<int64_t>(threads, (rows + call.block - 1) / call.block), merge_work, &call);
}

// --- linear layers of a few rows ---------------------------------------------------------------------------------

namespace {

struct LinearCall {
  const Kernel *kernel;
  Linear l;
  int64_t block;
  std::atomic<int64_t> next{0};
};

void linear_work(void *arg) {
  LinearCall &c = *(LinearCall *)arg;
  for (int64_t begin; (begin = c.next.fetch_add(c.block)) < c.l.outs;)
    c.kernel->linear(c.l, begin, std::min(begin + c.block, c.l.outs));
}

}  // namespace

void linear(Linear l, int threads) {
  static thread_local std::vector<float> lanes;
  if (!l.rows || !l.outs) return;
  LinearCall call;
  call.kernel = &kernel();
  lanes.resize((size_t)(call.kernel->linear_floats(l) * l.rows));
  l.lanes = lanes.data();
  call.kernel->spread(l);
  call.l = l;
  // Outputs at a time: some 256 KB of weights, and a multiple of all that a pass makes.
  call.block = std::max<int64_t>(1, (256 << 10) / 12 / std::max<int64_t>(1, l.in * element_bytes(l.dtype))) * 12;
  const bool small = l.outs * l.in * element_bytes(l.dtype) < kAloneBytes;
  run_parallel(small ? 1 : (int)std::min<int64_t>(threads, (l.outs + call.block - 1) / call.block), linear_work, &call);
}

// --- read bandwidth ---------------------------------------------------------------------------------------------

namespace {

struct ReadCall {
  const Kernel *kernel;
  const char *data;
  int64_t bytes, block;
  std::atomic<int64_t> next{0};
  std::atomic<float> top{0.0f};
};

void read_work(void *arg) {
  ReadCall &c = *(ReadCall *)arg;
  float top = 0.0f;
  for (int64_t at; (at = c.next.fetch_add(c.block)) < c.bytes;)
    top = std::max(top, c.kernel->read(c.data + at, std::min(c.block, c.bytes - at)));
  if (top > c.top) c.top = top;
}

}  // namespace

double read_bytes_per_second(const char *data, int64_t bytes, int threads) {
  ReadCall call;
  call.kernel = &kernel();
  call.data = data, call.bytes = bytes, call.block = 4 << 20;
  const auto start = std::chrono::steady_clock::now();
  run_parallel(threads, read_work, &call);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  return (double)bytes / took.count();
}

// --- append -----------------------------------------------------------------------------------------------------

static void append_one(const Append &a, const int64_t *slots, int64_t n, int64_t page_size) {
  for (int64_t i = 0; i < n; ++i) {
    if (slots[i] < 0) continue;
    const int64_t page = slots[i] / page_size, offset = slots[i] % page_size;
    for (int64_t h = 0; h < a.heads; ++h) {
      const char *src = a.src + (i * a.src_token + h * a.src_head) * a.element;
      char *dst = a.dst + (page * a.to.page + offset * a.to.token + h * a.to.head) * a.element;
      if (a.src_dim == 1 && a.to.dim == 1) {
        memcpy(dst, src, (size_t)(a.width * a.element));
        continue;
      }
      for (int64_t d = 0; d < a.width; ++d)
        memcpy(dst + d * a.to.dim * a.element, src + d * a.src_dim * a.element, (size_t)a.element);
    }
  }
}

namespace {

struct QuantiseCall {
  const Kernel *kernel;
  const Append *k, *v;
  const int64_t *slots;
  int64_t n, page_size, block;
  std::atomic<int64_t> next{0};
};

void quantise_work(void *arg) {
  QuantiseCall &c = *(QuantiseCall *)arg;
  std::vector<float> row((size_t)(2 * std::max(c.k->width, c.v->width)));
  for (int64_t begin; (begin = c.next.fetch_add(c.block)) < c.n;)
    for (const Append *a : {c.k, c.v})
      c.kernel->quantise(*a, c.slots, begin, std::min(begin + c.block, c.n), c.page_size, row.data());
}

}  // namespace

int64_t append(const Append &k, const Append &v, const int64_t *slots, int64_t n, int64_t page_size, int64_t pages,
               int threads) {
  for (int64_t i = 0; i < n; ++i)
    if (slots[i] >= pages * page_size) return i;
  if (k.codes != Codes::none) {
    QuantiseCall call;
    call.kernel = &kernel();
    call.k = &k, call.v = &v, call.slots = slots, call.n = n, call.page_size = page_size;
    // Tokens at a time: enough work (about 64K elements) to pay for handing it out.
    call.block = std::max<int64_t>(1, (64 << 10) / std::max<int64_t>(1, k.heads * (k.width + v.width)));
    run_parallel((int)std::min<int64_t>(threads, (n + call.block - 1) / call.block), quantise_work, &call);
    return -1;
  }
  append_one(k, slots, n, page_size);
  append_one(v, slots, n, page_size);
  return -1;
}

}  // namespace wf

// The Python face of the core. Pointers come as integers and strides in elements; wavefill.backends.cpu makes them
// from tensors and is the only caller, so that this extension needs neither torch's headers nor its libraries.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>
#include <vector>

#include "launch.h"
#include "pool.h"

namespace nb = nanobind;

namespace {

template <class T>
T *pointer(uintptr_t address) {
  return reinterpret_cast<T *>(address);
}

// Scales as (address, half, one a token, strides of pages, tokens and heads).
using ScaleView = std::tuple<uintptr_t, bool, bool, int64_t, int64_t, int64_t>;

wf::Scales scales(const ScaleView &s) {
  return {pointer<const char>(std::get<0>(s)), std::get<1>(s), std::get<2>(s), std::get<3>(s), std::get<4>(s),
          std::get<5>(s)};
}

nb::object attention(uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t out, uintptr_t lse, uintptr_t seq_lens,
                     uintptr_t table, uintptr_t cu_q, int64_t T, int64_t B, int64_t HQ, int64_t KH, int64_t D,
                     int64_t DV, int64_t page_size, int64_t pages, int64_t max_pages, int64_t table_stride,
                     int64_t q_token, int64_t q_head, int64_t k_page, int64_t k_token, int64_t k_head, int64_t k_dim,
                     int64_t v_page, int64_t v_token, int64_t v_head, int64_t v_dim, int64_t o_token, int64_t o_head,
                     int64_t lse_token, int64_t lse_head, int dtype, float scale, bool causal, int64_t window,
                     int64_t tile, int kind, int64_t param, int64_t workers, int threads, float softcap, uintptr_t sinks,
                     uintptr_t slopes, uintptr_t mask, int64_t mask_words, int codes, const ScaleView &k_scales,
                     const ScaleView &v_scales) {
  wf::Problem p{};
  p.q = pointer<const char>(q), p.k = pointer<const char>(k), p.v = pointer<const char>(v);
  p.out = pointer<char>(out), p.lse = pointer<float>(lse);
  p.seq_lens = pointer<const int32_t>(seq_lens), p.table = pointer<const int32_t>(table);
  p.cu_q = pointer<const int32_t>(cu_q);
  p.T = T, p.B = B, p.HQ = HQ, p.KH = KH, p.G = HQ / KH, p.D = D, p.DV = DV;
  p.page_size = page_size, p.pages = pages, p.max_pages = max_pages, p.table_stride = table_stride;
  p.ks = {k_page, k_token, k_head, k_dim}, p.vs = {v_page, v_token, v_head, v_dim};
  p.q_token = q_token, p.q_head = q_head, p.o_token = o_token, p.o_head = o_head;
  p.lse_token = lse_token, p.lse_head = lse_head;
  p.dtype = (wf::DType)dtype, p.scale = scale, p.causal = causal, p.window = window, p.tile = tile;
  p.softcap = softcap, p.sinks = pointer<const float>(sinks), p.slopes = pointer<const float>(slopes);
  p.mask = pointer<const uint32_t>(mask), p.mask_words = mask_words;
  p.codes = (wf::Codes)codes, p.k_scales = scales(k_scales), p.v_scales = scales(v_scales);
  wf::Report r;
  {
    nb::gil_scoped_release release;
    r = wf::attention(p, (wf::Kind)kind, param, workers, threads);
  }
  if (r.fault == wf::Fault::none) return nb::none();
  return nb::make_tuple((int)r.fault, r.request, r.value, r.slot);
}

using Segments = std::tuple<std::vector<int64_t>, std::vector<int64_t>, std::vector<int64_t>, std::vector<int64_t>,
                            std::vector<int64_t>>;

Segments schedule(const std::vector<int64_t> &starts, const std::vector<int64_t> &stops, int64_t kv_heads, int64_t tile,
                  int kind, int64_t param, int64_t workers) {
  std::vector<wf::Row> rows(starts.size());
  for (size_t i = 0; i < rows.size(); ++i) rows[i].start = starts[i], rows[i].stop = stops[i];
  wf::Plan plan;
  wf::build_plan(rows.data(), (int64_t)rows.size(), kv_heads, tile, (wf::Kind)kind, param, workers, plan);
  Segments out;
  for (const wf::Segment &s : plan.segments) {
    std::get<0>(out).push_back(s.row);
    std::get<1>(out).push_back(s.head);
    std::get<2>(out).push_back(s.begin);
    std::get<3>(out).push_back(s.end);
    std::get<4>(out).push_back(s.worker);
  }
  return out;
}

// Key ranges of the rows (query blocks) that a call is cut into: (request, q0, q1, start, stop) each.
std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>> rows(const std::vector<int32_t> &seq_lens,
                                                                          const std::vector<int32_t> &cu_q, int64_t G,
                                                                          bool causal, int64_t window) {
  wf::Problem p{};
  p.B = (int64_t)seq_lens.size(), p.seq_lens = seq_lens.data(), p.cu_q = cu_q.data(), p.G = G;
  p.causal = causal, p.window = window;
  std::vector<wf::Row> built;
  wf::build_rows(p, built);
  std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>> out;
  for (const wf::Row &r : built) out.emplace_back(r.request, r.q0, r.q1, r.start, r.stop);
  return out;
}

using Side = std::tuple<uintptr_t, uintptr_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>;

// A side is (source, cache, heads, width, source strides [3], cache strides without the page's [3]).
int64_t append(const Side &k, const Side &v, int64_t k_page, int64_t v_page, uintptr_t slots, int64_t n, int64_t element,
               int64_t page_size, int64_t pages, int dtype, int codes, const ScaleView &k_scales,
               const ScaleView &v_scales, int threads) {
  auto side = [&](const Side &s, int64_t page, const ScaleView &by) {
    return wf::Append{pointer<const char>(std::get<0>(s)), pointer<char>(std::get<1>(s)), std::get<2>(s), std::get<3>(s),
                      element, std::get<4>(s), std::get<5>(s), std::get<6>(s),
                      {page, std::get<7>(s), std::get<8>(s), std::get<9>(s)}, (wf::DType)dtype, (wf::Codes)codes, scales(by)};
  };
  nb::gil_scoped_release release;
  return wf::append(side(k, k_page, k_scales), side(v, v_page, v_scales), pointer<const int64_t>(slots), n, page_size,
                    pages, threads);
}

void merge(uintptr_t outs, uintptr_t lses, uintptr_t out, uintptr_t lse, int64_t n, int64_t rows, int64_t d, int dtype,
           int threads) {
  nb::gil_scoped_release release;
  wf::merge_states(pointer<const char>(outs), pointer<const float>(lses), pointer<char>(out), pointer<float>(lse), n,
                   rows, d, (wf::DType)dtype, threads);
}

void linear(uintptr_t x, uintptr_t weight, uintptr_t bias, uintptr_t out, int64_t rows, int64_t in, int64_t outs,
            int64_t x_row, int64_t weight_row, int64_t out_row, int dtype, int threads) {
  nb::gil_scoped_release release;
  wf::linear({pointer<const char>(x), pointer<const char>(weight), pointer<const char>(bias), pointer<char>(out),
              nullptr, rows, in, outs, x_row, weight_row, out_row, (wf::DType)dtype},
             threads);
}

double read_bandwidth(uintptr_t data, int64_t bytes, int threads) {
  nb::gil_scoped_release release;
  return wf::read_bytes_per_second(pointer<const char>(data), bytes, threads);
}

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (const wf::Kernel *k : wf::available_kernels()) names.emplace_back(k->name);
  return names;
}

void set_isa(const std::string &name) {
  if (!wf::choose_kernel(name.c_str())) throw nb::value_error(("this CPU has no kernel named " + name).c_str());
}

}  // namespace

NB_MODULE(_core, m) {
  m.def("attention", &attention);
  m.def("schedule", &schedule, nb::arg("starts"), nb::arg("stops"), nb::arg("kv_heads"), nb::arg("tile"),
        nb::arg("kind"), nb::arg("param"), nb::arg("workers"));
  m.def("rows", &rows, nb::arg("seq_lens"), nb::arg("cu_q"), nb::arg("group"), nb::arg("causal"), nb::arg("window"));
  m.def("append", &append);
  m.def("merge", &merge);
  m.def("linear", &linear);
  m.def("read_bandwidth", &read_bandwidth);
  m.def("isa", [] { return std::string(wf::kernel().name); });
  m.def("isas", &isas);
  m.def("set_isa", &set_isa, nb::arg("name"));
  m.def("pool", [] { return std::string(wf::pool_name()); });
  m.def("compiler", [] { return std::string(__VERSION__); });
}

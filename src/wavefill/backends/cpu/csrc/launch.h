// The calls that the Python module exposes, free of Python.
#pragma once
#include <stdint.h>

#include <vector>

#include "kernel.h"
#include "problem.h"
#include "schedule.h"

namespace wf {

// What a value in a tensor was wrong with.
enum class Fault : int {
  none = 0,
  negative_length = 1,    // request, length
  length_over_capacity = 2,  // request, length
  page_out_of_range = 3,  // request, page id, slot
  offsets_start = 4,      // -, first value of cu_seqlens_q
  offsets_decrease = 5,   // request, next value
  offsets_past_end = 6,   // -, last value
  mask_too_narrow = 7,    // request, its query tokens, words of a row of the mask
  sink_no_number = 8,     // head, 0 for NaN or the sign of an infinity
  slope_no_number = 9,    // the same
  scale_no_number = 10,   // KV head, the same, 0 for K or 1 for V
};

struct Report {
  Fault fault = Fault::none;
  int64_t request = 0, value = 0, slot = 0;
};

// Query tokens of one row: as many as fill this many (query token, head) rows, and at least one.
constexpr int64_t kQueryRows = 64;

std::vector<const Kernel *> available_kernels();
const Kernel &kernel();
bool choose_kernel(const char *name);

void build_rows(const Problem &p, std::vector<Row> &rows);
Report attention(const Problem &p, Kind kind, int64_t param, int64_t workers, int threads);
void merge_states(const char *outs, const float *lses, char *out, float *lse, int64_t n, int64_t rows, int64_t d,
                  DType dtype, int threads);
void linear(Linear l, int threads);
double read_bytes_per_second(const char *data, int64_t bytes, int threads);

// Writes K and V of new tokens; returns the first token whose slot lies past the cache (nothing is written then), or -1. A negative slot
// skips its token.
int64_t append(const Append &k, const Append &v, const int64_t *slots, int64_t n, int64_t page_size, int64_t pages,
               int threads);

}  // namespace wf

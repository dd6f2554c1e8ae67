// The functions that exist once per instruction set.
#pragma once
#include "problem.h"

namespace wf {

// Everything that the workers of one call share.
struct Job {
  const Problem *problem;
  const Row *rows;
  const Segment *segments;
  const Group *groups;
  float *partials;        // one slot per partial segment
  int64_t partial_floats;  // floats of a slot
  int32_t *finished;      // per group: segments done so far
};

struct Kernel {
  const char *name;
  // Floats of one partial state of `query_rows` (query tokens x G) rows.
  int64_t (*partial_floats)(const Problem &, int64_t query_rows);
  // Bytes of scratch memory for a bundle of up to `heads` segments.
  int64_t (*scratch_bytes)(const Problem &, int64_t query_rows, int64_t heads);
  // Computes `count` consecutive segments of one row, walking the context once for all of them.
  void (*run)(const Job &, int64_t first, int64_t count, char *scratch);
  // Merges n states: outs [n, rows, d] of `dtype`, lses [n, rows]; rows [begin, end).
  void (*merge)(const char *outs, const float *lses, char *out, float *lse, int64_t n, int64_t rows, int64_t d,
                DType dtype, int64_t begin, int64_t end);
  // A linear layer of a few rows: floats of one row of its `lanes` (at most), filling them, and outputs [begin, end).
  int64_t (*linear_floats)(const Linear &);
  void (*spread)(const Linear &);
  void (*linear)(const Linear &, int64_t begin, int64_t end);
  // Tokens [begin, end) on their way into a cache of codes; their slots lie within it or are negative. `row` has room for
  // five bytes an element of a row.
  void (*quantise)(const Append &, const int64_t *slots, int64_t begin, int64_t end, int64_t page_size, float *row);
  // Reads a buffer and returns a sum that keeps the compiler from dropping the loads.
  float (*read)(const char *data, int64_t bytes);
};

#define WF_DECLARE(isa) \
  namespace isa {       \
  extern const Kernel kernel; \
  }
WF_DECLARE(portable)
WF_DECLARE(avx2)
WF_DECLARE(avx512)
WF_DECLARE(avx512bf16)
#undef WF_DECLARE

}  // namespace wf

// The arithmetic of wavefill/schedule.py, held to it by tests/test_schedule_core.py.
#pragma once
#include <vector>

#include "problem.h"

namespace wf {

enum class Kind : int { stream_k = 0, fixed_splits = 1, fixed_chunk = 2, invariant = 3 };

struct Plan {
  std::vector<Segment> segments;
  std::vector<Group> groups;
  int64_t partials = 0;
};

// Most pieces x KV heads of one request under `invariant`.
constexpr int64_t kInvariantPieces = 1024;

void build_plan(const Row *rows, int64_t num_rows, int64_t kv_heads, int64_t tile, Kind kind, int64_t param,
                int64_t workers, Plan &plan);

}  // namespace wf

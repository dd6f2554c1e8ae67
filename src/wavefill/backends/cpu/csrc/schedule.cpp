#include "schedule.h"

#include <algorithm>

namespace wf {

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Tiles {
  int64_t first, count;
};

static Tiles tiles_of(const Row &row, int64_t tile) {
  if (row.stop <= row.start) return {0, 0};
  int64_t first = row.start / tile;
  return {first, ceil_div(row.stop, tile) - first};
}

static void stream_k(const Row *rows, int64_t num_rows, int64_t kv_heads, int64_t tile, int64_t workers, Plan &plan) {
  int64_t total = 0;
  for (int64_t r = 0; r < num_rows; ++r) total += kv_heads * tiles_of(rows[r], tile).count;
  int64_t at = 0, worker = 0;
  // Worker w owns linear tiles [w * total / workers, (w + 1) * total / workers).
  auto bound = [&](int64_t w) { return (int64_t)((__int128)w * total / workers); };
  int64_t next = bound(1);
  for (int64_t r = 0; r < num_rows; ++r) {
    Tiles t = tiles_of(rows[r], tile);
    if (!t.count) continue;
    for (int64_t h = 0; h < kv_heads; ++h) {
      int64_t begin = 0;
      while (begin < t.count) {
        while (next <= at) next = bound(++worker + 1);
        int64_t take = std::min(t.count - begin, next - at);
        plan.segments.push_back({(int32_t)r, (int32_t)h, t.first + begin, t.first + begin + take, (int32_t)worker, 0, -1});
        begin += take;
        at += take;
      }
    }
  }
}

static void pieces(const Row *rows, int64_t num_rows, int64_t kv_heads, int64_t tile, Kind kind, int64_t param,
                   Plan &plan) {
  for (int64_t r = 0; r < num_rows; ++r) {
    Tiles t = tiles_of(rows[r], tile);
    if (!t.count) continue;
    int64_t chunk = param;
    if (kind == Kind::invariant)
      chunk = std::max(param, ceil_div(t.count, std::max<int64_t>(1, kInvariantPieces / kv_heads)));
    for (int64_t h = 0; h < kv_heads; ++h) {
      auto add = [&](int64_t begin, int64_t end) {
        if (begin < end) plan.segments.push_back({(int32_t)r, (int32_t)h, t.first + begin, t.first + end, 0, 0, -1});
      };
      if (kind == Kind::fixed_splits) {
        // With more splits than tiles the empty ones vanish, so walk at most one split a tile.
        if (param >= t.count) {
          for (int64_t i = 0; i < t.count; ++i) add(i, i + 1);
        } else {
          for (int64_t s = 0; s < param; ++s) add(s * t.count / param, (s + 1) * t.count / param);
        }
      } else {
        for (int64_t b = 0; b < t.count; b += chunk) add(b, std::min(b + chunk, t.count));
      }
    }
  }
}

void build_plan(const Row *rows, int64_t num_rows, int64_t kv_heads, int64_t tile, Kind kind, int64_t param,
                int64_t workers, Plan &plan) {
  plan.segments.clear();
  plan.groups.clear();
  plan.partials = 0;
  if (kind == Kind::stream_k)
    stream_k(rows, num_rows, kv_heads, tile, workers, plan);
  else
    pieces(rows, num_rows, kv_heads, tile, kind, param, plan);
  for (int64_t i = 0, n = (int64_t)plan.segments.size(); i < n;) {
    int64_t j = i;
    while (j < n && plan.segments[j].row == plan.segments[i].row && plan.segments[j].head == plan.segments[i].head) ++j;
    for (int64_t s = i; s < j; ++s) {
      plan.segments[s].group = (int32_t)plan.groups.size();
      if (j - i > 1) plan.segments[s].partial = plan.partials++;
    }
    plan.groups.push_back({i, j - i});
    i = j;
  }
}

}  // namespace wf

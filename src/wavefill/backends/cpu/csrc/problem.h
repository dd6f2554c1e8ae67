// One attention call as plain pointers and strides, shared by every part of the core.
#pragma once
#include <stdint.h>

namespace wf {

enum class DType : int { f32 = 0, f16 = 1, bf16 = 2 };

// How K and V are stored: as numbers of q's dtype, or as codes, whose values are code x scale.
enum class Codes : int { none = 0, e4m3 = 1, int8 = 2 };

// Offsets and strides are counted in elements; all of them are 64 bits wide.
struct Strides {
  int64_t page, token, head, dim;
};

// Scales of K or V. `at` is null where every scale is 1. Without `tokens` there is a float32 a KV head (with a stride of 0,
// one for all); with it one a token and head.
struct Scales {
  const char *at;
  bool half;  // float16, else float32; of tokens' scales alone
  bool tokens;
  int64_t to_page, to_token, to_head;
};

struct Problem {
  const char *q, *k, *v;
  char *out;
  float *lse;               // may be null
  const int32_t *seq_lens;  // [B]
  const int32_t *table;     // [B, max_pages], or null: request b owns "page" b
  const int32_t *cu_q;      // [B + 1], or null: one query token a request
  int64_t T, B, HQ, KH, G, D, DV;
  int64_t page_size, pages, max_pages, table_stride;
  Strides ks, vs;
  int64_t q_token, q_head, o_token, o_head;
  int64_t lse_token, lse_head;
  DType dtype;   // of q and out, and of K and V unless they are codes
  Codes codes;
  Scales k_scales, v_scales;
  float scale;
  bool causal;
  int64_t window;  // keys a query sees, itself included; 0: all
  int64_t tile;    // tokens of a tile
  float softcap;          // scores become c tanh(s / c); 0: they stay
  const float *sinks;     // [HQ], a further logit of each head, or null
  const float *slopes;    // [HQ], of ALiBi, or null
  const uint32_t *mask;   // [T, mask_words], bit j of row t: query token t sees token j of its draft; or null
  int64_t mask_words;
};

// A row is the unit of queries that the schedule deals with: query tokens [q0, q1) of one request, which between them
// see keys [start, stop). pos0 is the position of query q0, draft that of the request's first query token: the keys from
// there on are those of its query tokens.
struct Row {
  int64_t request, q0, q1, pos0, start, stop, draft;
};

// A run of tiles [begin, end) of one (row, head), done by one worker in one go.
struct Segment {
  int32_t row, head;
  int64_t begin, end;
  int32_t worker;   // stream_k: its worker; the other kinds are claimed in order by whichever worker is free
  int32_t group;    // the (row, head) it belongs to, counted over those with at least one tile
  int64_t partial;  // slot of its partial state, or -1 when it covers its (row, head) alone
};

// y = x W' + bias for a few rows of x: out [rows, outs], x [rows, in], weight [outs, in], bias [outs] or null.
struct Linear {
  const char *x, *weight, *bias;
  char *out;
  float *lanes;  // x as the kernel reads it: room for linear_floats a row
  int64_t rows, in, outs;
  int64_t x_row, weight_row, out_row;  // strides in elements; the last dimensions lie side by side
  DType dtype;
};

// K or V of new tokens, [n, heads, width], on their way into a cache.
struct Append {
  const char *src;
  char *dst;
  int64_t heads, width, element;  // element: bytes of one of the source
  int64_t src_token, src_head, src_dim;
  Strides to;
  DType dtype;    // of the source, and of the cache unless it holds codes
  Codes codes;
  Scales scales;  // read where they are of heads, written where each token has one
};

// All segments of one (row, head); the last worker to finish one of them merges them in order.
struct Group {
  int64_t first, count;  // segments
};

}  // namespace wf

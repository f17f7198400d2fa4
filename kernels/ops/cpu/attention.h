// Attention of new tokens to cached ones, read in place through block tables.
#pragma once

#include "rows.h"

namespace paged {

// Who sees whom, and what becomes of the scores.
struct Rule {
  float scale;
  float softcap;       // 0: none
  int64_t window;      // 0: none
  int64_t chunk;       // 0: none
  const float* sinks;  // [num_heads] or null

  int64_t first_visible(int64_t position) const {
    if (window) return position < window ? 0 : position - window + 1;
    return chunk ? position / chunk * chunk : 0;
  }
};

struct Tables {
  const int32_t* blocks;  // [num_seqs][stride]
  int64_t stride;
  const int32_t* context_lens;  // [num_seqs]
  int64_t num_seqs;
};

// One query for each sequence, at its last position; result is [num_seqs][num_heads][value_dim] of the query's type.
void decode_attention(Heads query, int64_t num_heads, const Cache& cache, const Tables& tables, const Rule& rule,
                      void* result);

// The queries cu_seqlens_q[s] to cu_seqlens_q[s + 1] of each sequence, at its last positions.
void prefill_attention(Heads query, int64_t num_heads, const Cache& cache, const Tables& tables,
                       const int32_t* cu_seqlens_q, const Rule& rule, void* result);

}  // namespace paged

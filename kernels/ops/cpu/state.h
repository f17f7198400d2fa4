// Operations on recurrent state: one token of each sequence of a step.
#pragma once

#include "rows.h"

namespace paged {

// A pool of states, [num_slots][num_heads][rows][columns] of floats, and which of its slots a step reads and writes.
struct States {
  float* data;
  int64_t slot_stride, num_heads, rows, columns;
  const int64_t *slots_in, *slots_out;  // [num_seqs]; none that is written is read
  int64_t num_seqs;

  float* at(int64_t slot, int64_t head) const { return data + slot * slot_stride + head * rows * columns; }
};

// rows are a key's dims and columns a value's; g and beta [num_seqs][num_heads], result likewise of value's type.
void gated_delta_update(const Heads& query, const Heads& key, const Heads& value, int64_t num_key_heads, const float* g,
                        const float* beta, float epsilon, bool normalises, const States& states, void* result);

// rows are a head's dims and columns those that B and C have. dt [num_seqs][num_heads], D and its like [num_heads],
// z.data may be null; result [num_seqs][num_heads][rows] of x's type.
struct Selection {
  Heads x, B, C, z;
  int64_t num_groups;
  const float *dt, *dt_bias, *A, *D;
  bool softplus;
};
void selective_state_update(const Selection& token, const States& states, void* result);

}  // namespace paged

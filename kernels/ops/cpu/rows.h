// Operations on single rows of tokens: norms, gated activations, rotary embedding, storing in the cache.
#pragma once

#include "vec.h"

namespace paged {

// The blocks of one layer: keys [num_blocks][num_kv_heads][block_size][key_dim], values likewise.
struct Cache {
  void* key;
  void* value;
  Type type;
  int64_t num_kv_heads, block_size, key_dim, value_dim;

  // Which row, of a key or value each, holds a token of a block. Those of consecutive offsets follow each other.
  int64_t row(int64_t block, int64_t head, int64_t offset) const {
    return (block * num_kv_heads + head) * block_size + offset;
  }
};

// [num_tokens][num_heads][dim] of any strides, counted in elements; the dims of a head are consecutive.
struct Heads {
  const void* data;
  Type type;
  int64_t token_stride, head_stride;

  const void* at(int64_t token, int64_t head) const {
    return static_cast<const char*>(data) + (token * token_stride + head * head_stride) * size_of(type);
  }
};

// result = weight * x / rms(x) (+ residual), all [num_rows][dim] of `type` but weight, float [dim].
void rms_norm(const void* x, Type type, int64_t num_rows, int64_t dim, const float* weight, float epsilon,
              const void* residual, void* result);

// result = activation(gate) * other, rows of `dim` elements that lie a stride apart.
void gated(const void* gate, int64_t gate_stride, const void* other, int64_t other_stride, Type type, int64_t num_rows,
           int64_t dim, bool gelu, void* result);

// The place of the first maximum of each row; -1 where it holds NaN, or nothing above -infinity. dim is at least W.
void first_argmax(const void* scores, Type type, int64_t num_rows, int64_t dim, int64_t* result);

// Writes each token's key and value to its slot; slot -1 is passed over. Key and value may differ in type.
void store_kv(Heads key, Heads value, const Cache& cache, const int64_t* slots, int64_t num_tokens);

// Heads of a token that are normed, each by itself, and rotated, in place.
struct Rotation {
  const void* cos;  // [num_tokens][dim] of the type of the heads, or null: no rotation
  const void* sin;
  int64_t dim;                // of which the first half is paired with the second; heads may have more dims
  const float* norm;          // [head_dim] or null
  float epsilon;
};
void rotate(void* heads, Type type, int64_t token_stride, int64_t num_tokens, int64_t num_heads, int64_t head_dim,
            const Rotation& rotation);

}  // namespace paged

// Products with weights of four to eight bits, in groups of inputs that share a scale.
#pragma once

#include <vector>

#include "product.h"

namespace paged {

// How a weight is stored: the types of GGUF files, by their names there. q4_0 and q4_1 are what int4 makes of a weight.
enum class Format : int64_t { q4_0, q4_1, q5_0, q5_1, q8_0, q4_k, q5_k, q6_k };

// Inputs whose weights lie together, and how many such stretches share a scale of scales in the formats named k.
constexpr int64_t kStretch = 32, kStretches = 8;

// A weight [num_columns][depth] in panels of 32 columns; quantised_weight.py says what a panel looks like.
struct QuantisedWeight {
  const uint8_t* data;
  Format format;
  int64_t num_columns;  // outputs; absent ones of the last panel have a scale of zero
  int64_t depth;        // inputs, a multiple of 32, of 256 in the formats named k
  const float* bias;    // [num_columns] or null

  int64_t num_panels() const { return (num_columns + kPanel - 1) / kPanel; }
};

// The bytes of a panel.
int64_t panel_bytes(Format format, int64_t depth);

// result[num_rows][columns] = x[num_rows][depth] times weights whose columns follow each other in the result; or, where
// `then` gates, activation(x times the first) * (x times the second), which have as many columns. x, residual and
// result are contiguous and of `type`, result may be residual.
void quantised_product(const void* x, Type type, int64_t num_rows, const std::vector<QuantisedWeight>& weights,
                       Then then, const void* residual, void* result);

// result[i] = the weights of column columns[i], all of them in float, [depth] each.
void widen_columns(const QuantisedWeight& weight, const int64_t* columns, int64_t num_columns, float* result);

}  // namespace paged

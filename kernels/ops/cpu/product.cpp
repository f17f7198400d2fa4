#include "product.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

namespace paged {
namespace {

// Bytes of rows that are multiplied by every panel in turn: half of a small second-level cache.
constexpr int64_t kRowsBytes = 256 * 1024;
// From how many rows on a single tile fetches its panel, and how many bytes ahead.
constexpr int64_t kFetchingRows = 6, kAhead = 8192;
// Multiplications worth a thread of their own.
constexpr int64_t kGrain = 1 << 16;

Tile tile_for(const Weight& weight, int64_t num_rows) {
#if defined(__AVX512BF16__)
  if (weight.pairs) {
    return weight.type == Type::i8 ? tile_of<Int8Pairs>(num_rows) : tile_of<Bf16Pairs>(num_rows);
  }
#endif
  if (weight.type == Type::i8) return tile_of<Plain<int8_t>>(num_rows);
  return with_type(weight.type, [&](auto number) { return tile_of<Plain<decltype(number)>>(num_rows); });
}

// Writes one row of a tile, from its sums over a panel.
template <class T>
void finish(float* sums, const Weight& weight, int64_t panel, Then then, const T* residual, T* result) {
  const bool gates = then == Then::silu_gate || then == Then::gelu_gate;
  const int64_t column = panel * kPanel;
  const int64_t columns = std::min<int64_t>(kPanel, weight.num_columns - column);
  for_vectors(columns, [&](int64_t i, auto load, auto store) {
    F x = load(sums + i);
    if (weight.scale) x *= load(weight.scale + column + i);
    if (weight.bias) x += load(weight.bias + column + i);
    if (then == Then::add) x += load(residual + column + i);
    gates ? store(sums + i, x) : store(result + column + i, x);
  });
  if (gates) {
    for_vectors(columns / 2, [&](int64_t i, auto load, auto store) {
      const F gate = load(sums + i);
      const F active = then == Then::silu_gate ? silu(gate) : gelu_tanh(gate);
      store(result + column / 2 + i, active * load(sums + columns / 2 + i));
    });
  }
}

}  // namespace

void product(const void* x, Type type, int64_t num_rows, const Weight& weight, Then then, const void* residual,
             void* result) {
  if (num_rows == 0) return;
  const int64_t depth = weight.depth;
  std::vector<float> widened;
  if (!weight.pairs && type != Type::f32) {
    widened.resize(num_rows * depth);
    with_type(type, [&](auto number) {
      const auto* from = static_cast<const decltype(number)*>(x);
      at::parallel_for(0, num_rows, kGrain / depth + 1, [&](int64_t begin, int64_t end) {
        for_vectors((end - begin) * depth, [&, at = begin * depth](int64_t i, auto load, auto store) {
          store(&widened[at] + i, load(from + at + i));
        });
      });
    });
    x = widened.data();
  }
  const int64_t row_bytes = depth * (weight.pairs ? 2 : 4);
  const int64_t steps = weight.pairs ? depth / 2 : depth;
  const int64_t num_panels = weight.num_panels();
  const int64_t panel_bytes = depth * kPanel * size_of(weight.type);
  const int64_t most_rows = std::max<int64_t>(kTileRows, kRowsBytes / row_bytes);
  const int64_t num_blocks = (num_rows + most_rows - 1) / most_rows;
  const bool gated = then == Then::silu_gate || then == Then::gelu_gate;
  const int64_t result_columns = gated ? weight.num_columns / 2 : weight.num_columns;

  auto run = [&](int64_t block, int64_t panel) {
    const int64_t first = num_rows * block / num_blocks;
    const int64_t count = num_rows * (block + 1) / num_blocks - first;
    const int64_t num_tiles = (count + kTileRows - 1) / kTileRows;
    const char* columns = static_cast<const char*>(weight.data) + panel * panel_bytes;
    // While the tiles of one panel are computed the next one comes in from memory; a single tile fetches what it needs
    // soon. Few rows wait for memory whatever they do, and are served best by the processor's own prefetching.
    const int64_t distance = num_tiles > 1 ? panel_bytes : kAhead;
    const bool fetches = block == 0 && count >= kFetchingRows;
    const int64_t ahead = fetches ? (panel_bytes / num_tiles + 63) / 64 * 64 : 0;
    for (int64_t t = 0; t < num_tiles; ++t) {
      const int64_t row = first + count * t / num_tiles;
      const int64_t rows = first + count * (t + 1) / num_tiles - row;
      alignas(64) float sums[kTileRows * kPanel];
      tile_for(weight, rows)(static_cast<const char*>(x) + row * row_bytes, depth, columns, steps, sums, kPanel, false,
                             columns + (fetches ? distance + t * ahead : 0),
                             t * ahead < panel_bytes ? ahead / steps : 0);
      with_type(type, [&](auto number) {
        using T = decltype(number);
        for (int64_t m = 0; m < rows; ++m) {
          const int64_t at = (row + m) * result_columns;
          finish(sums + m * kPanel, weight, panel, then, static_cast<const T*>(residual) + (residual ? at : 0),
                 static_cast<T*>(result) + at);
        }
      });
    }
  };
  const int64_t grain = std::max<int64_t>(1, kGrain / (depth * kPanel * std::min(num_rows, most_rows)));
  at::parallel_for(0, num_blocks * num_panels, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) run(i / num_panels, i % num_panels);
  });
}

}  // namespace paged

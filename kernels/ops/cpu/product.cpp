#include "product.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <memory>

namespace paged {
namespace {

// Bytes of rows that are multiplied by every panel in turn: half of a small second-level cache.
constexpr int64_t kRowsBytes = 256 * 1024;
// From how many rows on a tile of pairs fetches its panel, and how many bytes ahead a single tile does.
constexpr int64_t kFetchingRows = 6, kAhead = 8192;
// Rows that are worth a panel of their own, and at most how many share its sums' buffer.
constexpr int64_t kLeastRows = 64, kMostRows = 256;
// Steps of a panel of plain numbers that are multiplied by every tile in turn: as floats a half of a first-level cache.
constexpr int64_t kSteps = 128;
// Multiplications worth a thread of their own.
constexpr int64_t kGrain = 1 << 16;
// How often a thread comes by for more of a product.
constexpr int64_t kTurns = 8;

// The tile for some rows, which fetches ahead by a stride. Wide says that the panel has been made floats.
template <bool Far>
Tile tile_for(const Weight& weight, bool wide, int64_t num_rows) {
#if defined(__AVX512BF16__)
  if (weight.pairs) {
    return weight.type == Type::i8 ? tile_of<Int8Pairs, Far>(num_rows) : tile_of<Bf16Pairs, Far>(num_rows);
  }
#endif
  if (wide) return tile_of<Plain<float>, Far>(num_rows);
  if (weight.type == Type::i8) return tile_of<Plain<int8_t>, Far>(num_rows);
  return with_type(weight.type, [&](auto number) { return tile_of<Plain<decltype(number)>, Far>(num_rows); });
}

// Numbers of a panel as floats.
void widen(const char* from, Type type, int64_t count, float* to) {
  auto all = [&](const auto* numbers) {
    for (int64_t i = 0; i < count; i += W) store(to + i, load(numbers + i));
  };
  if (type == Type::i8) return all(reinterpret_cast<const int8_t*>(from));
  with_type(type, [&](auto number) { all(reinterpret_cast<const decltype(number)*>(from)); });
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
  std::unique_ptr<float[]> widened;
  if (!weight.pairs && type != Type::f32) {
    widened.reset(new float[num_rows * depth]);
    with_type(type, [&](auto number) {
      const auto* from = static_cast<const decltype(number)*>(x);
      at::parallel_for(0, num_rows, kGrain / depth + 1, [&](int64_t begin, int64_t end) {
        for_vectors((end - begin) * depth, [&, at = begin * depth](int64_t i, auto load, auto store) {
          store(&widened[at] + i, load(from + at + i));
        });
      });
    });
    x = widened.get();
  }
  const int64_t row_bytes = depth * (weight.pairs ? 2 : 4);
  const int64_t steps = weight.pairs ? depth / 2 : depth;
  const int64_t num_panels = weight.num_panels();
  const int64_t panel_bytes = depth * kPanel * size_of(weight.type);
  const int64_t most_rows = std::clamp<int64_t>(kRowsBytes / row_bytes, kLeastRows, kMostRows);
  const int64_t num_blocks = (num_rows + most_rows - 1) / most_rows;
  const bool gated = then == Then::silu_gate || then == Then::gelu_gate;
  const int64_t result_columns = gated ? weight.num_columns / 2 : weight.num_columns;

  auto run = [&](int64_t block, int64_t panel) {
    const int64_t first = num_rows * block / num_blocks;
    const int64_t count = num_rows * (block + 1) / num_blocks - first;
    const int64_t num_tiles = (count + kTileRows - 1) / kTileRows;
    const bool widens = !weight.pairs && weight.type != Type::f32 && num_tiles > 1;
    const int64_t most_steps = weight.pairs ? steps : kSteps;
    alignas(64) float sums[kMostRows * kPanel], wide[kSteps * kPanel];
    for (int64_t from = 0; from < steps; from += most_steps) {
      const int64_t some = std::min(most_steps, steps - from), bytes = panel_bytes / steps * some;
      const char* columns = static_cast<const char*>(weight.data) + panel * panel_bytes + panel_bytes / steps * from;
      if (widens) widen(columns, weight.type, some * kPanel, wide);
      // While the tiles of one panel are computed the next one comes in from memory; a single tile fetches what it
      // needs soon. Few rows of pairs are served best by the processor's own prefetching; where numbers are widened, its
      // window of instructions holds too little of a panel to keep memory busy.
      const bool fetches = block == 0 && (!weight.pairs || count >= kFetchingRows);
      const int64_t ahead = fetches ? (bytes / num_tiles + 63) / 64 * 64 : 0;
      for (int64_t t = 0; t < num_tiles; ++t) {
        const int64_t row = count * t / num_tiles, rows = count * (t + 1) / num_tiles - row;
        const int64_t times = some * passes_of(rows), stride = t * ahead < bytes ? (ahead + times - 1) / times : 0;
        const Tile tile = stride < 64 ? tile_for<false>(weight, widens, rows) : tile_for<true>(weight, widens, rows);
        tile(static_cast<const char*>(x) + (first + row) * row_bytes + row_bytes / steps * from, depth,
             widens ? static_cast<const void*>(wide) : columns, some, sums + row * kPanel, kPanel, from > 0,
             fetches ? columns + (num_tiles > 1 ? panel_bytes : kAhead) + t * ahead : columns, stride);
        if (from + some < steps) continue;
        with_type(type, [&](auto number) {
          using T = decltype(number);
          for (int64_t m = row; m < row + rows; ++m) {
            const int64_t at = (first + m) * result_columns;
            finish(sums + m * kPanel, weight, panel, then, static_cast<const T*>(residual) + (residual ? at : 0),
                   static_cast<T*>(result) + at);
          }
        });
      }
    }
  };
  const int64_t grain = std::max<int64_t>(1, kGrain / (depth * kPanel * std::min(num_rows, most_rows)));
  // Threads take what is next as they come by: one whose core is busy with something else gets less of it.
  const int64_t all = num_blocks * num_panels, shares = std::min<int64_t>(at::get_num_threads(), all / grain);
  const int64_t some = shares > 1 ? std::max(grain, all / (kTurns * shares)) : all;
  std::atomic<int64_t> next = 0;
  at::parallel_for(0, std::max<int64_t>(1, shares), 1, [&](int64_t, int64_t) {
    for (int64_t begin; (begin = next.fetch_add(some)) < all;) {
      for (int64_t i = begin; i < std::min(begin + some, all); ++i) run(i / num_panels, i % num_panels);
    }
  });
}

}  // namespace paged

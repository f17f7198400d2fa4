// Products with packed weights: tiles of a few rows by some of a panel's columns, whose sums stay in registers.
#pragma once

#include "vec.h"

namespace paged {

// Columns of a panel. A packed matrix is [panels][steps][32] words of 4 bytes where rows are multiplied as pairs of
// bfloat16 (the word is two consecutive ones of a column), and [panels][steps][32] numbers otherwise; absent columns of
// the last panel are zero.
constexpr int kPanel = 32;
constexpr int kVectors = kPanel / W;
// Rows of a tile: as many as leave registers for two vectors of a panel and a broadcast.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTileRows = 12;
#else
constexpr int kTileRows = 6;
#endif

// Vectors of columns whose sums a tile keeps at a time: a whole panel's for few rows, two for the most.
constexpr int vectors_of(int rows) {
  int vectors = kVectors;
  while (vectors * rows > 2 * kTileRows) vectors /= 2;
  return vectors;
}
// How often a tile goes through the steps of its panel.
constexpr int passes_of(int rows) { return kVectors / vectors_of(rows); }

// How panels of stored numbers S are multiplied by rows of A, `kStep` elements of a row at a time.
template <class S>
struct Plain {
  using Row = float;
  using Stored = S;
  static constexpr int kStep = 1;
  static PAGED_INLINE F panel(const S* p) { return load(p); }
  static PAGED_INLINE F multiply(F sums, F panel, const float* row) { return sums + panel * *row; }
};

#if defined(__AVX512BF16__)
struct Pairs {
  using Row = bf16;
  static constexpr int kStep = 2;
  static PAGED_INLINE F multiply(F sums, U panel, const bf16* row) {
    uint32_t pair;
    std::memcpy(&pair, row, 4);
    return dot_pairs(sums, panel, pair - U{});
  }
};
struct Bf16Pairs : Pairs {
  using Stored = bf16;
  static PAGED_INLINE U panel(const bf16* p) { return read<U>(p); }
};
struct Int8Pairs : Pairs {
  using Stored = int8_t;
  static PAGED_INLINE U panel(const int8_t* p) {
    return (U)(__m512i)_mm512_cvtne2ps_pbh((__m512)load(p + W), (__m512)load(p));
  }
};
#endif

// sums[m][0 to 32] (+)= rows[m] times one panel. Every step of each pass fetches `ahead` towards the cache and moves it
// on by a stride; Far says that this is a whole line or two, which the second-level cache takes, since it can wait for
// more of them at a time. To ask this in the loop took a tenth of the time.
template <class K, bool Far, int M>
void tile(const void* rows, int64_t row_stride, const void* panel, int64_t steps, float* sums, int64_t sums_stride,
          bool accumulate, const char* ahead, int64_t ahead_stride) {
  constexpr int V = vectors_of(M);
  for (int column = 0; column < kPanel; column += V * W) {
    const auto* a = static_cast<const typename K::Row*>(rows);
    const auto* b = static_cast<const typename K::Stored*>(panel) + column * K::kStep;
    float* to = sums + column;
    F acc[M][V];
    PAGED_UNROLL for (int m = 0; m < M; ++m) {
      PAGED_UNROLL for (int v = 0; v < V; ++v) acc[m][v] = accumulate ? load(to + m * sums_stride + v * W) : F{};
    }
    for (int64_t s = 0; s < steps; ++s) {
      decltype(K::panel(b)) columns[V];
      PAGED_UNROLL for (int v = 0; v < V; ++v) columns[v] = K::panel(b + v * W * K::kStep);
      PAGED_UNROLL for (int m = 0; m < M; ++m) {
        const auto* row = a + m * row_stride;
        PAGED_UNROLL for (int v = 0; v < V; ++v) acc[m][v] = K::multiply(acc[m][v], columns[v], row);
      }
      __builtin_prefetch(ahead, 0, Far ? 2 : 3);
      if (Far) __builtin_prefetch(ahead + ahead_stride / 2, 0, 2);
      ahead += ahead_stride;
      a += K::kStep;
      b += kPanel * K::kStep;
    }
    PAGED_UNROLL for (int m = 0; m < M; ++m) {
      PAGED_UNROLL for (int v = 0; v < V; ++v) store(to + m * sums_stride + v * W, acc[m][v]);
    }
  }
}

using Tile = void (*)(const void*, int64_t, const void*, int64_t, float*, int64_t, bool, const char*, int64_t);

template <class K, bool Far, int... M>
inline Tile tile_of(int64_t num_rows, std::integer_sequence<int, M...>) {
  static constexpr Tile tiles[] = {tile<K, Far, M + 1>...};
  return tiles[num_rows - 1];
}

// The tile for 1 to kTileRows rows.
template <class K, bool Far = false>
inline Tile tile_of(int64_t num_rows) {
  return tile_of<K, Far>(num_rows, std::make_integer_sequence<int, kTileRows>{});
}

// A packed weight.
struct Weight {
  const void* data;
  Type type;
  bool pairs;
  int64_t num_columns;  // outputs, of which the last panel may be padded
  int64_t depth;        // inputs
  const float* scale;   // [num_columns] or null, of int8
  const float* bias;    // [num_columns] or null

  int64_t num_panels() const { return (num_columns + kPanel - 1) / kPanel; }
};

// What becomes of a product: it is the result; it is added to `residual`; or every panel holds 16 columns of a gate
// and the 16 they gate, and the result is activation(gate) * other, of half as many columns.
enum class Then { keep, add, silu_gate, gelu_gate };

// result[num_rows][columns] = x[num_rows][depth] times the weight. x, residual and result are contiguous and of `type`,
// result may be residual.
void product(const void* x, Type type, int64_t num_rows, const Weight& weight, Then then, const void* residual,
             void* result);

}  // namespace paged

#include "quantised_product.h"

#include <ATen/Parallel.h>

#include <algorithm>

namespace paged {
namespace {

// Multiplications worth a thread of their own.
constexpr int64_t kGrain = 1 << 16;

// Where a panel keeps what. Its inputs come in stretches of 32, each of which holds, of all columns in turn:
//   words of 4 bytes, one for 8 inputs: the low four bits of four of them, and in the upper halves of the bytes of the
//   four that follow; or, of eight bits, one for 4 inputs;
//   words of further bits, one for 32 inputs, Bits - 4 of them: bits of the input's place among 4 by byte, of its four
//   by place in the byte;
//   scales, and minima, float16; or, where eight stretches share those, which lie before them, their multiples, int8.
template <int B, int Z, bool M, bool S, int G>
struct Layout {
  static constexpr int kBits = B, kZero = Z, kGroup = G, kGroups = kStretch / G;
  static constexpr bool kMinimum = M, kShared = S;
  static constexpr int kWords = B == 8 ? 8 : 4, kHighWords = B == 8 ? 0 : B - 4;
  static constexpr int kColumnScales = (M ? 2 : 1) * kGroups;
  static constexpr int64_t kScalesAt = 4 * kPanel * (kWords + kHighWords);
  static constexpr int64_t kStretchBytes = kScalesAt + kPanel * kColumnScales * (S ? 1 : 2);
  static constexpr int64_t kHeadBytes = S ? 2 * kPanel * (M ? 2 : 1) : 0;

  static constexpr int64_t bytes(int64_t depth) {
    return depth / kStretch * kStretchBytes + depth / (kStretch * kStretches) * kHeadBytes;
  }
  static const uint8_t* head(const uint8_t* panel, int64_t stretch) {
    return panel + stretch / kStretches * (kHeadBytes + kStretches * kStretchBytes);
  }
  static const uint8_t* at(const uint8_t* panel, int64_t stretch) {
    if (!S) return panel + stretch * kStretchBytes;
    return head(panel, stretch) + kHeadBytes + stretch % kStretches * kStretchBytes;
  }

  // The i-th scales of columns from `column` on, or their minima.
  static PAGED_INLINE F scale(const uint8_t* head, const uint8_t* stretch, int64_t column, int i) {
    const int64_t at = i * kPanel + column;
    if constexpr (S) {
      return load(reinterpret_cast<const f16*>(head) + column) *
             load(reinterpret_cast<const int8_t*>(stretch + kScalesAt) + at);
    } else {
      return load(reinterpret_cast<const f16*>(stretch + kScalesAt) + at);
    }
  }
  static PAGED_INLINE F minimum(const uint8_t* head, const uint8_t* stretch, int64_t column) {
    if constexpr (S) {
      return -load(reinterpret_cast<const f16*>(head) + kPanel + column) *
             load(reinterpret_cast<const int8_t*>(stretch + kScalesAt) + kPanel + column);
    } else {
      return scale(head, stretch, column, 1);
    }
  }

  // The weights of columns from `column` on for the four inputs of one place in a stretch, a byte each, without sign.
  static PAGED_INLINE U four(const uint8_t* stretch, int64_t column, int place) {
    const auto* words = reinterpret_cast<const uint32_t*>(stretch) + column;
    if constexpr (B == 8) {
      return read<U>(words + place * kPanel);
    } else {
      U low = read<U>(words + place / 2 * kPanel);
      if (place % 2) low >>= 4;
      low &= 0x0f0f0f0f;
      if constexpr (B > 4) {
        constexpr int kPlaces = 8 / (B - 4);
        const U high = read<U>(words + (kWords + place / kPlaces) * kPanel) >> (place % kPlaces * (B - 4));
        low |= (high & (B == 5 ? 0x01010101u : 0x03030303u)) << 4;
      }
      return low;
    }
  }
};

template <class Function>
auto with_layout(Format format, Function&& function) {
  switch (format) {
    case Format::q4_0: return function(Layout<4, 8, false, false, 32>{});
    case Format::q4_1: return function(Layout<4, 0, true, false, 32>{});
    case Format::q5_0: return function(Layout<5, 16, false, false, 32>{});
    case Format::q5_1: return function(Layout<5, 0, true, false, 32>{});
    case Format::q4_k: return function(Layout<4, 0, true, true, 32>{});
    case Format::q5_k: return function(Layout<5, 0, true, true, 32>{});
    case Format::q6_k: return function(Layout<6, 32, false, true, 16>{});
    default: return function(Layout<8, 128, false, false, 32>{});
  }
}

// A stretch of a row as whole numbers times a power of two, each number digits of eight bits with sign, the highest
// first. Three hold as much as a float next to the largest of the stretch, two more than a half precision does.
struct alignas(64) Digits {
  int8_t digits[3][kStretch];
  int32_t sums[3][2];  // of the digits of each half
  float scale;
  float sum;           // of the stretch
};

// 2 to the n, between -126 and 127.
float power_of_two(int n) {
  const uint32_t bits = static_cast<uint32_t>(n + 127) << 23;
  float power;
  std::memcpy(&power, &bits, 4);
  return power;
}

template <int N, class T>
void split(const T* row, int64_t depth, Digits* result) {
  const F magic = splat(12582912.f);  // added to it, a small float is rounded to an integer in its lowest bits
  for (int64_t s = 0; s < depth / kStretch; ++s, row += kStretch) {
    Digits& to = result[s];
    F most{}, bad{};
    for (int64_t i = 0; i < kStretch; i += W) {
      const F x = load(row + i);
      most = maximum(most, maximum(x, -x));
      bad += x - x;
    }
    const float top = largest(most);
    uint32_t float_bits;
    std::memcpy(&float_bits, &top, 4);
    // Smaller than the power of two with this exponent. Below any product that counts it is zero, so that the other
    // powers are finite.
    const int exponent = static_cast<int>(float_bits >> 23) - 126, bits = 8 * N - 2;
    const bool none = !(top > 1e-30f);
    const float up = none ? 0.f : power_of_two(bits - exponent);
    int32_t numbers[kStretch];
    for (int64_t i = 0; i < kStretch; i += W) {
      write(numbers + i, (I)(load(row + i) * up + magic) - (I)magic);
    }
    int32_t total = 0;
    for (int64_t i = 0; i < kStretch; ++i) total += numbers[i];
    for (int n = N - 1; n >= 0; --n) {
      for (int64_t i = 0; i < kStretch; ++i) {
        const auto digit = static_cast<int8_t>(numbers[i]);
        to.digits[n][i] = digit;
        numbers[i] = (numbers[i] - digit) >> 8;
      }
      for (int half = 0; half < 2; ++half) {
        int32_t digits = 0;
        for (int i = 0; i < 16; ++i) digits += to.digits[n][16 * half + i];
        to.sums[n][half] = digits;
      }
    }
    // A row that holds infinity or NaN has NaN for a result.
    to.scale = (none ? 0.f : power_of_two(exponent - bits)) + sum(bad);
    to.sum = to.scale * total;
  }
}

#if defined(__AVX2__)
#define PAGED_DIGITS 1

#if defined(__AVX512BW__)
typedef __m512i Bytes;
#define PAGED_BYTES(operation) _mm512_##operation
#else
typedef __m256i Bytes;
#define PAGED_BYTES(operation) _mm256_##operation
#endif

// Sums of products of bytes without sign and with, four to a lane, in 16 bits: pairs of products fit, and as many pairs
// as leave 128 * 2^Bits * 2 * pairs below 2^15.
template <int Bits>
struct Sixteen {
  static constexpr bool kByHalves = Bits == 8;  // whose pairs do not fit
  static constexpr int kFlush = kByHalves || Bits == 4 ? 8 : Bits == 5 ? 4 : 2;
  Bytes sums{};
  I whole{};

  PAGED_INLINE void add(U weights, U digits) {
    sums = PAGED_BYTES(add_epi16)(sums, PAGED_BYTES(maddubs_epi16)((Bytes)weights, (Bytes)digits));
  }
  PAGED_INLINE void flush() {
    whole += (I)PAGED_BYTES(madd_epi16)(sums, PAGED_BYTES(set1_epi16)(1));
    sums = Bytes{};
  }
};

#if defined(__AVX512BW__)
// The same in 32 bits by one instruction (VNNI). It is named here, since the compiler may use it only where all
// processors of the level have it.
template <int Bits>
struct ThirtyTwo {
  static constexpr bool kByHalves = false;
  static constexpr int kFlush = 8;
  I whole{};

  PAGED_INLINE void add(U weights, U digits) {
    asm("vpdpbusd %2, %1, %0" : "+v"(whole) : "v"(weights), "v"(digits));
  }
  PAGED_INLINE void flush() {}
};
#endif

// sums[m][0 to 32] = rows[m], N digits a number, times one panel.
template <class L, template <int> class Dot, int N, int M>
void multiply_digits(const uint8_t* panel, int64_t depth, const Digits* rows, int64_t row_stride, float* sums) {
  using D = Dot<L::kBits>;
  constexpr int kFours = L::kGroup / 4;
  F results[kVectors][M] = {};
  for (int64_t s = 0; s < depth / kStretch; ++s) {
    const uint8_t *stretch = L::at(panel, s), *head = L::head(panel, s);
    const Digits* row = rows + s;
    for (int v = 0; v < kVectors; ++v) {
      PAGED_UNROLL for (int g = 0; g < L::kGroups; ++g) {
        D dots[M][N], highs[M][N];
        PAGED_UNROLL for (int i = 0; i < kFours; ++i) {
          const int place = g * kFours + i;
          const U weights = L::four(stretch, v * W, place);
          PAGED_UNROLL for (int m = 0; m < M; ++m) {
            PAGED_UNROLL for (int n = 0; n < N; ++n) {
              uint32_t word;
              std::memcpy(&word, row[m * row_stride].digits[n] + 4 * place, 4);
              const U digits = word - U{};
              if constexpr (D::kByHalves) {
                dots[m][n].add(weights & 0x0f0f0f0f, digits);
                highs[m][n].add(weights >> 4 & 0x0f0f0f0f, digits);
              } else {
                dots[m][n].add(weights, digits);
              }
              if ((i + 1) % D::kFlush == 0 || i + 1 == kFours) dots[m][n].flush(), highs[m][n].flush();
            }
          }
        }
        const F scale = L::scale(head, stretch, v * W, g);
        PAGED_UNROLL for (int m = 0; m < M; ++m) {
          const Digits& of = row[m * row_stride];
          I whole[N];
          PAGED_UNROLL for (int n = 0; n < N; ++n) {
            whole[n] = dots[m][n].whole;
            if constexpr (D::kByHalves) whole[n] += highs[m][n].whole << 4;
            if constexpr (L::kZero != 0) {
              whole[n] -= L::kZero * (L::kGroups == 1 ? of.sums[n][0] + of.sums[n][1] : of.sums[n][g]);
            }
          }
          F dot = __builtin_convertvector((whole[N - 2] << 8) + whole[N - 1], F);
          if constexpr (N == 3) dot += __builtin_convertvector(whole[0], F) * 65536.f;
          results[v][m] += scale * of.scale * dot;
        }
      }
      if constexpr (L::kMinimum) {
        const F minimum = L::minimum(head, stretch, v * W);
        PAGED_UNROLL for (int m = 0; m < M; ++m) results[v][m] += minimum * row[m * row_stride].sum;
      }
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int v = 0; v < kVectors; ++v) store(sums + m * kPanel + v * W, results[v][m]);
  }
}
#endif

// result[i][0 to 32] = the weights of the panel's columns for `count` stretches of inputs from `first` on.
template <class L>
void widen(const uint8_t* panel, int64_t first, int64_t count, float* result) {
  for (int64_t s = first; s < first + count; ++s, result += kStretch * kPanel) {
    const uint8_t *stretch = L::at(panel, s), *head = L::head(panel, s);
    for (int v = 0; v < kVectors; ++v) {
      F minimum{};
      if constexpr (L::kMinimum) minimum = L::minimum(head, stretch, v * W);
      PAGED_UNROLL for (int g = 0; g < L::kGroups; ++g) {
        const F scale = L::scale(head, stretch, v * W, g);
        PAGED_UNROLL for (int i = 0; i < L::kGroup / 4; ++i) {
          const int place = g * (L::kGroup / 4) + i;
          const U weights = L::four(stretch, v * W, place);
          PAGED_UNROLL for (int b = 0; b < 4; ++b) {
            const I level = (I)(weights >> (8 * b) & 0xff) - L::kZero;
            F weight = scale * __builtin_convertvector(level, F);
            if constexpr (L::kMinimum) weight += minimum;
            store(result + (4 * place + b) * kPanel + v * W, weight);
          }
        }
      }
    }
  }
}

// Rows that are multiplied at a time by widened weights: as many as leave registers for a panel and a broadcast.
constexpr int kWideRows = W == 16 ? 12 : 2;

// sums[m][0 to 32] (+)= rows[m] times `depth` widened weights of a panel.
template <int M>
void multiply_wide(const float* rows, int64_t row_stride, const float* weights, int64_t depth, bool accumulate,
                   float* sums) {
  F acc[M][kVectors];
  PAGED_UNROLL for (int m = 0; m < M; ++m) {
    PAGED_UNROLL for (int v = 0; v < kVectors; ++v) acc[m][v] = accumulate ? load(sums + m * kPanel + v * W) : F{};
  }
  for (int64_t i = 0; i < depth; ++i, weights += kPanel) {
    F columns[kVectors];
    PAGED_UNROLL for (int v = 0; v < kVectors; ++v) columns[v] = load(weights + v * W);
    PAGED_UNROLL for (int m = 0; m < M; ++m) {
      PAGED_UNROLL for (int v = 0; v < kVectors; ++v) acc[m][v] += columns[v] * rows[m * row_stride + i];
    }
  }
  PAGED_UNROLL for (int m = 0; m < M; ++m) {
    PAGED_UNROLL for (int v = 0; v < kVectors; ++v) store(sums + m * kPanel + v * W, acc[m][v]);
  }
}

using MultiplyWide = void (*)(const float*, int64_t, const float*, int64_t, bool, float*);

template <int... M>
MultiplyWide multiply_wide_for(int64_t num_rows, std::integer_sequence<int, M...>) {
  static constexpr MultiplyWide functions[] = {multiply_wide<M + 1>...};
  return functions[num_rows - 1];
}

// The rows of a product, as the way in which it is computed wants them.
struct Rows {
  int64_t count, depth;
  int num_digits = 0;            // 0: wide
  std::vector<Digits> digits;    // [count][depth / 32]
  std::vector<float> widened;
  const float* wide = nullptr;   // [count][depth]

  Rows(const void* x, Type type, int64_t count, int64_t depth);
  template <class L>
  void multiply(const uint8_t* panel, float* sums, float* buffer) const;
};

#if defined(PAGED_DIGITS)
// From how many rows on it pays to widen weights.
constexpr int64_t kMostByDigits = 4;
#if defined(__AVX512BW__)
const bool has_vnni = __builtin_cpu_supports("avx512vnni");
#endif
#endif

Rows::Rows(const void* x, Type type, int64_t count, int64_t depth) : count(count), depth(depth) {
  const int64_t grain = kGrain / depth + 1;
#if defined(PAGED_DIGITS)
  if (count <= kMostByDigits) {
    num_digits = type == Type::f32 ? 3 : 2;
    digits.resize(count * depth / kStretch);
    with_type(type, [&](auto number) {
      const auto* rows = static_cast<const decltype(number)*>(x);
      if constexpr (std::is_same_v<decltype(number), float>) split<3>(rows, count * depth, digits.data());
      else split<2>(rows, count * depth, digits.data());
    });
    return;
  }
#endif
  wide = static_cast<const float*>(x);
  if (type == Type::f32) return;
  widened.resize(count * depth);
  wide = widened.data();
  with_type(type, [&](auto number) {
    const auto* from = static_cast<const decltype(number)*>(x);
    at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin * depth; i < end * depth; i += W) store(&widened[i], load(from + i));
    });
  });
}

// sums[count][32] = the rows times one panel. buffer: [kStretches * 32][32].
template <class L>
void Rows::multiply(const uint8_t* panel, float* sums, float* buffer) const {
  const int64_t num_stretches = depth / kStretch;
#if defined(PAGED_DIGITS)
  if (num_digits) {
    auto by = [&](auto* one, auto* two) {
      for (int64_t m = 0; m < count; m += 2) {
        (m + 1 < count ? two : one)(panel, depth, &digits[m * num_stretches], num_stretches, sums + m * kPanel);
      }
    };
#if defined(__AVX512BW__)
    if (has_vnni) {
      if (num_digits == 3) return by(multiply_digits<L, ThirtyTwo, 3, 1>, multiply_digits<L, ThirtyTwo, 3, 2>);
      return by(multiply_digits<L, ThirtyTwo, 2, 1>, multiply_digits<L, ThirtyTwo, 2, 2>);
    }
#endif
    if (num_digits == 3) return by(multiply_digits<L, Sixteen, 3, 1>, multiply_digits<L, Sixteen, 3, 2>);
    return by(multiply_digits<L, Sixteen, 2, 1>, multiply_digits<L, Sixteen, 2, 2>);
  }
#endif
  for (int64_t s = 0; s < num_stretches; s += kStretches) {
    const int64_t length = std::min(kStretches, num_stretches - s);
    widen<L>(panel, s, length, buffer);
    for (int64_t m = 0; m < count; m += kWideRows) {
      const int64_t some = std::min<int64_t>(kWideRows, count - m);
      multiply_wide_for(some, std::make_integer_sequence<int, kWideRows>{})(
          wide + m * depth + s * kStretch, depth, buffer, length * kStretch, s > 0, sums + m * kPanel);
    }
  }
}

// Writes one row from its sums over a panel, or over two of them where one gates the other.
template <class T>
void finish(float* sums, float* others, const QuantisedWeight& weight, const QuantisedWeight& other, int64_t panel,
            Then then, const T* residual, T* result) {
  const int64_t column = panel * kPanel;
  for_vectors(std::min<int64_t>(kPanel, weight.num_columns - column), [&](int64_t i, auto load, auto store) {
    F x = load(sums + i);
    if (weight.bias) x += load(weight.bias + column + i);
    if (then == Then::silu_gate || then == Then::gelu_gate) {
      F y = load(others + i);
      if (other.bias) y += load(other.bias + column + i);
      x = (then == Then::silu_gate ? silu(x) : gelu_tanh(x)) * y;
    }
    if (then == Then::add) x += load(residual + column + i);
    store(result + column + i, x);
  });
}

}  // namespace

int64_t panel_bytes(Format format, int64_t depth) {
  return with_layout(format, [&](auto layout) { return decltype(layout)::bytes(depth); });
}

void quantised_product(const void* x, Type type, int64_t num_rows, const std::vector<QuantisedWeight>& weights,
                       Then then, const void* residual, void* result) {
  if (num_rows == 0) return;
  const bool gates = then == Then::silu_gate || then == Then::gelu_gate;
  const int64_t depth = weights[0].depth;
  const Rows rows(x, type, num_rows, depth);
  // Which panels there are, in the order of the result's columns, and where those of a weight begin.
  struct Place { int64_t weight, panel, column; };
  std::vector<Place> places;
  int64_t num_columns = 0;
  for (size_t w = 0; w < (gates ? 1 : weights.size()); ++w) {
    for (int64_t p = 0; p < weights[w].num_panels(); ++p) places.push_back({static_cast<int64_t>(w), p, num_columns});
    num_columns += weights[w].num_columns;
  }
  const int64_t grain = std::max<int64_t>(1, kGrain / (depth * kPanel * num_rows));
  at::parallel_for(0, places.size(), grain, [&](int64_t begin, int64_t end) {
    std::vector<float> memory(((gates ? 2 : 1) * num_rows + (rows.num_digits ? 0 : kStretches * kStretch)) * kPanel);
    float *sums = memory.data(), *others = sums + (gates ? num_rows * kPanel : 0), *buffer = others + num_rows * kPanel;
    for (int64_t i = begin; i < end; ++i) {
      const auto [w, panel, column] = places[i];
      auto multiply = [&, panel = panel](const QuantisedWeight& weight, float* to) {
        with_layout(weight.format, [&](auto layout) {
          using L = decltype(layout);
          rows.multiply<L>(weight.data + panel * L::bytes(depth), to, buffer);
        });
      };
      multiply(weights[w], sums);
      if (gates) multiply(weights[1], others);
      with_type(type, [&, w = w, panel = panel, column = column](auto number) {
        using T = decltype(number);
        for (int64_t m = 0; m < num_rows; ++m) {
          const int64_t at = m * num_columns + column;
          finish(sums + m * kPanel, others + m * kPanel, weights[w], weights[gates ? 1 : w], panel, then,
                 static_cast<const T*>(residual) + (residual ? at : 0), static_cast<T*>(result) + at);
        }
      });
    }
  });
}

void widen_columns(const QuantisedWeight& weight, const int64_t* columns, int64_t num_columns, float* result) {
  with_layout(weight.format, [&](auto layout) {
    using L = decltype(layout);
    at::parallel_for(0, num_columns, kGrain / (weight.depth * kPanel) + 1, [&](int64_t begin, int64_t end) {
      float buffer[kStretch * kPanel];
      for (int64_t i = begin; i < end; ++i) {
        const uint8_t* panel = weight.data + columns[i] / kPanel * L::bytes(weight.depth);
        for (int64_t s = 0; s < weight.depth / kStretch; ++s) {
          widen<L>(panel, s, 1, buffer);
          for (int64_t k = 0; k < kStretch; ++k) {
            result[i * weight.depth + s * kStretch + k] = buffer[k * kPanel + columns[i] % kPanel];
          }
        }
      }
    });
  });
}

}  // namespace paged

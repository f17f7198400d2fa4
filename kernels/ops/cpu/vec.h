// Vectors of floats as wide as the target's registers, in the vector extensions that GCC and Clang share.
#pragma once

#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace paged {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float F __attribute__((vector_size(4 * W)));
typedef int32_t I __attribute__((vector_size(4 * W)));
typedef uint32_t U __attribute__((vector_size(4 * W)));
typedef uint16_t H __attribute__((vector_size(2 * W)));
typedef int8_t B __attribute__((vector_size(W)));

// The bits of a number in one of torch's half precisions.
struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

enum class Type { f32, bf16, f16, i8 };

#define PAGED_INLINE inline __attribute__((always_inline))
// For loops over arrays that are to stay in registers, which they do only once their indices are constants.
#define PAGED_UNROLL _Pragma("GCC unroll 16")

// Calls a generic lambda with a number of the type that a tensor of activations or a cache holds.
template <class Function>
PAGED_INLINE auto with_type(Type type, Function&& function) {
  switch (type) {
    case Type::bf16:
      return function(bf16{});
    case Type::f16:
      return function(f16{});
    default:
      return function(float{});
  }
}

constexpr int64_t size_of(Type type) { return type == Type::f32 ? 4 : type == Type::i8 ? 1 : 2; }
constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

PAGED_INLINE F splat(float x) { return x - F{}; }
PAGED_INLINE F maximum(F a, F b) { return a > b ? a : b; }

template <class V>
PAGED_INLINE V read(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <class V>
PAGED_INLINE void write(void* to, V v) {
  std::memcpy(to, &v, sizeof v);
}

// W numbers from memory, as floats.

PAGED_INLINE F load(const float* p) { return read<F>(p); }
PAGED_INLINE F load(const bf16* p) { return (F)(__builtin_convertvector(read<H>(p), U) << 16); }
PAGED_INLINE F load(const f16* p) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(read<__m256i>(p));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(read<__m128i>(p));
#else
  F x;
  for (int i = 0; i < W; ++i) x[i] = c10::detail::fp16_ieee_to_fp32_value(p[i].bits);
  return x;
#endif
}
PAGED_INLINE F load(const int8_t* p) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(read<__m128i>(p)));
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadu_si64(p)));
#else
  return __builtin_convertvector(__builtin_convertvector(read<B>(p), I), F);
#endif
}

// W floats to memory, rounded to the nearest, ties to even; NaN stays NaN.

PAGED_INLINE void store(float* p, F x) { write(p, x); }
PAGED_INLINE void store(bf16* p, F x) {
#if defined(__AVX512BF16__)
  write(p, _mm512_cvtneps_pbh(x));
#else
  const U bits = (U)x;
  const U rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const U quiet = (bits >> 16) | 0x40;
  write(p, __builtin_convertvector(x == x ? rounded : quiet, H));
#endif
}
PAGED_INLINE void store(f16* p, F x) {
#if defined(__AVX512F__)
  write(p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
  write(p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  for (int i = 0; i < W; ++i) p[i].bits = c10::detail::fp16_ieee_from_fp32_value(x[i]);
#endif
}

// W floats to memory past the caches, where their place is aligned to all of them; finish_streams() comes before others
// read them.
PAGED_INLINE void stream(float* p, F x) {
#if defined(__AVX512F__)
  _mm512_stream_ps(p, x);
#elif defined(__AVX2__)
  _mm256_stream_ps(p, x);
#else
  store(p, x);
#endif
}
PAGED_INLINE void finish_streams() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// The first n < W numbers only; the others are zero.
template <class T>
PAGED_INLINE F load_some(const T* p, int64_t n) {
  T some[W] = {};
  std::memcpy(some, p, n * sizeof(T));
  return load(some);
}

template <class T>
PAGED_INLINE void store_some(T* p, F x, int64_t n) {
  T some[W];
  store(some, x);
  std::memcpy(p, some, n * sizeof(T));
}

// Calls function(i, load, store) for every W of n numbers, the last time with those that know of the rest.
template <class Function>
PAGED_INLINE void for_vectors(int64_t n, Function&& function) {
  int64_t i = 0;
  for (; i + W <= n; i += W) {
    function(i, [](const auto* p) { return load(p); }, [](auto* p, F x) { store(p, x); });
  }
  if (i < n) {
    const int64_t rest = n - i;
    function(i, [=](const auto* p) { return load_some(p, rest); }, [=](auto* p, F x) { store_some(p, x, rest); });
  }
}

// Lanes of a (0 to W - 1) and b (W to 2 W - 1) in the order given.
template <class V, int... Lane>
PAGED_INLINE V permute(V a, V b, std::integer_sequence<int, Lane...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, Lane...);
#else
  return __builtin_shuffle(a, b, I{Lane...});
#endif
}

template <class Pattern, int... Lane>
constexpr auto lanes_of(std::integer_sequence<int, Lane...>) {
  return std::integer_sequence<int, Pattern::at(Lane)...>{};
}

template <class Pattern, class V>
PAGED_INLINE V permute(V a, V b) {
  return permute(a, b, lanes_of<Pattern>(std::make_integer_sequence<int, W>{}));
}

// Of two vectors, the lanes whose number lacks the bit S from a and the others from b; from their own places or, where
// CrossA or CrossB say so, from those that differ in that bit.
template <int S, bool CrossA, bool CrossB>
struct Mix {
  static constexpr int at(int lane) { return lane & S ? W + (CrossB ? lane ^ S : lane) : CrossA ? lane ^ S : lane; }
};

// A half of both vectors, those lanes that begin at From.
template <int From>
struct Halves {
  static constexpr int at(int lane) { return lane < W / 2 ? From + lane : W + From + lane - W / 2; }
};

// N vectors in one: lane i of every N of its lanes is the sum of such lanes of x[i].
template <int N>
PAGED_INLINE F sum_lanes(const F* x) {
  if constexpr (N == 1) {
    return *x;
  } else {
    const F a = sum_lanes<N / 2>(x), b = sum_lanes<N / 2>(x + N / 2);
    return permute<Mix<N / 2, false, false>>(a, b) + permute<Mix<N / 2, true, true>>(a, b);
  }
}

// Transposes a matrix of W x W lanes.
template <int S = 1>
PAGED_INLINE void transpose(U* x) {
  PAGED_UNROLL for (int i = 0; i < W; ++i) {
    if (i & S) continue;
    const U a = x[i], b = x[i + S];
    x[i] = permute<Mix<S, false, true>>(a, b);
    x[i + S] = permute<Mix<S, true, false>>(a, b);
  }
  if constexpr (2 * S < W) transpose<2 * S>(x);
}

// One number from all lanes, by a function of two vectors.
template <int S = W / 2, class Function>
PAGED_INLINE float fold(F x, Function&& function) {
  if constexpr (S == 0) {
    return x[0];
  } else {
    return fold<S / 2>(function(x, permute<Mix<S, true, true>>(x, x)), function);
  }
}

PAGED_INLINE float sum(F x) { return fold(x, [](F a, F b) { return a + b; }); }
PAGED_INLINE float largest(F x) { return fold(x, [](F a, F b) { return maximum(a, b); }); }

// e to the x within 2 ulp; below -86.6 zero, above 88.3 infinity.
PAGED_INLINE F exp(F x) {
  const F magic = splat(12582912.f);  // added to it, a small float is rounded to an integer in its lowest bits
  const F shifted = x * 1.44269504088896341f + magic;
  const F n = shifted - magic;
  const F r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  F p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.f;
  const F power = (F)((((I)shifted - (I)magic) + 127) << 23);
  const F result = x < -86.6f ? F{} : p * power;
  return x > 88.3f ? splat(std::numeric_limits<float>::infinity()) : result;
}

PAGED_INLINE F sigmoid(F x) { return 1.f / (1.f + exp(-x)); }
PAGED_INLINE F tanh(F x) { return 1.f - 2.f / (exp(2.f * x) + 1.f); }
PAGED_INLINE F silu(F x) { return x * sigmoid(x); }

// 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), which torch calls gelu with approximate="tanh".
PAGED_INLINE F gelu_tanh(F x) { return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x)); }

#if defined(__AVX512BF16__)
// sums + pairs of bfloat16 products, two to a lane.
PAGED_INLINE F dot_pairs(F sums, U a, U b) {
  return (F)_mm512_dpbf16_ps((__m512)sums, (__m512bh)(__m512i)a, (__m512bh)(__m512i)b);
}
#endif

}  // namespace paged

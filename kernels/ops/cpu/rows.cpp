#include "rows.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>

namespace paged {
namespace {

// Elements worth a thread of their own.
constexpr int64_t kGrain = 1 << 14;

template <class Function>
void for_rows(int64_t num_rows, int64_t dim, Function&& function) {
  at::parallel_for(0, num_rows, kGrain / dim + 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) function(i);
  });
}

template <class T>
float inverse_rms(const T* x, int64_t dim, float epsilon) {
  F squares = {};
  for_vectors(dim, [&](int64_t i, auto load, auto) {
    const F number = load(x + i);
    squares += number * number;
  });
  return 1.f / std::sqrt(sum(squares) / dim + epsilon);
}

}  // namespace

void rms_norm(const void* x, Type type, int64_t num_rows, int64_t dim, const float* weight, float epsilon,
              const void* residual, void* result) {
  with_type(type, [&](auto number) {
    using T = decltype(number);
    for_rows(num_rows, dim, [&](int64_t row) {
      const T* from = static_cast<const T*>(x) + row * dim;
      const T* add = residual ? static_cast<const T*>(residual) + row * dim : nullptr;
      T* to = static_cast<T*>(result) + row * dim;
      const float factor = inverse_rms(from, dim, epsilon);
      for_vectors(dim, [&](int64_t i, auto load, auto store) {
        const F normed = load(from + i) * factor * load(weight + i);
        store(to + i, add ? normed + load(add + i) : normed);
      });
    });
  });
}

void gated(const void* gate, int64_t gate_stride, const void* other, int64_t other_stride, Type type, int64_t num_rows,
           int64_t dim, bool gelu, void* result) {
  with_type(type, [&](auto number) {
    using T = decltype(number);
    for_rows(num_rows, dim, [&](int64_t row) {
      const T* a = static_cast<const T*>(gate) + row * gate_stride;
      const T* b = static_cast<const T*>(other) + row * other_stride;
      T* to = static_cast<T*>(result) + row * dim;
      for_vectors(dim, [&](int64_t i, auto load, auto store) {
        const F x = load(a + i);
        store(to + i, (gelu ? gelu_tanh(x) : silu(x)) * load(b + i));
      });
    });
  });
}

void first_argmax(const void* scores, Type type, int64_t num_rows, int64_t dim, int64_t* result) {
  with_type(type, [&](auto number) {
    for_rows(num_rows, dim, [&](int64_t row) {
      const auto* from = static_cast<const decltype(number)*>(scores) + row * dim;
      F best = splat(-std::numeric_limits<float>::infinity());
      I place = {}, nan = {};
      // The last vector may overlap the one before: what is seen again is not above itself.
      for (int64_t i = 0, last = dim - W; i <= last; i += i < last ? std::min<int64_t>(W, last - i) : W) {
        const F x = load(from + i);
        place = x > best ? I{} + static_cast<int32_t>(i) : place;
        best = maximum(best, x);
        nan |= x != x;
      }
      const float top = largest(best);
      int64_t first = dim;
      for (int lane = 0; lane < W; ++lane) {
        if (nan[lane] || top < -std::numeric_limits<float>::max()) first = -1;
        if (best[lane] == top) first = std::min<int64_t>(first, place[lane] + lane);
      }
      result[row] = first;
    });
  });
}

void store_kv(Heads key, Heads value, const Cache& cache, const int64_t* slots, int64_t num_tokens) {
  auto store_all = [&](const Heads& heads, void* blocks, int64_t dim) {
    with_type(heads.type, [&](auto from_number) {
      with_type(cache.type, [&](auto to_number) {
        using To = decltype(to_number);
        for_rows(num_tokens, cache.num_kv_heads * dim, [&](int64_t token) {
          if (slots[token] < 0) return;
          const int64_t block = slots[token] / cache.block_size, offset = slots[token] % cache.block_size;
          for (int64_t head = 0; head < cache.num_kv_heads; ++head) {
            const auto* from = static_cast<const decltype(from_number)*>(heads.at(token, head));
            To* to = static_cast<To*>(blocks) + cache.row(block, head, offset) * dim;
            for_vectors(dim, [&](int64_t i, auto load, auto store) { store(to + i, load(from + i)); });
          }
        });
      });
    });
  };
  store_all(key, cache.key, cache.key_dim);
  store_all(value, cache.value, cache.value_dim);
}

void rotate(void* heads, Type type, int64_t token_stride, int64_t num_tokens, int64_t num_heads, int64_t head_dim,
            const Rotation& rotation) {
  if (!rotation.cos && !rotation.norm) return;
  with_type(type, [&](auto number) {
    using T = decltype(number);
    const int64_t half = rotation.dim / 2;
    for_rows(num_tokens, num_heads * head_dim, [&](int64_t token) {
      for (int64_t h = 0; h < num_heads; ++h) {
        T* head = static_cast<T*>(heads) + token * token_stride + h * head_dim;
        if (rotation.norm) {
          const float factor = inverse_rms(head, head_dim, rotation.epsilon);
          for_vectors(head_dim, [&](int64_t i, auto load, auto store) {
            store(head + i, load(head + i) * factor * load(rotation.norm + i));
          });
        }
        if (rotation.cos) {
          const T* cos = static_cast<const T*>(rotation.cos) + token * rotation.dim;
          const T* sin = static_cast<const T*>(rotation.sin) + token * rotation.dim;
          for_vectors(half, [&](int64_t i, auto load, auto store) {
            const F a = load(head + i), b = load(head + half + i);
            store(head + i, a * load(cos + i) - b * load(sin + i));
            store(head + half + i, b * load(cos + half + i) + a * load(sin + half + i));
          });
        }
      }
    });
  });
}

}  // namespace paged

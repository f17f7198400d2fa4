#include "state.h"

#include <ATen/Parallel.h>

#include <cmath>
#include <vector>

namespace paged {
namespace {

// Elements of state worth a thread of their own.
constexpr int64_t kGrain = 1 << 14;
// Elements of state that are asked for before they are needed: a page, at which the processor's own foresight ends.
constexpr int64_t kAhead = 1024;

void read(const Heads& heads, int64_t token, int64_t head, int64_t dim, float* to) {
  with_type(heads.type, [&](auto number) {
    const auto* from = static_cast<const decltype(number)*>(heads.at(token, head));
    for_vectors(dim, [&](int64_t i, auto load, auto store) { store(to + i, load(from + i)); });
  });
}

void write(const float* from, Type type, int64_t row, int64_t dim, void* to) {
  with_type(type, [&](auto number) {
    auto* at = static_cast<decltype(number)*>(to) + row * dim;
    for_vectors(dim, [&](int64_t i, auto load, auto store) { store(at + i, load(from + i)); });
  });
}

void scale(float* x, int64_t dim, float factor) {
  for_vectors(dim, [&](int64_t i, auto load, auto store) { store(x + i, load(x + i) * factor); });
}

float squares(const float* x, int64_t dim) {
  F total = {};
  for_vectors(dim, [&](int64_t i, auto load, auto) { total += load(x + i) * load(x + i); });
  return sum(total);
}

// Rows of a state that are computed together, so that what belongs to its columns is loaded once for all of them: two
// neighbours in each half of the state, which memory reads and writes faster than four in one place or four places.
template <int Count>
struct Rows {
  static constexpr int count = Count;
  int64_t first, apart;

  int64_t operator[](int r) const { return first + r + r / 2 * apart; }
};

// Calls function(rows) for all of them, by four and what is left one by one.
template <class Function>
PAGED_INLINE void for_row_blocks(int64_t num_rows, Function&& function) {
  const int64_t blocks = num_rows / 4;
  for (int64_t block = 0; block < blocks; ++block) function(Rows<4>{2 * block, 2 * blocks - 2});
  for (int64_t row = 4 * blocks; row < num_rows; ++row) function(Rows<1>{row, 0});
}

// Calls function(seq, head, from, to, next, put) for every head of every sequence: where its state is read and written,
// which state is read after it or null, and how a vector is written: past the caches, where vectors lie so that they
// can be, since a state is not read again before the other layers' states have been.
template <class Function>
void for_states(const States& states, Function&& function) {
  const int64_t size = states.rows * states.columns;
  auto from = [&](int64_t i) { return states.at(states.slots_in[i / states.num_heads], i % states.num_heads); };
  const bool whole = states.columns % W == 0 && states.slot_stride % W == 0 &&
                     reinterpret_cast<uintptr_t>(states.data) % sizeof(F) == 0;
  at::parallel_for(0, states.num_seqs * states.num_heads, kGrain / size + 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t seq = i / states.num_heads, head = i % states.num_heads;
      const float* next = i + 1 < end ? from(i + 1) : nullptr;
      float* to = states.at(states.slots_out[seq], head);
      if (whole) {
        function(seq, head, from(i), to, next, [](float* p, F x, auto) { stream(p, x); });
      } else {
        function(seq, head, from(i), to, next, [](float* p, F x, auto store) { store(p, x); });
      }
    }
    finish_streams();
  });
}

}  // namespace

void gated_delta_update(const Heads& query, const Heads& key, const Heads& value, int64_t num_key_heads, const float* g,
                        const float* beta, float epsilon, bool normalises, const States& states, void* result) {
  const int64_t rows = states.rows, columns = states.columns, group = states.num_heads / num_key_heads;
  for_states(states, [&](int64_t seq, int64_t head, const float* from, float* to, const float* next, auto put) {
    std::vector<float> scratch(2 * rows + 3 * columns);
    float *q = scratch.data(), *k = q + rows, *v = k + rows, *recalled = v + columns, *out = recalled + columns;
    read(query, seq, head / group, rows, q);
    read(key, seq, head / group, rows, k);
    read(value, seq, head, columns, v);
    float factor = 1.f / std::sqrt(static_cast<float>(rows));
    if (normalises) {
      factor /= std::sqrt(squares(q, rows) + epsilon);
      scale(k, rows, 1.f / std::sqrt(squares(k, rows) + epsilon));
    }
    scale(q, rows, factor);
    const int64_t place = seq * states.num_heads + head;
    const float decay = std::exp(g[place]), rate = beta[place];

    for_row_blocks(rows, [&](auto row) {
      for_vectors(columns, [&](int64_t i, auto load, auto store) {
        F sum = load(recalled + i);
        PAGED_UNROLL for (int r = 0; r < row.count; ++r) sum += load(from + row[r] * columns + i) * k[row[r]];
        store(recalled + i, sum);
      });
    });
    for_vectors(columns, [&](int64_t i, auto load, auto store) {
      store(v + i, (load(v + i) - load(recalled + i) * decay) * rate);
    });
    // The state comes from the second-level cache now, while memory brings the next.
    for_row_blocks(rows, [&](auto row) {
      for_vectors(columns, [&](int64_t i, auto load, auto store) {
        const F correction = load(v + i);
        F sum = load(out + i);
        PAGED_UNROLL for (int r = 0; r < row.count; ++r) {
          const int64_t at = row[r] * columns + i;
          if (next) __builtin_prefetch(next + at, 0, 2);
          const F updated = load(from + at) * decay + correction * k[row[r]];
          sum += updated * q[row[r]];
          put(to + at, updated, store);
        }
        store(out + i, sum);
      });
    });
    write(out, value.type, place, columns, result);
  });
}

void selective_state_update(const Selection& token, const States& states, void* result) {
  const int64_t rows = states.rows, columns = states.columns, group = states.num_heads / token.num_groups;
  for_states(states, [&](int64_t seq, int64_t head, const float* from, float* to, const float*, auto put) {
    std::vector<float> scratch(3 * rows + 2 * columns);
    float *x = scratch.data(), *z = x + rows, *out = z + rows, *B = out + rows, *C = B + columns;
    read(token.x, seq, head, rows, x);
    read(token.B, seq, head / group, columns, B);
    read(token.C, seq, head / group, columns, C);
    const int64_t place = seq * states.num_heads + head;
    float step = token.dt[place] + token.dt_bias[head];
    // Beyond 20 the sum of one and the exponential is the exponential.
    if (token.softplus && step <= 20.f) step = std::log1p(std::exp(step));
    const float decay = std::exp(step * token.A[head]);

    for_row_blocks(rows, [&](auto row) {
      F sums[row.count] = {};
      for_vectors(columns, [&](int64_t i, auto load, auto store) {
        const F b = load(B + i), c = load(C + i);
        PAGED_UNROLL for (int r = 0; r < row.count; ++r) {
          const int64_t at = row[r] * columns + i;
          __builtin_prefetch(from + at + kAhead, 0, 2);
          const F updated = load(from + at) * decay + b * (step * x[row[r]]);
          sums[r] += updated * c;
          put(to + at, updated, store);
        }
      });
      for (int r = 0; r < row.count; ++r) out[row[r]] = sum(sums[r]);
    });
    if (token.z.data) read(token.z, seq, head, rows, z);
    for_vectors(rows, [&](int64_t i, auto load, auto store) {
      const F plain = load(out + i) + load(x + i) * token.D[head];
      store(out + i, token.z.data ? plain * silu(load(z + i)) : plain);
    });
    write(out, token.x.type, place, rows, result);
  });
}

}  // namespace paged

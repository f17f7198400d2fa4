#include "attention.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

#include "product.h"

namespace paged {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Keys that are scored, weighed and summed before the next ones are looked at.
constexpr int kKeys = 64;
// Query heads of a group that share each load of a key or value.
constexpr int kShared = W == 16 ? 4 : 2;
// Rows, a query token and a head each, of a tile of prefill.
constexpr int64_t kPrefillRows = 96;

// How a cache of numbers C is multiplied. Queries and weights are rows of Row, as in product.h.
template <class C>
struct Numbers : Plain<float> {
  using Product = Plain<float>;
  using Number = C;
  static constexpr int kDims = W;   // of a key or value, taken at once
  static constexpr int kColumns = 1;  // vectors of sums that these dims make

  static PAGED_INLINE F take(const C* p) { return load(p); }
  static PAGED_INLINE F take_some(const C* p, int64_t n) { return load_some(p, n); }
  static PAGED_INLINE F score(F sums, F key, const float* query) { return sums + key * load(query); }
  static PAGED_INLINE U word(F key) { return (U)key; }
  // The columns that rows of weights multiply, from kStep values.
  static PAGED_INLINE void columns(F value, F, F* to) { to[0] = value; }
};

#if PAGED_BF16_DOT
template <>
struct Numbers<bf16> : Bf16Pairs {
  using Product = Bf16Pairs;
  using Number = bf16;
  static constexpr int kDims = 2 * W;
  static constexpr int kColumns = 2;

  static PAGED_INLINE U take(const bf16* p) { return read<U>(p); }
  static PAGED_INLINE U take_some(const bf16* p, int64_t n) {
    bf16 some[kDims] = {};
    std::memcpy(some, p, n * sizeof(bf16));
    return take(some);
  }
  static PAGED_INLINE F score(F sums, U key, const bf16* query) { return dot_pairs(sums, key, read<U>(query)); }
  static PAGED_INLINE U word(U key) { return key; }
  static PAGED_INLINE void columns(U a, U b, U* to) {
    const U low = {0x200000, 0x210001, 0x220002, 0x230003, 0x240004, 0x250005, 0x260006, 0x270007,
                   0x280008, 0x290009, 0x2a000a, 0x2b000b, 0x2c000c, 0x2d000d, 0x2e000e, 0x2f000f};
    to[0] = (U)_mm512_permutex2var_epi16((__m512i)a, (__m512i)low, (__m512i)b);
    to[1] = (U)_mm512_permutex2var_epi16((__m512i)a, (__m512i)(low + 0x100010), (__m512i)b);
  }
};
#endif

// Where consecutive tokens of a sequence lie in one KV head's part of a cache.
template <class C>
struct Places {
  const C* key[kKeys];
  const C* value[kKeys + 1];
  int count;

  Places(const Cache& cache, const int32_t* table, int64_t head, int64_t first, int64_t end) {
    count = std::min<int64_t>(kKeys, end - first);
    int64_t entry = first / cache.block_size, offset = first % cache.block_size;
    for (int i = 0; i < count; ++entry, offset = 0) {
      const int64_t row = (table[entry] * cache.num_kv_heads + head) * cache.block_size;
      for (; offset < cache.block_size && i < count; ++offset, ++i) {
        key[i] = static_cast<const C*>(cache.key) + (row + offset) * cache.key_dim;
        value[i] = static_cast<const C*>(cache.value) + (row + offset) * cache.value_dim;
      }
    }
    value[count] = value[count - 1];  // an odd last one is paired with itself, at a weight of zero
  }

  // Asks for some of them in the second-level cache; in the first they would push out what is being read.
  PAGED_INLINE void prefetch(const Cache& cache, int from, int to) const {
    auto fetch = [](const C* row, int64_t dim) {
      for (int64_t byte = 0; byte < dim * static_cast<int64_t>(sizeof(C)); byte += 64) {
        __builtin_prefetch(reinterpret_cast<const char*>(row) + byte, 0, 2);
      }
    };
    for (int i = from; i < std::min(to, count); ++i) {
      fetch(key[i], cache.key_dim);
      fetch(value[i], cache.value_dim);
    }
  }
};

// Copies a query head as the kernels multiply it, with zeros up to `padded` dims.
template <class Row>
void copy_query(const Heads& query, int64_t token, int64_t head, int64_t dim, int64_t padded, Row* to) {
  with_type(query.type, [&](auto number) {
    const auto* from = static_cast<const decltype(number)*>(query.at(token, head));
    for_vectors(dim, [&](int64_t i, auto load, auto store) { store(to + i, load(from + i)); });
  });
  std::memset(to + dim, 0, (padded - dim) * sizeof(Row));
}

// Running softmax of one query head: the largest score, the sum of weights relative to it, and values weighed so.
struct Softmax {
  float largest = -kInfinity;
  float total = 0;

  // Turns `count` scores into weights (zeros up to a full vector), and returns what earlier sums are to be scaled by.
  // Of the scores only those from `low` up to `high` are seen.
  template <class Row>
  float weigh(float* scores, int count, int low, int high, const Rule& rule, Row* weights) {
    const int padded = round_up(count, W);
    F peak = splat(-kInfinity);
    for (int i = 0; i < padded; i += W) {
      F score = load(scores + i) * rule.scale;
      if (rule.softcap != 0) score = rule.softcap * tanh(score / rule.softcap);
      if (i < low || i + W > high) {
        I lane;
        for (int j = 0; j < W; ++j) lane[j] = i + j;
        score = (lane >= low) & (lane < high) ? score : splat(-kInfinity);
      }
      store(scores + i, score);
      peak = maximum(score, peak);
    }
    const float now = std::max(largest, paged::largest(peak));
    const float decay = exp(splat(largest - now))[0];
    F sums = {};
    for (int i = 0; i < padded; i += W) {
      const F weight = exp(load(scores + i) - now);
      sums += weight;
      store(weights + i, weight);
    }
    total = total * decay + sum(sums);
    largest = now;
    return decay;
  }

  // The factor that makes weighed values a mean; a sink takes part with a weight and no value.
  float finish(const Rule& rule, int64_t head) const {
    if (!rule.sinks) return 1.f / total;
    const float now = std::max(largest, rule.sinks[head]);
    const F shares = exp(splat(largest - now));
    return shares[0] / (total * shares[0] + exp(splat(rule.sinks[head] - now))[0]);
  }
};

void scale(float* x, int64_t n, float factor) {
  if (factor == 1.f) return;
  for_vectors(n, [&](int64_t i, auto load, auto store) { store(x + i, load(x + i) * factor); });
}

void write_mean(const float* sums, float factor, int64_t dim, Type type, void* result, int64_t at) {
  with_type(type, [&](auto number) {
    auto* to = static_cast<decltype(number)*>(result) + at;
    for_vectors(dim, [&](int64_t i, auto load, auto store) { store(to + i, load(sums + i) * factor); });
  });
}

// Decode

// scores[g][i] = query head g times key i; past the last key they mean nothing. `ahead` is called for every few keys.
template <class K, int G, class Ahead>
void score_keys(const Places<typename K::Number>& places, int64_t dim, const typename K::Row* queries,
                int64_t query_stride, float* scores, Ahead&& ahead) {
  constexpr int kAtOnce = 4;  // keys that share each load of a query
  for (int first = 0; first < places.count; first += W) {
    F sums[G][W / kAtOnce];
    for (int i = 0; i < W / kAtOnce; ++i) {
      const int key = first + i * kAtOnce;
      ahead(key, key + kAtOnce);
      const typename K::Number* keys[kAtOnce];
      PAGED_UNROLL for (int j = 0; j < kAtOnce; ++j) keys[j] = places.key[std::min(key + j, places.count - 1)];
      F s[G][kAtOnce];
      PAGED_UNROLL for (int g = 0; g < G; ++g) {
        PAGED_UNROLL for (int j = 0; j < kAtOnce; ++j) s[g][j] = F{};
      }
      for (int64_t d = 0; d < dim; d += K::kDims) {
        decltype(K::take(keys[0])) taken[kAtOnce];
        const bool whole = d + K::kDims <= dim;
        PAGED_UNROLL for (int j = 0; j < kAtOnce; ++j) {
          taken[j] = whole ? K::take(keys[j] + d) : K::take_some(keys[j] + d, dim - d);
        }
        PAGED_UNROLL for (int g = 0; g < G; ++g) {
          const auto* query = queries + g * query_stride + d;
          PAGED_UNROLL for (int j = 0; j < kAtOnce; ++j) s[g][j] = K::score(s[g][j], taken[j], query);
        }
      }
      PAGED_UNROLL for (int g = 0; g < G; ++g) sums[g][i] = quarter<1>(s[g][0], s[g][1], s[g][2], s[g][3]);
    }
    PAGED_UNROLL for (int g = 0; g < G; ++g) {
      F all = sums[g][0];
      if constexpr (W == 8) all = halve<4>(all, sums[g][1]);
      if constexpr (W == 16) all = quarter<4>(all, sums[g][1], sums[g][2], sums[g][3]);
      store(scores + g * kKeys + first, all);
    }
  }
}

// sums[g][N units of dims from d] += weights[g] times the values.
template <class K, int G, int N>
void add_values(const Places<typename K::Number>& places, int64_t d, int64_t dim, const typename K::Row* weights,
                float* sums, int64_t sums_stride) {
  constexpr int kVectorsHere = N * K::kColumns;
  F acc[G][kVectorsHere];
  PAGED_UNROLL for (int g = 0; g < G; ++g) {
    PAGED_UNROLL for (int v = 0; v < kVectorsHere; ++v) acc[g][v] = load(sums + g * sums_stride + d + v * W);
  }
  const bool whole = d + N * K::kDims <= dim;
  for (int i = 0; i < places.count; i += K::kStep) {
    const auto *a = places.value[i] + d, *b = places.value[i + K::kStep - 1] + d;
    decltype(K::take(a)) columns[kVectorsHere];
    PAGED_UNROLL for (int n = 0; n < N; ++n) {
      if (whole) {
        K::columns(K::take(a + n * K::kDims), K::take(b + n * K::kDims), columns + n * K::kColumns);
      } else {
        K::columns(K::take_some(a, dim - d), K::take_some(b, dim - d), columns);
      }
    }
    PAGED_UNROLL for (int g = 0; g < G; ++g) {
      const auto* row = weights + g * kKeys + i;
      PAGED_UNROLL for (int v = 0; v < kVectorsHere; ++v) acc[g][v] = K::multiply(acc[g][v], columns[v], row);
    }
  }
  PAGED_UNROLL for (int g = 0; g < G; ++g) {
    PAGED_UNROLL for (int v = 0; v < kVectorsHere; ++v) store(sums + g * sums_stride + d + v * W, acc[g][v]);
  }
}

// The newest query of a sequence, all its heads, and what its keys so far have made of it.
template <class K>
struct DecodeQuery {
  using C = typename K::Number;
  using Row = typename K::Row;
  static constexpr int kWide = 4 / K::kColumns;  // units of dims summed at once

  int64_t num_heads, group, key_dim, value_dim, key_stride, value_stride;
  std::vector<Row> queries;
  std::vector<Softmax> softmax;
  std::vector<float> sums;  // [num_heads][value_stride]

  DecodeQuery(const Cache& cache, int64_t num_heads)
      : num_heads(num_heads),
        group(num_heads / cache.num_kv_heads),
        key_dim(cache.key_dim),
        value_dim(cache.value_dim),
        key_stride(round_up(key_dim, K::kDims)),
        value_stride(round_up(value_dim, K::kDims)),
        queries(num_heads * key_stride),
        softmax(num_heads),
        sums(num_heads * value_stride) {}

  void start(const Heads& query, int64_t token) {
    for (int64_t head = 0; head < num_heads; ++head) {
      copy_query(query, token, head, key_dim, key_stride, queries.data() + head * key_stride);
    }
    std::fill(softmax.begin(), softmax.end(), Softmax{});
    std::fill(sums.begin(), sums.end(), 0.f);
  }

  // The group of one KV head attends. `ahead` is called with ranges of 0 to kKeys, to fetch what comes next.
  template <class Ahead>
  void attend(int64_t kv_head, const Places<C>& places, const Rule& rule, Ahead&& ahead) {
    const int64_t end = (kv_head + 1) * group;
    for (int64_t head = kv_head * group; head < end; head += kShared) {
      auto fetch = [&](int from, int to) {
        if (head % group == 0) ahead(from, to);
      };
      const int64_t count = std::min<int64_t>(kShared, end - head);
      if (count == 1) attend<1>(head, places, rule, fetch);
      if (count == 2) attend<2>(head, places, rule, fetch);
      if (count == 3) attend<3>(head, places, rule, fetch);
      if (count == 4) attend<4>(head, places, rule, fetch);
    }
  }

  // Adds what another stretch of the same context came to.
  void merge(const DecodeQuery& other) {
    for (int64_t head = 0; head < num_heads; ++head) {
      Softmax& mine = softmax[head];
      const Softmax& theirs = other.softmax[head];
      const float now = std::max(mine.largest, theirs.largest);
      const float a = exp(splat(mine.largest - now))[0], b = exp(splat(theirs.largest - now))[0];
      mine = {now, mine.total * a + theirs.total * b};
      const int64_t end = (head + 1) * value_stride;
      for (int64_t d = head * value_stride; d < end; ++d) sums[d] = sums[d] * a + other.sums[d] * b;
    }
  }

  void finish(const Rule& rule, int64_t token, Type type, void* result) const {
    for (int64_t head = 0; head < num_heads; ++head) {
      write_mean(sums.data() + head * value_stride, softmax[head].finish(rule, head), value_dim, type, result,
                 (token * num_heads + head) * value_dim);
    }
  }

 private:
  template <int G, class Ahead>
  void attend(int64_t head, const Places<C>& places, const Rule& rule, Ahead& ahead) {
    alignas(64) float scores[G * kKeys];
    alignas(64) Row weights[G * kKeys];
    score_keys<K, G>(places, key_dim, queries.data() + head * key_stride, key_stride, scores, ahead);
    for (int g = 0; g < G; ++g) {
      const float decay = softmax[head + g].weigh(scores + g * kKeys, places.count, 0, places.count, rule,
                                                  weights + g * kKeys);
      scale(sums.data() + (head + g) * value_stride, value_stride, decay);
    }
    float* here = sums.data() + head * value_stride;
    int64_t d = 0;
    for (; d + kWide * K::kDims <= value_dim; d += kWide * K::kDims) {
      add_values<K, G, kWide>(places, d, value_dim, weights, here, value_stride);
    }
    for (; d < value_dim; d += K::kDims) add_values<K, G, 1>(places, d, value_dim, weights, here, value_stride);
  }
};

template <class K>
void decode(const Heads& query, int64_t num_heads, const Cache& cache, const Tables& tables, const Rule& rule,
            void* result) {
  using C = typename K::Number;
  // The stretches of kKeys keys of all sequences stand in one line that is cut into equal shares. A share may begin or
  // end inside a context; its part is then merged with its neighbours'.
  std::vector<int64_t> ends(tables.num_seqs);
  int64_t line = 0;
  for (int64_t s = 0; s < tables.num_seqs; ++s) {
    const int64_t length = tables.context_lens[s];
    const int64_t seen = length ? length - rule.first_visible(length - 1) : 0;
    ends[s] = line += (seen + kKeys - 1) / kKeys;
    if (!length) {
      const int64_t bytes = num_heads * cache.value_dim * size_of(query.type);
      std::memset(static_cast<char*>(result) + s * bytes, 0, bytes);
    }
  }
  // By thread: the part of a context that a share begins with, and that of another one it ends with.
  std::vector<std::optional<std::pair<int64_t, DecodeQuery<K>>>> parts(2 * at::get_num_threads());
  at::parallel_for(0, line, 4, [&](int64_t begin, int64_t end) {
    DecodeQuery<K> here(cache, num_heads);
    std::optional<Places<C>> places[2];
    int64_t s = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin();
    auto locate = [&](int64_t sequence, int64_t at, int64_t kv_head, std::optional<Places<C>>& to) {
      const int64_t length = tables.context_lens[sequence], start = sequence ? ends[sequence - 1] : 0;
      to.emplace(cache, tables.blocks + sequence * tables.stride, kv_head,
                 rule.first_visible(length - 1) + (at - start) * kKeys, length);
    };
    locate(s, begin, 0, places[0]);
    int now = 0;
    for (int64_t at = begin; at < end;) {
      here.start(query, s);
      const int64_t first = at, start = s ? ends[s - 1] : 0, stop = std::min(end, ends[s]);
      int64_t next_s = s + 1;
      while (stop < end && ends[next_s] <= stop) ++next_s;
      for (; at < stop; ++at) {
        for (int64_t kv_head = 0; kv_head < cache.num_kv_heads; ++kv_head, now ^= 1) {
          const bool more = kv_head + 1 < cache.num_kv_heads;
          const bool any = more || at + 1 < end;
          if (any) locate(more || at + 1 < stop ? s : next_s, at + !more, more ? kv_head + 1 : 0, places[now ^ 1]);
          here.attend(kv_head, *places[now], rule, [&](int from, int to) {
            if (any) places[now ^ 1]->prefetch(cache, from, to);
          });
        }
      }
      if (first == start && stop == ends[s]) {
        here.finish(rule, s, query.type, result);
      } else {
        parts[2 * at::get_thread_num() + (first != begin)].emplace(s, here);
      }
      s = next_s;
    }
  });
  for (size_t i = 0; i < parts.size(); ++i) {
    if (!parts[i]) continue;
    auto& [sequence, whole] = *parts[i];
    for (size_t j = i + 1; j < parts.size(); ++j) {
      if (!parts[j] || parts[j]->first != sequence) continue;
      whole.merge(parts[j]->second);
      parts[j].reset();
    }
    whole.finish(rule, sequence, query.type, result);
  }
}

// Prefill

// A tile of query rows, the panels that keys and values are packed into, and what is made of them.
template <class K>
struct PrefillTile {
  using C = typename K::Number;
  using Row = typename K::Row;

  int64_t key_dim, value_dim, key_stride, value_panels;
  std::vector<Row> queries, weights;
  std::vector<uint32_t> keys, values;
  std::vector<float> scores, sums;
  std::vector<Softmax> softmax;

  PrefillTile(const Cache& cache, int64_t rows)
      : key_dim(cache.key_dim),
        value_dim(cache.value_dim),
        key_stride(round_up(key_dim, K::kStep)),
        value_panels((value_dim + kPanel - 1) / kPanel),
        queries(rows * key_stride),
        weights(rows * kKeys),
        keys(key_stride / K::kStep * kKeys),
        values(value_panels * kPanel * kKeys / K::kStep),
        scores(rows * kKeys),
        sums(rows * value_panels * kPanel),
        softmax(rows) {}

  // Keys become the columns of two panels, [steps][32] words each.
  void pack_keys(const Places<C>& places) {
    const int64_t steps = key_stride / K::kStep;
    for (int first = 0; first < kKeys; first += W) {
      uint32_t* panel = keys.data() + first / kPanel * steps * kPanel + first % kPanel;
      for (int64_t step = 0; step < steps; step += W) {
        const int64_t d = step * K::kStep, rest = key_dim - d;
        U words[W];
        for (int i = 0; i < W; ++i) {
          if (first + i >= places.count) {
            words[i] = U{};
          } else {
            const C* key = places.key[first + i] + d;
            words[i] = K::word(rest >= K::kDims ? K::take(key) : K::take_some(key, rest));
          }
        }
        transpose(words);
        for (int i = 0; i < W && step + i < steps; ++i) write(panel + (step + i) * kPanel, words[i]);
      }
    }
  }

  // Values become rows of panels, [kKeys / kStep][32] words each; those of absent keys are zero.
  void pack_values(const Places<C>& places) {
    const int64_t steps = kKeys / K::kStep;
    for (int64_t step = 0; step < steps; ++step) {
      for (int64_t d = 0; d < value_panels * kPanel; d += K::kDims) {
        decltype(K::take(places.value[0])) columns[K::kColumns] = {};
        const int64_t rest = value_dim - d;
        if (step * K::kStep < places.count && rest > 0) {
          const C *a = places.value[step * K::kStep] + d, *b = places.value[step * K::kStep + K::kStep - 1] + d;
          if (rest >= K::kDims) {
            K::columns(K::take(a), K::take(b), columns);
          } else {
            K::columns(K::take_some(a, rest), K::take_some(b, rest), columns);
          }
        }
        uint32_t* panel = values.data() + d / kPanel * steps * kPanel + step * kPanel + d % kPanel;
        for (int v = 0; v < K::kColumns; ++v) write(panel + v * W, columns[v]);
      }
    }
  }

  // to[rows][stride] (+)= from[rows] times panels.
  static void multiply(const Row* from, int64_t from_stride, int64_t rows, const uint32_t* panels, int64_t num_panels,
                       int64_t steps, float* to, int64_t to_stride, bool accumulate) {
    for (int64_t p = 0; p < num_panels; ++p) {
      const uint32_t* panel = panels + p * steps * kPanel;
      for (int64_t r = 0; r < rows; r += kTileRows) {
        const Tile tile = tile_of<typename K::Product>(std::min<int64_t>(kTileRows, rows - r));
        tile(from + r * from_stride, from_stride, panel, steps,
                                                           to + r * to_stride + p * kPanel, to_stride, accumulate,
                                                           reinterpret_cast<const char*>(panel), 0);
      }
    }
  }

  // Queries first to first + count, at consecutive positions, with their group of heads; row i * group + g is head g.
  void attend(const Heads& query, int64_t num_heads, const Cache& cache, const int32_t* table, int64_t kv_head,
              int64_t first, int64_t count, int64_t position, const Rule& rule, void* result) {
    const int64_t group = num_heads / cache.num_kv_heads, rows = count * group, sums_stride = value_panels * kPanel;
    for (int64_t r = 0; r < rows; ++r) {
      copy_query(query, first + r / group, kv_head * group + r % group, key_dim, key_stride,
                 queries.data() + r * key_stride);
    }
    std::fill_n(softmax.begin(), rows, Softmax{});
    std::fill_n(sums.begin(), rows * sums_stride, 0.f);
    for (int64_t key = rule.first_visible(position); key < position + count; key += kKeys) {
      const Places<C> places(cache, table, kv_head, key, position + count);
      pack_keys(places);
      pack_values(places);
      multiply(queries.data(), key_stride, rows, keys.data(), kKeys / kPanel, key_stride / K::kStep, scores.data(),
               kKeys, false);
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t at = position + r / group;
        const int64_t low = std::clamp<int64_t>(rule.first_visible(at) - key, 0, kKeys);
        const int64_t high = std::clamp<int64_t>(at + 1 - key, 0, places.count);
        Row* row_weights = weights.data() + r * kKeys;
        if (low >= high) {
          std::memset(row_weights, 0, kKeys * sizeof(Row));
          continue;
        }
        const float decay = softmax[r].weigh(scores.data() + r * kKeys, kKeys, low, high, rule, row_weights);
        scale(sums.data() + r * sums_stride, sums_stride, decay);
      }
      multiply(weights.data(), kKeys, rows, values.data(), value_panels, kKeys / K::kStep, sums.data(), sums_stride,
               true);
    }
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t head = kv_head * group + r % group;
      write_mean(sums.data() + r * sums_stride, softmax[r].finish(rule, head), value_dim, query.type, result,
                 ((first + r / group) * num_heads + head) * value_dim);
    }
  }
};

template <class K>
void prefill(const Heads& query, int64_t num_heads, const Cache& cache, const Tables& tables,
             const int32_t* cu_seqlens_q, const Rule& rule, void* result) {
  const int64_t group = num_heads / cache.num_kv_heads;
  const int64_t tile_queries = std::max<int64_t>(1, kPrefillRows / group);
  struct Item {
    int64_t sequence, kv_head, first, count, position, end;  // end: of its share of the line
  };
  std::vector<Item> items;
  int64_t line = 0;
  for (int64_t s = 0; s < tables.num_seqs; ++s) {
    const int64_t start = cu_seqlens_q[s], num_queries = cu_seqlens_q[s + 1] - start;
    for (int64_t head = 0; head < cache.num_kv_heads; ++head) {
      for (int64_t q = 0; q < num_queries; q += tile_queries) {
        const int64_t count = std::min(tile_queries, num_queries - q);
        const int64_t position = tables.context_lens[s] - num_queries + q;
        line += count * group * (position + count - rule.first_visible(position));
        items.push_back({s, head, start + q, count, position, line});
      }
    }
  }
  // A share of the line takes the items that end in it, so that late tiles of long prompts weigh what they cost.
  at::parallel_for(0, line, 1 << 12, [&](int64_t begin, int64_t end) {
    PrefillTile<K> tile(cache, tile_queries * group);
    auto item = std::upper_bound(items.begin(), items.end(), begin,
                                 [](int64_t at, const Item& item) { return at < item.end; });
    for (; item != items.end() && item->end <= end; ++item) {
      tile.attend(query, num_heads, cache, tables.blocks + item->sequence * tables.stride, item->kv_head, item->first,
                  item->count, item->position, rule, result);
    }
  });
}

}  // namespace

void decode_attention(Heads query, int64_t num_heads, const Cache& cache, const Tables& tables, const Rule& rule,
                      void* result) {
  with_type(cache.type, [&](auto c) { decode<Numbers<decltype(c)>>(query, num_heads, cache, tables, rule, result); });
}

void prefill_attention(Heads query, int64_t num_heads, const Cache& cache, const Tables& tables,
                       const int32_t* cu_seqlens_q, const Rule& rule, void* result) {
  with_type(cache.type, [&](auto number) {
    prefill<Numbers<decltype(number)>>(query, num_heads, cache, tables, cu_seqlens_q, rule, result);
  });
}

}  // namespace paged

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
// Keys that are scored, weighed and summed before the next ones are looked at: in prefill, and at most in decode.
constexpr int kKeys = 64, kMostKeys = 128;
// Bytes of keys, and of values, that decode looks at so: what is read and what is fetched fit a second-level cache.
constexpr int64_t kStretchBytes = 256 * 1024;
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

#if defined(__AVX512BF16__)
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

// Where consecutive tokens of a sequence lie in a cache: their rows of the first KV head's part of its blocks.
struct Places {
  int64_t rows[kMostKeys + 1];
  int count = 0;

  // From position `first` on, up to `most` of those before `end`.
  void find(const Cache& cache, const int32_t* table, int64_t first, int64_t end, int most) {
    count = std::min<int64_t>(most, end - first);
    int64_t entry = first / cache.block_size, offset = first % cache.block_size;
    for (int i = 0; i < count; ++entry, offset = 0) {
      const int64_t row = cache.row(table[entry], 0, 0);
      for (; offset < cache.block_size && i < count; ++offset, ++i) rows[i] = row + offset;
    }
    rows[count] = rows[count - 1];  // an odd last one is paired with itself, at a weight of zero
  }
};

// The keys or values of one KV head at such places.
template <class C>
struct Tokens {
  const C* base;
  int64_t dim;
  const int64_t* rows;

  PAGED_INLINE const C* operator[](int i) const { return base + rows[i] * dim; }

  // Asks for some of them in the second-level cache; in the first they would push out what is being read.
  PAGED_INLINE void fetch(int from, int to) const {
    const bool together = from < to && rows[to - 1] - rows[from] == to - 1 - from;
    const int64_t bytes = dim * sizeof(C) * (together ? to - from : 1);
    for (int i = from; i < to; i += together ? to - from : 1) {
      const char* at = reinterpret_cast<const char*>((*this)[i]);
      for (const char* end = at + bytes; at < end; at += 64) __builtin_prefetch(at, 0, 2);
    }
  }
};

template <class C>
Tokens<C> keys_of(const Cache& cache, const Places& at, int64_t head) {
  return {static_cast<const C*>(cache.key) + cache.row(0, head, 0) * cache.key_dim, cache.key_dim, at.rows};
}

template <class C>
Tokens<C> values_of(const Cache& cache, const Places& at, int64_t head) {
  return {static_cast<const C*>(cache.value) + cache.row(0, head, 0) * cache.value_dim, cache.value_dim, at.rows};
}

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
    const float decay = now == largest ? 1.f : exp(splat(largest - now))[0];
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

void write_mean(const float* sums, float factor, int64_t dim, Type type, void* result, int64_t at) {
  with_type(type, [&](auto number) {
    auto* to = static_cast<decltype(number)*>(result) + at;
    for_vectors(dim, [&](int64_t i, auto load, auto store) { store(to + i, load(sums + i) * factor); });
  });
}

// scores[g][i] = query head g times key first + i, for W keys; past the last one they mean nothing. Two keys share a
// vector, a half each, so that there are half as many lanes to sum; queries hold every half twice for that.
template <class K, int G>
void score_keys(const Tokens<typename K::Number>& all, int first, int count, const typename K::Row* queries,
                int64_t query_stride, float* scores) {
  constexpr int kPairs = W / 2, kAtOnce = std::min(kPairs, 4);
  F sums[G][kPairs] = {};
  PAGED_UNROLL for (int p = 0; p < kPairs; p += kAtOnce) {
    const typename K::Number* keys[2 * kAtOnce];
    PAGED_UNROLL for (int j = 0; j < kAtOnce; ++j) {
      keys[j] = all[std::min(first + p + j, count - 1)];
      keys[kAtOnce + j] = all[std::min(first + p + j + kPairs, count - 1)];
    }
    for (int64_t d = 0; d < all.dim; d += K::kDims) {
      const bool whole = d + K::kDims <= all.dim;
      auto take = [&](int j) { return whole ? K::take(keys[j] + d) : K::take_some(keys[j] + d, all.dim - d); };
      decltype(take(0)) lower[kAtOnce], upper[kAtOnce];
      PAGED_UNROLL for (int j = 0; j < kAtOnce; ++j) {
        const auto a = take(j), b = take(kAtOnce + j);
        lower[j] = permute<Halves<0>>(a, b);
        upper[j] = permute<Halves<W / 2>>(a, b);
      }
      PAGED_UNROLL for (int g = 0; g < G; ++g) {
        const auto* query = queries + g * query_stride + 2 * d;
        PAGED_UNROLL for (int j = 0; j < kAtOnce; ++j) {
          F& s = sums[g][p + j];
          s = K::score(K::score(s, lower[j], query), upper[j], query + K::kDims);
        }
      }
    }
  }
  PAGED_UNROLL for (int g = 0; g < G; ++g) store(scores + g * kMostKeys + first, sum_lanes<kPairs>(sums[g]));
}

// sums[g][N units of dims from d] = decays[g] times themselves, and weights[g] times the values. `ahead` is called
// for every W of them.
template <class K, int G, int N, class Ahead>
void add_values(const Tokens<typename K::Number>& values, int count, int64_t d, const typename K::Row* weights,
                const float* decays, float* sums, int64_t sums_stride, Ahead& ahead) {
  constexpr int kVectorsHere = N * K::kColumns;
  F acc[G][kVectorsHere];
  PAGED_UNROLL for (int g = 0; g < G; ++g) {
    PAGED_UNROLL for (int v = 0; v < kVectorsHere; ++v) {
      acc[g][v] = load(sums + g * sums_stride + d + v * W) * decays[g];
    }
  }
  const bool whole = d + N * K::kDims <= values.dim;
  for (int first = 0; first < count; first += W) {
    ahead();
    for (int i = first; i < std::min(first + W, count); i += K::kStep) {
      const auto *a = values[i] + d, *b = values[i + K::kStep - 1] + d;
      decltype(K::take(a)) columns[kVectorsHere];
      PAGED_UNROLL for (int n = 0; n < N; ++n) {
        if (whole) {
          K::columns(K::take(a + n * K::kDims), K::take(b + n * K::kDims), columns + n * K::kColumns);
        } else {
          K::columns(K::take_some(a, values.dim - d), K::take_some(b, values.dim - d), columns);
        }
      }
      PAGED_UNROLL for (int g = 0; g < G; ++g) {
        const auto* row = weights + g * kMostKeys + i;
        PAGED_UNROLL for (int v = 0; v < kVectorsHere; ++v) acc[g][v] = K::multiply(acc[g][v], columns[v], row);
      }
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

  const Cache cache;
  const int64_t num_heads, group = num_heads / cache.num_kv_heads;
  const int64_t key_stride = 2 * round_up(cache.key_dim, K::kDims), value_stride = round_up(cache.value_dim, K::kDims);
  std::vector<Row> queries = std::vector<Row>(num_heads * key_stride);
  std::vector<Softmax> softmax = std::vector<Softmax>(num_heads);
  std::vector<float> sums = std::vector<float>(num_heads * value_stride);
  std::vector<float> scores = std::vector<float>(num_heads * kMostKeys);
  std::vector<Row> weights = std::vector<Row>(num_heads * kMostKeys);
  std::vector<float> decays = std::vector<float>(num_heads);

  void start(const Heads& query, int64_t token) {
    std::vector<Row> plain(key_stride / 2);
    constexpr int64_t kHalf = K::kDims / 2;
    for (int64_t head = 0; head < num_heads; ++head) {
      copy_query(query, token, head, cache.key_dim, key_stride / 2, plain.data());
      for (int64_t d = 0; d < key_stride; d += kHalf) {
        std::copy_n(&plain[d / (2 * kHalf) * kHalf], kHalf, &queries[head * key_stride + d]);
      }
    }
    std::fill(softmax.begin(), softmax.end(), Softmax{});
    std::fill(sums.begin(), sums.end(), 0.f);
  }

  // All heads attend to some keys. While these are read their values are fetched, and with the values the `next` keys.
  void attend(const Places& places, const Places& next, const Rule& rule) {
    const int count = places.count;
    for (int first = 0; first < count; first += W) {
      for (int64_t kv_head = 0; kv_head < cache.num_kv_heads; ++kv_head) {
        values_of<C>(cache, places, kv_head).fetch(first, std::min(first + W, count));
        by_heads(kv_head, [&](auto g, int64_t head) {
          score_keys<K, g()>(keys_of<C>(cache, places, kv_head), first, count, &queries[head * key_stride], key_stride,
                             &scores[head * kMostKeys]);
        });
      }
    }
    for (int64_t head = 0; head < num_heads; ++head) {
      decays[head] = softmax[head].weigh(&scores[head * kMostKeys], count, 0, count, rule, &weights[head * kMostKeys]);
    }
    // In the order of their blocks: W keys of one KV head, then of the others, then the next W.
    int64_t fetched = 0;
    auto fetch = [&] {
      const int first = fetched / cache.num_kv_heads * W;
      keys_of<C>(cache, next, fetched++ % cache.num_kv_heads).fetch(first, std::min(first + W, next.count));
    };
    for (int64_t kv_head = 0; kv_head < cache.num_kv_heads; ++kv_head) {
      const auto values = values_of<C>(cache, places, kv_head);
      for (int64_t d = 0, dims; d < value_stride; d += dims) {
        dims = d + kWide * K::kDims <= cache.value_dim ? kWide * K::kDims : K::kDims;
        by_heads(kv_head, [&](auto g, int64_t head) {
          auto ahead = [&] {
            if (d == 0 && head == kv_head * group) fetch();
          };
          using A = decltype(ahead);
          const auto add = dims == K::kDims ? add_values<K, g(), 1, A> : add_values<K, g(), kWide, A>;
          add(values, count, d, &weights[head * kMostKeys], &decays[head], &sums[head * value_stride], value_stride,
              ahead);
        });
      }
    }
    while (fetched < (next.count + W - 1) / W * cache.num_kv_heads) fetch();
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
      write_mean(sums.data() + head * value_stride, softmax[head].finish(rule, head), cache.value_dim, type,
                 result, (token * num_heads + head) * cache.value_dim);
    }
  }

 private:
  // Calls function(count, first) for the heads of a KV head's group, kShared at a time and the rest.
  template <class Function>
  PAGED_INLINE void by_heads(int64_t kv_head, Function&& function) const {
    const int64_t end = (kv_head + 1) * group;
    for (int64_t head = kv_head * group; head < end; head += kShared) {
      const int64_t count = std::min<int64_t>(kShared, end - head);
      if (count == 1) function(std::integral_constant<int, 1>{}, head);
      if (count == 2) function(std::integral_constant<int, 2>{}, head);
      if (count == 3) function(std::integral_constant<int, 3>{}, head);
      if (count == 4) function(std::integral_constant<int, 4>{}, head);
    }
  }
};

template <class K>
void decode(const Heads& query, int64_t num_heads, const Cache& cache, const Tables& tables, const Rule& rule,
            void* result) {
  using C = typename K::Number;
  const int64_t token_bytes = cache.num_kv_heads * std::max(cache.key_dim, cache.value_dim) * sizeof(C);
  const int64_t stretch = std::clamp<int64_t>(kStretchBytes / token_bytes / W * W, W, kMostKeys);
  // The stretches of keys of all sequences stand in one line that is cut into equal shares. A share may begin or end
  // inside a context; its part is then merged with its neighbours'.
  std::vector<int64_t> ends(tables.num_seqs);
  int64_t line = 0;
  for (int64_t s = 0; s < tables.num_seqs; ++s) {
    const int64_t length = tables.context_lens[s];
    const int64_t seen = length ? length - rule.first_visible(length - 1) : 0;
    ends[s] = line += (seen + stretch - 1) / stretch;
    if (!length) {
      const int64_t bytes = num_heads * cache.value_dim * size_of(query.type);
      std::memset(static_cast<char*>(result) + s * bytes, 0, bytes);
    }
  }
  // By thread: the part of a context that a share begins with, and that of another one it ends with.
  std::vector<std::optional<std::pair<int64_t, DecodeQuery<K>>>> parts(2 * at::get_num_threads());
  at::parallel_for(0, line, std::max<int64_t>(1, 256 / stretch), [&](int64_t begin, int64_t end) {
    DecodeQuery<K> here{cache, num_heads};
    Places places[2];
    auto sequence_at = [&](int64_t at) { return std::upper_bound(ends.begin(), ends.end(), at) - ends.begin(); };
    auto find = [&](int64_t at) {
      const int64_t s = sequence_at(at), length = tables.context_lens[s], start = s ? ends[s - 1] : 0;
      places[at & 1].find(cache, tables.blocks + s * tables.stride,
                          rule.first_visible(length - 1) + (at - start) * stretch, length, stretch);
    };
    find(begin);
    for (int64_t at = begin; at < end;) {
      const int64_t s = sequence_at(at), first = at, start = s ? ends[s - 1] : 0, stop = std::min(end, ends[s]);
      here.start(query, s);
      for (; at < stop; ++at) {
        Places& next = places[~at & 1];
        next.count = 0;
        if (at + 1 < end) find(at + 1);
        here.attend(places[at & 1], next, rule);
      }
      if (first == start && stop == ends[s]) {
        here.finish(rule, s, query.type, result);
      } else {
        parts[2 * at::get_thread_num() + (first != begin)].emplace(s, here);
      }
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

// A tile of query rows, the panels that keys and values are packed into, and what is made of them.
template <class K>
struct PrefillTile {
  using C = typename K::Number;
  using Row = typename K::Row;

  const Cache cache;
  const int64_t most_rows, key_stride = round_up(cache.key_dim, K::kStep);
  const int64_t value_panels = (cache.value_dim + kPanel - 1) / kPanel;
  std::vector<Row> queries = std::vector<Row>(most_rows * key_stride);
  std::vector<Row> weights = std::vector<Row>(most_rows * kKeys);
  std::vector<uint32_t> keys = std::vector<uint32_t>(key_stride / K::kStep * kKeys);
  std::vector<uint32_t> values = std::vector<uint32_t>(value_panels * kPanel * kKeys / K::kStep);
  std::vector<float> scores = std::vector<float>(most_rows * kKeys);
  std::vector<float> sums = std::vector<float>(most_rows * value_panels * kPanel);
  std::vector<Softmax> softmax = std::vector<Softmax>(most_rows);

  // Keys become the columns of two panels, [steps][32] words each.
  void pack_keys(const Tokens<C>& tokens, int count) {
    const int64_t steps = key_stride / K::kStep;
    for (int first = 0; first < kKeys; first += W) {
      uint32_t* panel = keys.data() + first / kPanel * steps * kPanel + first % kPanel;
      for (int64_t step = 0; step < steps; step += W) {
        const int64_t d = step * K::kStep, rest = cache.key_dim - d;
        U words[W];
        for (int i = 0; i < W; ++i) {
          if (first + i >= count) {
            words[i] = U{};
          } else {
            const C* key = tokens[first + i] + d;
            words[i] = K::word(rest >= K::kDims ? K::take(key) : K::take_some(key, rest));
          }
        }
        transpose(words);
        for (int i = 0; i < W && step + i < steps; ++i) write(panel + (step + i) * kPanel, words[i]);
      }
    }
  }

  // Values become rows of panels, [kKeys / kStep][32] words each; those of absent keys are zero.
  void pack_values(const Tokens<C>& tokens, int count) {
    const int64_t steps = kKeys / K::kStep;
    for (int64_t step = 0; step < steps; ++step) {
      for (int64_t d = 0; d < value_panels * kPanel; d += K::kDims) {
        decltype(K::take(tokens[0])) columns[K::kColumns] = {};
        const int64_t rest = cache.value_dim - d;
        if (step * K::kStep < count && rest > 0) {
          const C *a = tokens[step * K::kStep] + d, *b = tokens[step * K::kStep + K::kStep - 1] + d;
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
        tile(from + r * from_stride, from_stride, panel, steps, to + r * to_stride + p * kPanel, to_stride, accumulate,
             reinterpret_cast<const char*>(panel), 0);
      }
    }
  }

  // Queries first to first + count, at consecutive positions, with their group of heads; row i * group + g is head g.
  void attend(const Heads& query, int64_t num_heads, const int32_t* table, int64_t kv_head, int64_t first,
              int64_t count, int64_t position, const Rule& rule, void* result) {
    const int64_t group = num_heads / cache.num_kv_heads, rows = count * group, sums_stride = value_panels * kPanel;
    for (int64_t r = 0; r < rows; ++r) {
      copy_query(query, first + r / group, kv_head * group + r % group, cache.key_dim, key_stride,
                 queries.data() + r * key_stride);
    }
    std::fill_n(softmax.begin(), rows, Softmax{});
    std::fill_n(sums.begin(), rows * sums_stride, 0.f);
    Places places;
    for (int64_t key = rule.first_visible(position); key < position + count; key += kKeys) {
      places.find(cache, table, key, position + count, kKeys);
      pack_keys(keys_of<C>(cache, places, kv_head), places.count);
      pack_values(values_of<C>(cache, places, kv_head), places.count);
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
        float* row_sums = sums.data() + r * sums_stride;
        for (int64_t i = 0; i < sums_stride && decay != 1; i += W) store(row_sums + i, load(row_sums + i) * decay);
      }
      multiply(weights.data(), kKeys, rows, values.data(), value_panels, kKeys / K::kStep, sums.data(), sums_stride,
               true);
    }
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t head = kv_head * group + r % group;
      write_mean(sums.data() + r * sums_stride, softmax[r].finish(rule, head), cache.value_dim, query.type,
                 result, ((first + r / group) * num_heads + head) * cache.value_dim);
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
    PrefillTile<K> tile{cache, tile_queries * group};
    auto item = std::upper_bound(items.begin(), items.end(), begin,
                                 [](int64_t at, const Item& item) { return at < item.end; });
    for (; item != items.end() && item->end <= end; ++item) {
      tile.attend(query, num_heads, tables.blocks + item->sequence * tables.stride, item->kv_head, item->first,
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

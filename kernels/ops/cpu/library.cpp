// The operations as torch sees them, and the decoder layer that is made of them.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>
#include <vector>

#include "attention.h"
#include "product.h"
#include "quantised_product.h"
#include "state.h"

namespace paged {
namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;

Type type_of(const Tensor& tensor) {
  const auto type = tensor.scalar_type();
  if (type == at::kFloat) return Type::f32;
  if (type == at::kBFloat16) return Type::bf16;
  if (type == at::kHalf) return Type::f16;
  TORCH_CHECK_VALUE(type == at::kChar, "the cpu backend takes float32, bfloat16 and float16, got ", type);
  return Type::i8;
}

const float* floats(const Optional& tensor) { return tensor ? tensor->const_data_ptr<float>() : nullptr; }

Heads heads_of(const Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.stride(2) == 1 || tensor.size(2) == 1, "the dims of a head must be consecutive");
  return {tensor.const_data_ptr(), type_of(tensor), tensor.stride(0), tensor.stride(1)};
}

Cache cache_of(const Tensor& key, const Tensor& value) {
  TORCH_CHECK_VALUE(key.scalar_type() == value.scalar_type(), "key_cache and value_cache must have one dtype");
  return {key.data_ptr(), value.data_ptr(), type_of(key), key.size(1), key.size(2), key.size(3), value.size(3)};
}

Tables tables_of(const Tensor& block_tables, const Tensor& context_lens) {
  TORCH_CHECK_VALUE(block_tables.stride(1) == 1 || block_tables.size(1) == 1, "block_tables must have whole rows");
  return {block_tables.const_data_ptr<int32_t>(), block_tables.stride(0), context_lens.const_data_ptr<int32_t>(),
          context_lens.size(0)};
}

Rule rule_of(double scale, int64_t window, int64_t chunk, double softcap, const Optional& sinks) {
  return {static_cast<float>(scale), static_cast<float>(softcap), window, chunk, floats(sinks)};
}

void store(const Tensor& key, const Tensor& value, const Tensor& key_cache, const Tensor& value_cache,
           const Tensor& slot_mapping) {
  store_kv(heads_of(key), heads_of(value), cache_of(key_cache, value_cache), slot_mapping.const_data_ptr<int64_t>(),
           slot_mapping.size(0));
}

Tensor decode(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_tables,
              const Tensor& context_lens, double scale, int64_t window, int64_t chunk, double softcap,
              const Optional& sinks) {
  Tensor result = at::empty({query.size(0), query.size(1), value_cache.size(3)}, query.options());
  decode_attention(heads_of(query), query.size(1), cache_of(key_cache, value_cache),
                   tables_of(block_tables, context_lens), rule_of(scale, window, chunk, softcap, sinks),
                   result.data_ptr());
  return result;
}

Tensor prefill(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_tables,
               const Tensor& cu_seqlens_q, const Tensor& context_lens, double scale, int64_t window, int64_t chunk,
               double softcap, const Optional& sinks) {
  Tensor result = at::empty({query.size(0), query.size(1), value_cache.size(3)}, query.options());
  const auto *offsets = cu_seqlens_q.const_data_ptr<int32_t>(), *lengths = context_lens.const_data_ptr<int32_t>();
  for (int64_t s = 0; s < context_lens.size(0); ++s) {
    TORCH_CHECK_VALUE(offsets[s + 1] - offsets[s] <= lengths[s], "sequence ", s, " has ", offsets[s + 1] - offsets[s],
                      " queries but only ", lengths[s], " tokens of context");
  }
  prefill_attention(heads_of(query), query.size(1), cache_of(key_cache, value_cache),
                    tables_of(block_tables, context_lens), offsets, rule_of(scale, window, chunk, softcap, sinks),
                    result.data_ptr());
  result.slice(0, offsets[context_lens.size(0)]).zero_();
  return result;
}

// A packed weight and its extras, as packed_linear.py lays them out.
Weight weight_of(const Tensor& packed, const Optional& scale, const Optional& bias, int64_t num_columns) {
  const bool pairs = packed.dim() == 4;
  return {packed.const_data_ptr(), type_of(packed), pairs, num_columns, packed.size(1) * (pairs ? 2 : 1),
          floats(scale), floats(bias)};
}

Tensor linear(const Tensor& x, const Tensor& packed, const Optional& scale, const Optional& bias, int64_t num_columns,
              int64_t then) {
  const Weight weight = weight_of(packed, scale, bias, num_columns);
  TORCH_CHECK_VALUE(x.size(-1) == weight.depth, "x has ", x.size(-1), " columns, the weight takes ", weight.depth);
  const Tensor rows = x.contiguous();
  auto sizes = x.sizes().vec();
  sizes.back() = then >= static_cast<int64_t>(Then::silu_gate) ? num_columns / 2 : num_columns;
  Tensor result = at::empty(sizes, x.options());
  product(rows.const_data_ptr(), type_of(x), rows.numel() / weight.depth, weight, static_cast<Then>(then), nullptr,
          result.data_ptr());
  return result;
}

// A quantised weight, as quantised_weight.py lays it out: [panels][bytes of a panel].
QuantisedWeight quantised(const Tensor& packed, int64_t format, const Optional& bias, int64_t num_columns,
                          int64_t depth) {
  const QuantisedWeight weight{packed.const_data_ptr<uint8_t>(), static_cast<Format>(format), num_columns, depth,
                               floats(bias)};
  TORCH_CHECK_VALUE(depth % kStretch == 0 && packed.size(1) == panel_bytes(weight.format, depth), "x has ", depth,
                    " columns, the weight takes another number");
  TORCH_CHECK_VALUE(packed.is_contiguous() && packed.size(0) == weight.num_panels(), "a weight of ", num_columns,
                    " columns must be ", weight.num_panels(), " panels that follow each other");
  return weight;
}

std::vector<QuantisedWeight> quantised(const c10::List<Tensor>& packed, const c10::List<int64_t>& formats,
                                       const c10::List<Optional>& biases, const c10::List<int64_t>& columns,
                                       int64_t first, int64_t count, int64_t depth) {
  std::vector<QuantisedWeight> weights;
  for (int64_t i = first; i < first + count; ++i) {
    weights.push_back(quantised(packed.get(i), formats.get(i), biases.get(i), columns.get(i), depth));
  }
  return weights;
}

Tensor quantised_linear(const Tensor& x, const c10::List<Tensor>& packed, const c10::List<int64_t>& formats,
                        const c10::List<Optional>& biases, const c10::List<int64_t>& columns, int64_t then) {
  const int64_t depth = x.size(-1);
  const auto weights = quantised(packed, formats, biases, columns, 0, packed.size(), depth);
  const Tensor rows = x.contiguous();
  auto sizes = x.sizes().vec();
  sizes.back() = 0;
  for (const auto& weight : weights) sizes.back() += weight.num_columns;
  if (then >= static_cast<int64_t>(Then::silu_gate)) sizes.back() /= 2;
  Tensor result = at::empty(sizes, x.options());
  quantised_product(rows.const_data_ptr(), type_of(x), rows.numel() / depth, weights, static_cast<Then>(then), nullptr,
                    result.data_ptr());
  return result;
}

Tensor widen_columns(const Tensor& packed, int64_t format, int64_t num_columns, int64_t depth, const Tensor& columns) {
  const QuantisedWeight weight = quantised(packed, format, {}, num_columns, depth);
  const Tensor at = columns.contiguous();
  const auto* places = at.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < at.numel(); ++i) {
    TORCH_CHECK_INDEX(0 <= places[i] && places[i] < num_columns, "index ", places[i], " is out of range, of 0 to ",
                      num_columns - 1);
  }
  auto sizes = columns.sizes().vec();
  sizes.push_back(depth);
  Tensor result = at::empty(sizes, packed.options().dtype(at::kFloat));
  widen_columns(weight, places, at.numel(), result.data_ptr<float>());
  return result;
}

Tensor norm(const Tensor& x, const Tensor& weight, double epsilon) {
  const Tensor rows = x.contiguous();
  Tensor result = at::empty(x.sizes(), x.options());
  rms_norm(rows.const_data_ptr(), type_of(x), x.numel() / x.size(-1), x.size(-1), weight.const_data_ptr<float>(),
           epsilon, nullptr, result.data_ptr());
  return result;
}

Tensor gated_activation(const Tensor& gate, const Tensor& other, bool gelu) {
  const int64_t dim = gate.size(-1), num_rows = gate.numel() / dim;
  Tensor result = at::empty(gate.sizes(), gate.options());
  // Halves of a merged projection are taken as they lie.
  auto rows = [&](const Tensor& x) {
    return x.stride(-1) == 1 && x.dim() == 2 ? x : x.reshape({num_rows, dim}).contiguous();
  };
  const Tensor a = rows(gate), b = rows(other);
  gated(a.const_data_ptr(), a.stride(0), b.const_data_ptr(), b.stride(0), type_of(a), num_rows, dim, gelu,
        result.data_ptr());
  return result;
}

void rotate_heads(const Tensor& heads, const Tensor& cos, const Tensor& sin) {
  TORCH_CHECK_VALUE(heads.is_contiguous() && cos.is_contiguous() && sin.is_contiguous() &&
                        cos.scalar_type() == heads.scalar_type() && sin.scalar_type() == heads.scalar_type(),
                    "heads, cosines and sines must be contiguous and of one dtype");
  rotate(heads.data_ptr(), type_of(heads), heads.stride(0), heads.size(0), heads.size(1), heads.size(2),
         {cos.const_data_ptr(), sin.const_data_ptr(), cos.size(-1), nullptr, 0.f});
}

Tensor first_argmax(const Tensor& scores) {
  TORCH_CHECK_VALUE(scores.is_contiguous() && scores.size(1) >= W, "scores must be contiguous rows of at least ", W);
  Tensor result = at::empty({scores.size(0)}, scores.options().dtype(at::kLong));
  first_argmax(scores.const_data_ptr(), type_of(scores), scores.size(0), scores.size(1), result.data_ptr<int64_t>());
  return result;
}

States states_of(const Tensor& state, const Tensor& slots_in, const Tensor& slots_out) {
  TORCH_CHECK_VALUE(state.slice(0, 0, 1).is_contiguous(), "the elements of a slot must be consecutive");
  TORCH_CHECK_VALUE(slots_in.is_contiguous() && slots_out.is_contiguous(), "slots must be contiguous");
  return {state.data_ptr<float>(), state.stride(0), state.size(1), state.size(2), state.size(3),
          slots_in.const_data_ptr<int64_t>(), slots_out.const_data_ptr<int64_t>(), slots_in.size(0)};
}

Tensor gated_delta_update(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& g,
                          const Tensor& beta, const Tensor& state, const Tensor& slots_in, const Tensor& slots_out,
                          double epsilon, bool normalises) {
  TORCH_CHECK_VALUE(g.is_contiguous() && beta.is_contiguous(), "g and beta must be contiguous");
  Tensor result = at::empty(value.sizes(), value.options());
  gated_delta_update(heads_of(query), heads_of(key), heads_of(value), key.size(1), g.const_data_ptr<float>(),
                     beta.const_data_ptr<float>(), epsilon, normalises, states_of(state, slots_in, slots_out),
                     result.data_ptr());
  return result;
}

Tensor selective_state_update(const Tensor& state, const Tensor& x, const Tensor& dt, const Tensor& A, const Tensor& B,
                              const Tensor& C, const Tensor& D, const Optional& z, const Tensor& dt_bias,
                              const Tensor& slots_in, const Tensor& slots_out, bool softplus) {
  for (const Tensor& tensor : {dt, A, D, dt_bias}) {
    TORCH_CHECK_VALUE(tensor.is_contiguous(), "dt, A, D and dt_bias must be contiguous");
  }
  Tensor result = at::empty(x.sizes(), x.options());
  const Selection token{heads_of(x), heads_of(B), heads_of(C), z ? heads_of(*z) : Heads{}, B.size(1),
                        dt.const_data_ptr<float>(), dt_bias.const_data_ptr<float>(), A.const_data_ptr<float>(),
                        D.const_data_ptr<float>(), softplus};
  selective_state_update(token, states_of(state, slots_in, slots_out), result.data_ptr());
  return result;
}

// One decoder layer over the packed tokens of a step, its keys and values stored on the way.
//
// norms: of the input, of the attention's result, before and after the MLP, of queries, of keys; float32 or absent.
// weights, scales, biases: query-key-value, output, gate-and-other, down. formats, columns: nothing of packed weights;
// of quantised ones, of which there may be several where a packed one would hold them all: queries, keys and values, or
// gate and other.
Tensor decoder_layer(const Tensor& hidden, const Optional& cos, const Optional& sin,
                     const c10::List<Optional>& norms, double epsilon, const c10::List<Tensor>& weights,
                     const c10::List<Optional>& scales, const c10::List<Optional>& biases,
                     const c10::List<int64_t>& formats, const c10::List<int64_t>& columns, int64_t num_heads,
                     int64_t activation, const Tensor& key_cache, const Tensor& value_cache, const Tensor& slot_mapping,
                     const Tensor& block_tables, const Tensor& context_lens, const Tensor& cu_seqlens_q,
                     int64_t num_decodes, double scale, int64_t window, int64_t chunk, double softcap,
                     const Optional& sinks) {
  const Cache cache = cache_of(key_cache, value_cache);
  const int64_t width = hidden.size(-1), num_tokens = hidden.numel() / width;
  const int64_t query_dims = num_heads * cache.key_dim, key_dims = cache.num_kv_heads * cache.key_dim;
  const int64_t value_dims = cache.num_kv_heads * cache.value_dim, result_dims = num_heads * cache.value_dim;
  const int64_t projected = query_dims + key_dims + value_dims;
  TORCH_CHECK(hidden.is_contiguous(), "hidden states must be contiguous");
  const Type type = type_of(hidden);
  std::vector<Optional> norm(norms.begin(), norms.end());
  const bool is_quantised = !formats.empty();
  auto weight = [&](int i, int64_t n) { return weight_of(weights.get(i), scales.get(i), biases.get(i), n); };
  const int64_t inner = is_quantised ? columns.get(columns.size() - 2) : weight(3, width).depth;
  // The i-th product of the four, to `n` columns.
  auto multiply = [&](const void* rows, int i, int64_t n, Then then, const void* residual, void* to) {
    if (!is_quantised) return product(rows, type, num_tokens, weight(i, n), then, residual, to);
    const int64_t depths[] = {width, result_dims, width, inner};
    const int64_t firsts[] = {0, static_cast<int64_t>(weights.size()) - 4, static_cast<int64_t>(weights.size()) - 3,
                              static_cast<int64_t>(weights.size()) - 1, static_cast<int64_t>(weights.size())};
    quantised_product(rows, type, num_tokens,
                      quantised(weights, formats, biases, columns, firsts[i], firsts[i + 1] - firsts[i], depths[i]),
                      then, residual, to);
  };
  auto buffer = [&](int64_t columns) { return at::empty({num_tokens, columns}, hidden.options()); };
  // x + norm(product), or x + product where there is no norm.
  auto add = [&](const Tensor& from, int by, const Tensor& x, const Optional& norm, const Tensor& result) {
    const void *residual = x.const_data_ptr(), *rows = from.const_data_ptr();
    void* to = result.data_ptr();
    if (!norm) return multiply(rows, by, width, Then::add, residual, to);
    multiply(rows, by, width, Then::keep, nullptr, to);
    rms_norm(to, type, num_tokens, width, floats(norm), epsilon, residual, to);
  };
  auto normed = [&](const Tensor& x, const Optional& norm, const Tensor& result) {
    if (!norm) return x;
    rms_norm(x.const_data_ptr(), type, num_tokens, width, floats(norm), epsilon, nullptr, result.data_ptr());
    return result;
  };

  const Tensor scratch = buffer(width), attended = buffer(result_dims), qkv = buffer(projected);
  multiply(normed(hidden, norm[0], scratch).const_data_ptr(), 0, projected, Then::keep, nullptr, qkv.data_ptr());
  const int64_t bytes = size_of(type);
  char* query = static_cast<char*>(qkv.data_ptr());
  char* key = query + query_dims * bytes;
  Rotation rotation{cos ? cos->const_data_ptr() : nullptr, sin ? sin->const_data_ptr() : nullptr,
                    cos ? cos->size(-1) : 0, floats(norm[4]), static_cast<float>(epsilon)};
  rotate(query, type, projected, num_tokens, num_heads, cache.key_dim, rotation);
  rotation.norm = floats(norm[5]);
  rotate(key, type, projected, num_tokens, cache.num_kv_heads, cache.key_dim, rotation);
  store_kv({key, type, projected, cache.key_dim}, {key + key_dims * bytes, type, projected, cache.value_dim}, cache,
           slot_mapping.const_data_ptr<int64_t>(), num_tokens);
  const Rule rule = rule_of(scale, window, chunk, softcap, sinks);
  Tables tables = tables_of(block_tables, context_lens);
  const int64_t num_prefills = tables.num_seqs - num_decodes;
  tables.num_seqs = num_decodes;
  decode_attention({query, type, projected, cache.key_dim}, num_heads, cache, tables, rule, attended.data_ptr());
  tables.blocks += num_decodes * tables.stride;
  tables.context_lens += num_decodes;
  tables.num_seqs = num_prefills;
  prefill_attention({query + num_decodes * projected * bytes, type, projected, cache.key_dim}, num_heads, cache, tables,
                    cu_seqlens_q.const_data_ptr<int32_t>(), rule,
                    static_cast<char*>(attended.data_ptr()) + num_decodes * result_dims * bytes);

  const Tensor middle = buffer(width), result = at::empty(hidden.sizes(), hidden.options()), gates = buffer(inner);
  add(attended, 1, hidden, norm[1], middle);
  multiply(normed(middle, norm[2], scratch).const_data_ptr(), 2, 2 * inner, static_cast<Then>(activation), nullptr,
           gates.data_ptr());
  add(gates, 3, middle, norm[3], result);
  return result;
}

#define PAGED_RULE "float scale, int window, int chunk, float softcap, Tensor? sinks"
#define PAGED_CACHE "Tensor(a!) key_cache, Tensor(b!) value_cache"

TORCH_LIBRARY(PAGED_LIBRARY, m) {
  auto define = [&](const char* schema, auto* run) { m.def(schema, torch::dispatch(c10::DispatchKey::CPU, run)); };
  define("store_kv(Tensor key, Tensor value, " PAGED_CACHE ", Tensor slot_mapping) -> ()", store);
  define("decode_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, "
         "Tensor context_lens, " PAGED_RULE ") -> Tensor", decode);
  define("prefill_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, "
         "Tensor cu_seqlens_q, Tensor context_lens, " PAGED_RULE ") -> Tensor", prefill);
  define("linear(Tensor x, Tensor packed, Tensor? scale, Tensor? bias, int num_columns, int then) -> Tensor", linear);
  define("quantised_linear(Tensor x, Tensor[] packed, int[] formats, Tensor?[] biases, int[] columns, int then) "
         "-> Tensor", quantised_linear);
  define("widen_columns(Tensor packed, int format, int num_columns, int depth, Tensor columns) -> Tensor",
         static_cast<Tensor (*)(const Tensor&, int64_t, int64_t, int64_t, const Tensor&)>(widen_columns));
  define("rms_norm(Tensor x, Tensor weight, float epsilon) -> Tensor", norm);
  define("gated_activation(Tensor gate, Tensor other, bool gelu) -> Tensor", gated_activation);
  define("rotate_(Tensor(a!) heads, Tensor cos, Tensor sin) -> ()", rotate_heads);
  define("first_argmax(Tensor scores) -> Tensor", first_argmax);
  define("gated_delta_update(Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, Tensor(a!) state, "
         "Tensor slots_in, Tensor slots_out, float epsilon, bool normalises) -> Tensor", gated_delta_update);
  define("selective_state_update(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor D, "
         "Tensor? z, Tensor dt_bias, Tensor slots_in, Tensor slots_out, bool softplus) -> Tensor",
         selective_state_update);
  define("decoder_layer(Tensor hidden, Tensor? cos, Tensor? sin, Tensor?[] norms, float epsilon, Tensor[] weights, "
         "Tensor?[] scales, Tensor?[] biases, int[] formats, int[] columns, int num_heads, int activation, " PAGED_CACHE
         ", Tensor slot_mapping, Tensor block_tables, Tensor context_lens, Tensor cu_seqlens_q, int num_decodes, " PAGED_RULE ") -> Tensor",
         decoder_layer);
}

}  // namespace
}  // namespace paged

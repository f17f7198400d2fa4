"""Paged attention cases for kernel tests: poisoned caches, shuffled block tables, and an oracle written for reading."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from paged_backend import kernels

# Absolute and relative. float32 sums in another order; half precisions round the weights and the output once each.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
QUANTISED_RANGE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@dataclass
class Case:
    """Sequences in a paged cache: what a kernel gets, with NaN in every slot that no token of theirs fills."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_tables: torch.Tensor
    cu_seqlens_q: torch.Tensor
    context_lens: torch.Tensor
    options: dict = field(default_factory=dict)

    @property
    def cache(self) -> kernels.LayerCache:
        return self.values(kernels)[0]

    @property
    def decode_arguments(self) -> tuple:
        cache, sequences, variant = self.values(kernels)
        return self.query, cache, sequences._replace(cu_seqlens_q=None), variant

    @property
    def prefill_arguments(self) -> tuple:
        return self.query, *self.values(kernels)

    def values(self, classes: Any) -> tuple:
        """Cache, sequences and variant as instances of these classes."""
        window, chunk, *others = (self.options.get(name) for name in ("window", "chunk", "softcap", "sinks"))
        kind = "full" if window is chunk is None else "chunk" if window is None else "window"
        return (
            classes.LayerCache(
                self.key_cache, self.value_cache, self.options.get("key_scale"), self.options.get("value_scale")
            ),
            classes.Sequences(self.block_tables, self.context_lens, cu_seqlens_q=self.cu_seqlens_q),
            classes.AttentionVariant(self.options["scale"], classes.MaskRule(kind, (window or chunk or 0)), *others),
        )


def make_case(
    context_lens: list[int],
    query_lens: list[int] | None = None,
    *,
    group: int = 1,
    num_kv_heads: int = 2,
    key_dim: int = 64,
    value_dim: int | None = None,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    sinks: bool = False,
    seed: int = 0,
    **options: float | int | None,
) -> Case:
    """Draws a case; `query_lens` None means decode, one query for each sequence, even an empty one.

    Entries of the block tables that no query may follow (past the context, or before the window or chunk of every
    query) are -1 or, every other one, a block that holds NaN.
    """
    generator = torch.Generator().manual_seed(seed)
    value_dim = key_dim if value_dim is None else value_dim
    cache_dtype = dtype if cache_dtype is None else cache_dtype
    window, chunk = options.get("window"), options.get("chunk")
    queries = [1] * len(context_lens) if query_lens is None else query_lens
    widest = max(-(-length // block_size) for length in context_lens) + 2
    num_blocks = sum(-(-length // block_size) for length in context_lens) + 3
    shuffled = torch.randperm(num_blocks, generator=generator).tolist()
    poisoned = shuffled.pop()

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    scales = {}
    caches = {}
    for name, dim in (("key", key_dim), ("value", value_dim)):
        quantised = cache_dtype in QUANTISED_RANGE
        caches[name] = torch.full((num_blocks, num_kv_heads, block_size, dim), math.nan, dtype=torch.float32)
        if quantised:
            caches[name].zero_()
            scales[name] = torch.full((num_blocks, num_kv_heads, block_size), math.nan)
        caches[name] = caches[name].to(cache_dtype)
    tables = torch.full((len(context_lens), widest), -1, dtype=torch.int32)
    tables[:, ::2] = poisoned
    for row, (length, num_queries) in enumerate(zip(context_lens, queries, strict=True)):
        needed = [
            any(
                is_visible(position, j, window, chunk)
                for position in range(max(length - num_queries, 0), length)
                for j in range(entry * block_size, min((entry + 1) * block_size, length))
            )
            for entry in range(-(-length // block_size))
        ]
        for entry, visited in enumerate(needed):
            if not visited:
                continue
            block = shuffled.pop()
            tables[row, entry] = block
            filled = min(block_size, length - entry * block_size)
            for name, cache in caches.items():
                tokens = draw(num_kv_heads, filled, cache.shape[3])
                if name in scales:
                    scale = tokens.abs().amax(-1) / QUANTISED_RANGE[cache_dtype]
                    scales[name][block, :, :filled] = scale
                    tokens = tokens / scale[..., None]
                    tokens = tokens.round() if cache_dtype == torch.int8 else tokens
                cache[block, :, :filled] = tokens.to(cache_dtype)
    total = sum(queries)
    num_heads = num_kv_heads * group
    # Heads first in memory, as a model's projections leave them.
    query = draw(num_heads, total, key_dim).to(dtype).transpose(0, 1)
    cu_seqlens_q = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    options = {"scale": key_dim**-0.5, **options}
    if sinks:
        options["sinks"] = draw(num_heads)
    for name, scale in scales.items():
        options[f"{name}_scale"] = scale
    return Case(
        query,
        caches["key"],
        caches["value"],
        tables,
        cu_seqlens_q,
        torch.tensor(context_lens, dtype=torch.int32),
        options,
    )


def is_visible(position: int, key_position: int, window: int | None, chunk: int | None) -> bool:
    if key_position > position:
        return False
    if window is not None and position - key_position >= window:
        return False
    return chunk is None or position // chunk == key_position // chunk


def oracle(case: Case, **changes) -> torch.Tensor:
    """The attention of a case, one query token at a time, in float32.

    `changes` override the case's options, to see that a comparison would notice; `kv_head_of` replaces the rule that
    maps a query head to its KV head.
    """
    options = {**case.options, **changes}
    window, chunk, softcap, sinks = (options.get(name) for name in ("window", "chunk", "softcap", "sinks"))
    num_heads = case.query.shape[1]
    group = num_heads // case.key_cache.shape[1]
    kv_head_of = options.get("kv_head_of", lambda head: head // group)
    kv_heads = [kv_head_of(head) for head in range(num_heads)]
    block_size = case.key_cache.shape[2]
    keys, values = case.key_cache.float(), case.value_cache.float()
    if "key_scale" in options:
        keys = keys * options["key_scale"][..., None]
        values = values * options["value_scale"][..., None]
    output = torch.zeros(case.query.shape[0], num_heads, case.value_cache.shape[3])
    starts = case.cu_seqlens_q.tolist()
    for row, context_len in enumerate(case.context_lens.tolist()):
        table = case.block_tables[row].tolist()
        num_queries = starts[row + 1] - starts[row]
        for i in range(num_queries):
            position = context_len - num_queries + i
            seen = [j for j in range(context_len) if is_visible(position, j, window, chunk)]
            if not seen:
                continue
            blocks = [table[j // block_size] for j in seen]
            offsets = [j % block_size for j in seen]
            # [tokens seen, num_heads, dim], and scores [tokens seen, num_heads].
            key, value = (cache[blocks, :, offsets][:, kv_heads] for cache in (keys, values))
            scores = (key * case.query[starts[row] + i].float()).sum(-1) * options["scale"]
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat((scores, sinks.float()[None]))
            weights = torch.softmax(scores, 0)[: len(seen)]
            output[starts[row] + i] = (weights[..., None] * value).sum(0)
    return output


def rounded(tensor: torch.Tensor, dtype: torch.dtype, backend: str) -> torch.Tensor:
    """A float32 tensor in another dtype; Triton's interpreter, unlike its compiler, truncates to bfloat16."""
    if backend == "triton" and dtype == torch.bfloat16:
        tensor = tensor.contiguous().view(torch.int32).bitwise_and(-65536).view(torch.float32)
    return tensor.to(dtype)


def assert_attention_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compares with the tolerance of the actual dtype; NaN anywhere fails."""
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.float(), expected, atol=tolerance, rtol=tolerance)

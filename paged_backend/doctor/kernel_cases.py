"""Small drawn cases of every operation: ragged sequences, grouped heads, windows, half precisions, quantised caches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paged_backend.kernels import FULL, QUANTISED_MAX, AttentionVariant, LayerCache, MaskRule, Sequences
from paged_backend.kernels.dispatch import REFERENCE

# Tokens of each sequence, and how many of the last are queries of a prefill. A context of 0 is a padding row.
_CONTEXTS, _QUERIES = (1, 17, 0, 40), (1, 17, 0, 9)
_KV_HEADS = 2


@dataclass(frozen=True)
class Shape:
    """What a round of cases has in common."""

    dtype: torch.dtype = torch.float32
    mask: MaskRule = FULL
    group: int = 1
    dim: int = 64
    value_dim: int = 64
    block_size: int = 16
    softcap: float | None = None
    sinks: bool = False
    cache_dtype: torch.dtype | None = None

    def __str__(self) -> str:
        words = [str(self.dtype), f"{self.mask}", f"{self.group} heads a KV head", f"dim {self.dim}"]
        if self.cache_dtype is not None:
            words.append(f"cache {self.cache_dtype}")
        return ", ".join(words).replace("torch.", "")


# Each feature at least once, not all with all; the softcap so low that in half precision too it shows.
ROUNDS = (
    Shape(group=3),
    Shape(torch.bfloat16, group=3),
    Shape(torch.float16, MaskRule("window", 9), group=4, dim=80, value_dim=80),
    Shape(mask=MaskRule("window", 9), group=2, dim=24, value_dim=40, block_size=8),
    Shape(torch.bfloat16, MaskRule("chunk", 16), group=2, dim=128, value_dim=128, block_size=32, softcap=2, sinks=True),
    Shape(group=3, cache_dtype=torch.int8),
)


@dataclass(frozen=True)
class Case:
    """Arguments of an operation, in the order in which a backend's function takes them, on the CPU."""

    operation: str
    shape: Shape
    arguments: tuple[Any, ...]


def cases() -> Iterator[Case]:
    """Yields every operation's first case, then every operation's second, and so on."""
    for number, shape in enumerate(ROUNDS):
        draw = _Draw(shape, number)
        for operation, arguments in (
            ("store_kv", draw.stored()),
            ("rotary_store_kv", draw.rotated()),
            ("decode_attention", draw.attention([1 if length else 0 for length in _CONTEXTS])),
            ("prefill_attention", draw.attention(_QUERIES)),
            ("rms_norm", (draw.tokens(5, 80), draw.tokens(80), 1e-5, number % 2 == 1)),
            ("add_rms_norm", (draw.tokens(5, 80), draw.tokens(5, 80), draw.tokens(80), 1e-5, number % 2 == 1)),
            (
                "gated_activation",
                (draw.tokens(5, 96), draw.tokens(5, 96), ("silu", "gelu_tanh", "gelu")[number % 3]),
            ),
            ("linear", (draw.tokens(9, 48), draw.tokens(70, 48) / 7, draw.tokens(70))),
            ("gated_delta_update", draw.gated_delta()),
            ("selective_state_update", draw.selective_state()),
            ("first_argmax", (draw.scores(),)),
        ):
            yield Case(operation, shape, arguments)


class _Draw:
    """Draws the arguments of a round, the same ones on every machine."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self._shape = shape
        self._generator = torch.Generator().manual_seed(seed)

    def numbers(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator)

    def tokens(self, *shape: int) -> torch.Tensor:
        """In the round's dtype; with heads, those first in memory, as a model's projections leave them."""
        if len(shape) == 3:
            return self.numbers(shape[1], shape[0], shape[2]).to(self._shape.dtype).transpose(0, 1)
        return self.numbers(*shape).to(self._shape.dtype)

    def permutation(self, size: int) -> torch.Tensor:
        return torch.randperm(size, generator=self._generator)

    def empty_cache(self, num_blocks: int) -> LayerCache:
        """A cache with NaN in every slot, of which a kernel may read none that it has not filled."""
        shape = self._shape
        slots = (num_blocks, _KV_HEADS, shape.block_size)
        dtype = shape.cache_dtype or shape.dtype
        nothing = 0.0 if dtype in QUANTISED_MAX else math.nan
        key, value = (torch.full((*slots, dim), nothing, dtype=dtype) for dim in (shape.dim, shape.value_dim))
        if dtype not in QUANTISED_MAX:
            return LayerCache(key, value)
        return LayerCache(key, value, torch.full(slots, math.nan), torch.full(slots, math.nan))

    def stored(self) -> tuple[Any, ...]:
        """Key, value, cache and slots, one of which is a padding token's."""
        cache = self.empty_cache(3)
        slots = self.permutation(3 * self._shape.block_size)[:9]
        slots[4] = -1
        key, value = self.tokens(9, _KV_HEADS, cache.key_dim), self.tokens(9, _KV_HEADS, cache.value_dim)
        return key, value, cache, slots

    def rotated(self) -> tuple[Any, ...]:
        key, value, cache, slots = self.stored()
        angles = self.numbers(9, cache.key_dim // 2).repeat(1, 2)
        cos, sin = (turned.to(key.dtype) for turned in (angles.cos(), angles.sin()))
        query = self.tokens(9, _KV_HEADS * self._shape.group, cache.key_dim)
        return query, key, value, cos, sin, cache, slots, False

    def attention(self, query_lens: Sequence[int]) -> tuple[Any, ...]:
        """Query, cache, sequences and variant; blocks lie in any order, and table entries past a context are -1."""
        shape = self._shape
        counts = [-(-length // shape.block_size) for length in _CONTEXTS]
        cache = self.empty_cache(sum(counts) + 1)
        blocks = self.permutation(sum(counts) + 1).tolist()
        tables = torch.full((len(_CONTEXTS), max(counts) + 1), -1, dtype=torch.int32)
        for row, (length, count) in enumerate(zip(_CONTEXTS, counts, strict=True)):
            for entry in range(count):
                tables[row, entry] = blocks.pop()
            positions = torch.arange(length)
            slots = tables[row, positions // shape.block_size].long() * shape.block_size + positions % shape.block_size
            tokens = [self.tokens(length, _KV_HEADS, dim) for dim in (cache.key_dim, cache.value_dim)]
            REFERENCE.functions["store_kv"](*tokens, cache, slots)
        is_decode = max(query_lens) == 1
        # A decode has a row for the padding too.
        num_queries = len(_CONTEXTS) if is_decode else sum(query_lens)
        query = self.tokens(num_queries, _KV_HEADS * shape.group, cache.key_dim)
        starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32)
        sequences = Sequences(
            tables, torch.tensor(_CONTEXTS, dtype=torch.int32), cu_seqlens_q=None if is_decode else starts
        )
        sinks = self.numbers(query.shape[1]) if shape.sinks else None
        return query, cache, sequences, AttentionVariant(cache.key_dim**-0.5, shape.mask, shape.softcap, sinks)

    def gated_delta(self) -> tuple[Any, ...]:
        heads = 2 * self._shape.group
        query, key = self.tokens(3, 2, 24), self.tokens(3, 2, 24)
        state, slots_in, slots_out = self._pool(heads, 24, 40)
        g, beta = -self.numbers(3, heads).abs(), self.numbers(3, heads).sigmoid()
        return query, key, self.tokens(3, heads, 40), g, beta, state, slots_in, slots_out, True

    def selective_state(self) -> tuple[Any, ...]:
        heads = 2 * self._shape.group
        state, slots_in, slots_out = self._pool(heads, 24, 40)
        x, z = self.tokens(3, heads, 24), self.tokens(3, heads, 24)
        dt, rates, factors, bias = self.numbers(3, heads), *self.numbers(3, heads)
        row, column = self.tokens(3, 2, 40), self.tokens(3, 2, 40)
        return state, x, dt, -rates.abs(), row, column, factors, z, bias, slots_in, slots_out, True

    def _pool(self, *shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """States of three sequences, the slots they are read from, and those that the next ones are written to."""
        slots = self.permutation(7)
        state = torch.full((7, *shape), math.nan)
        state[slots[:3]] = self.numbers(3, *shape)
        return state, slots[:3], slots[3:6]

    def scores(self) -> torch.Tensor:
        """Rows of which one has its maximum twice, and one NaN."""
        scores = self.tokens(4, 300)
        scores[1, 70] = scores[1, 290] = 9
        scores[2, 5] = math.nan
        return scores

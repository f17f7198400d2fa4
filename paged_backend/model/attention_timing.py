"""AttentionTiming: how long a model's attention takes at a given block size, measured on the devices themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np
import torch

from paged_backend.errors import ConfigError
from paged_backend.kernels import AttentionVariant, Backend, store_kv
from paged_backend.memory.cache_sizing import memory_of
from paged_backend.memory.kv_cache import KVCache, LayerSpec
from paged_backend.memory.kv_group import KVGroup
from paged_backend.model.attention import ForwardContext, PagedLayer
from paged_backend.model.batch import build_batch

# The share of a device's memory that the blocks of one measurement may take; all sizes are kept, to be timed in turn.
MEMORY_SHARE = 1 / 32


class AttentionTiming:
    """Times the attention of ``layers`` on blocks as an engine would have them, scattered and full.

    Layers that are alike (shape, dtype, device, mask rule) are timed once and count as often as they are there. What a
    measurement needs is made once and kept, so that block sizes can be measured in turn, several times each.

    time_limit_s: wall seconds that one measurement may take, beside its first run, which may have to compile a kernel,
    and a run of each kind of layer, which it takes at least.

    Every answer is in seconds, the fastest of a few runs, summed over all layers. Raises ConfigError where there is no
    memory for as many tokens.
    """

    def __init__(
        self, layers: Sequence[LayerSpec], kv_dtype: torch.dtype | None, backend: Backend, *, time_limit_s: float
    ) -> None:
        self._kinds = Counter(replace(layer, name="") for layer in layers)
        self._kv_dtype = kv_dtype
        self._backend = backend
        self._time_limit_s = time_limit_s
        self._runs: dict[tuple[object, ...], Callable[[], object]] = {}

    def decode_seconds(self, block_size: int, context_len: int, num_seqs: int) -> float:
        """A step of ``num_seqs`` requests with ``context_len`` tokens each, the new one included, which is stored."""
        return self._seconds(self._attention, block_size, context_len, num_seqs, 0)

    def prefill_seconds(self, block_size: int, context_len: int, num_tokens: int) -> float:
        """A prompt's chunk of ``num_tokens`` that ends at ``context_len``, which is stored."""
        return self._seconds(self._attention, block_size, context_len, 1, num_tokens)

    def store_seconds(self, block_size: int, context_len: int, num_tokens: int) -> float:
        """Storing the keys and values of such a chunk, which is part of its prefill."""
        return self._seconds(self._storing, block_size, context_len, 1, num_tokens)

    @torch.inference_mode()
    def _seconds(self, prepare: Callable[..., Callable[[], object]], *case: int) -> float:
        total = 0.0
        for kind, count in self._kinds.items():
            key = (prepare.__name__, kind, *case)
            if key not in self._runs:
                self._runs[key] = prepare(kind, *case)
                _time(self._runs[key], kind.device)
            run, end = self._runs[key], perf_counter() + self._time_limit_s / len(self._kinds)
            fastest = _time(run, kind.device)
            while perf_counter() < end:
                fastest = min(fastest, _time(run, kind.device))
            total += count * fastest
        return total

    def _attention(
        self, layer: LayerSpec, block_size: int, context_len: int, num_seqs: int, chunk: int
    ) -> Callable[[], object]:
        paged = self._paged(layer, block_size, context_len, num_seqs, chunk)
        query, key, value = _draw(layer, chunk or num_seqs)
        variant = AttentionVariant(layer.key_dim**-0.5, layer.rule)
        return lambda: paged.attend(query, key, value, variant)

    def _storing(
        self, layer: LayerSpec, block_size: int, context_len: int, num_seqs: int, chunk: int
    ) -> Callable[[], object]:
        paged = self._paged(layer, block_size, context_len, num_seqs, chunk)
        _, key, value = _draw(layer, chunk or num_seqs)
        batch = paged.context.batch
        assert batch is not None
        slots = batch.groups[0].slot_mapping
        return lambda: store_kv(key, value, paged.cache, slots, backend=self._backend)

    def _paged(self, layer: LayerSpec, block_size: int, context_len: int, num_seqs: int, chunk: int) -> PagedLayer:
        """One layer over full blocks in random order, in a step of decodes, or of one chunk if that is not 0."""
        width = -(-context_len // block_size)
        num_blocks = width * num_seqs
        group = KVGroup(layer.rule, (0,), layer.bytes_per_token(self._kv_dtype))
        size, memory = num_blocks * block_size * group.bytes_per_token, memory_of([layer.device])
        if memory is not None and size > memory * MEMORY_SHARE:
            raise ConfigError(
                f"{num_seqs} requests of {context_len} tokens take {size:,} bytes in one layer, too many to be timed; "
                "time fewer or shorter requests"
            )
        cache = KVCache([layer], [group], [num_blocks], block_size, self._kv_dtype)
        for tensor in cache.layers[0].tensors():
            tensor.copy_(torch.ones((), dtype=torch.float32, device=tensor.device))
        tables = np.random.default_rng(0).permutation(num_blocks).astype(np.int32).reshape(num_seqs, width)
        context = ForwardContext(self._backend)
        decodes = [] if chunk else [context_len - 1] * num_seqs
        chunks, starts = ([[0] * chunk], [context_len - chunk]) if chunk else ([], [])
        context.batch = build_batch(
            [0] * len(decodes), decodes, chunks, starts, [0] * len(chunks), [tables], block_size, layer.device
        )
        return PagedLayer(context, cache.layers[0], 0, layer.rule)


def _draw(layer: LayerSpec, num_tokens: int) -> tuple[torch.Tensor, ...]:
    """A query, a key and a value of so many tokens."""
    shapes = (
        (layer.num_heads, layer.key_dim),
        (layer.num_kv_heads, layer.key_dim),
        (layer.num_kv_heads, layer.value_dim),
    )
    return tuple(torch.randn(num_tokens, *shape, device=layer.device).to(layer.dtype) for shape in shapes)


def _time(run: Callable[[], object], device: torch.device) -> float:
    start = perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter() - start

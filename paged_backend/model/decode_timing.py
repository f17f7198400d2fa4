"""decode_seconds: how long one layer's decode attention takes at a given block size, measured on the device itself."""

from __future__ import annotations

from time import perf_counter

import numpy as np
import torch

from paged_backend.kernels import AttentionVariant, Backend
from paged_backend.memory.kv_cache import KVCache, LayerSpec
from paged_backend.memory.kv_group import KVGroup
from paged_backend.model.attention import ForwardContext, PagedLayer
from paged_backend.model.batch import build_batch

# Wall seconds that one measurement may take beside its first run, which may have to compile a kernel.
TIME_LIMIT_S = 0.05


@torch.inference_mode()
def decode_seconds(
    layer: LayerSpec, kv_dtype: torch.dtype | None, backend: Backend, block_size: int, context_len: int, num_seqs: int
) -> float:
    """The fastest of a few runs for ``num_seqs`` sequences of ``context_len`` tokens in scattered blocks."""
    width = -(-context_len // block_size)
    group = KVGroup(layer.rule, (0,), layer.bytes_per_token(kv_dtype))
    cache = KVCache([layer], [group], [width * num_seqs], block_size, kv_dtype)
    for tensor in cache.layers[0].tensors():
        tensor.copy_(torch.ones((), dtype=torch.float32, device=tensor.device))
    tables = np.random.default_rng(0).permutation(width * num_seqs).astype(np.int32).reshape(num_seqs, width)
    context = ForwardContext(backend)
    context.batch = build_batch(
        [0] * num_seqs, [context_len - 1] * num_seqs, [], [], [], [tables], block_size, layer.device
    )

    def draw(num_heads: int, dim: int) -> torch.Tensor:
        return torch.randn(num_seqs, num_heads, dim, device=layer.device).to(layer.dtype)

    paged = PagedLayer(context, cache.layers[0], 0, layer.rule)
    variant = AttentionVariant(layer.key_dim**-0.5, layer.rule)
    query, key = draw(layer.num_heads, layer.key_dim), draw(layer.num_kv_heads, layer.key_dim)
    value = draw(layer.num_kv_heads, layer.value_dim)

    def run() -> float:
        start = perf_counter()
        paged.attend(query, key, value, variant)
        if layer.device.type == "cuda":
            torch.cuda.synchronize(layer.device)
        return perf_counter() - start

    run()
    end = perf_counter() + TIME_LIMIT_S
    fastest = run()
    while perf_counter() < end:
        fastest = min(fastest, run())
    return fastest

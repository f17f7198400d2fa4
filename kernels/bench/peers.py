"""The same attention by others: torch's SDPA and FlexAttention on contiguous keys, FlashInfer and vLLM on blocks."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from measure import Inputs, Shape


def flash_sdpa(shape: Shape, inputs: Inputs) -> Callable[[], torch.Tensor]:
    """torch's SDPA, its flash kernel where there is one; without a window, which it takes only as a dense mask."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    if shape.window:
        raise NotImplementedError("no window")
    query = _batched(shape, inputs)
    bias = causal_lower_right(shape.query_len, shape.context) if 1 < shape.query_len < shape.context else None
    options = {"attn_mask": bias, "is_causal": shape.query_len == shape.context > 1, "enable_gqa": True}

    def run() -> torch.Tensor:
        if query.device.type == "cpu":
            return F.scaled_dot_product_attention(query, inputs.key, inputs.value, **options)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(query, inputs.key, inputs.value, **options)

    return run


def flex_attention(shape: Shape, inputs: Inputs) -> Callable[[], torch.Tensor]:
    """FlexAttention with the mask of the shape, compiled on a GPU."""
    from torch.nn.attention.flex_attention import create_block_mask
    from torch.nn.attention.flex_attention import flex_attention as attend

    query = _batched(shape, inputs)
    before, window = shape.context - shape.query_len, shape.window or shape.context

    def visible(batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= row + before) & (row + before - key < window)

    mask = create_block_mask(visible, None, None, shape.query_len, shape.context, device=query.device)
    if query.device.type == "cuda":
        attend = torch.compile(attend, dynamic=False)

    def run() -> torch.Tensor:
        with warnings.catch_warnings():
            # On a CPU it runs uncompiled, and says so.
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile", UserWarning)
            return attend(query, inputs.key, inputs.value, block_mask=mask, enable_gqa=True)

    return run


def flashinfer(shape: Shape, inputs: Inputs) -> Callable[[], torch.Tensor]:
    """FlashInfer's paged wrappers, which read our cache as it lies; planned once, as in a step of many layers."""
    import flashinfer as library

    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=inputs.query.device)
    blocks_each = inputs.sequences.block_tables.shape[1]
    starts = torch.arange(shape.batch + 1, device=inputs.query.device, dtype=torch.int32) * blocks_each
    last = torch.full_like(inputs.sequences.context_lens, (shape.context - 1) % shape.block_size + 1)
    paging = (starts, inputs.sequences.block_tables.flatten(), last)
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size)
    options = {
        "window_left": shape.window - 1 if shape.window else -1,
        "q_data_type": shape.dtype,
        "kv_data_type": inputs.cache.key.dtype,
    }
    if shape.query_len == 1:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        wrapper.plan(*paging, *heads, **options)
    else:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(inputs.sequences.cu_seqlens_q, *paging, *heads, causal=True, **options)
    return lambda: wrapper.run(inputs.query, (inputs.cache.key, inputs.cache.value))


def vllm(shape: Shape, inputs: Inputs) -> Callable[[], torch.Tensor]:
    """vLLM's unified Triton kernel, on caches laid out as it wants them."""
    try:
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    except ImportError:
        from vllm.attention.ops.triton_unified_attention import unified_attention

    key, value = (cache.transpose(1, 2).contiguous() for cache in (inputs.cache.key, inputs.cache.value))
    output = torch.empty_like(inputs.query)
    return lambda: unified_attention(
        q=inputs.query,
        k=key,
        v=value,
        out=output,
        cu_seqlens_q=inputs.sequences.cu_seqlens_q,
        max_seqlen_q=shape.query_len,
        seqused_k=inputs.sequences.context_lens,
        max_seqlen_k=shape.context,
        softmax_scale=inputs.variant.scale,
        causal=True,
        window_size=(shape.window - 1, 0) if shape.window else (-1, -1),
        block_table=inputs.sequences.block_tables,
        softcap=0.0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
    )


# FlexAttention is compiled for each shape, which takes longer than all the rest.
SLOW_TO_START = ("FlexAttention",)
PEERS = {"flash SDPA": flash_sdpa, "FlexAttention": flex_attention, "FlashInfer": flashinfer, "vLLM": vllm}


def _batched(shape: Shape, inputs: Inputs) -> torch.Tensor:
    """The queries as [batch, num_heads, query_len, head_dim]."""
    return inputs.query.view(shape.batch, shape.query_len, shape.num_heads, shape.head_dim).transpose(1, 2)

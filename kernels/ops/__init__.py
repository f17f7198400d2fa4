"""Operations on a paged KV cache, one file each, with the plain-torch reference beside the kernels that equal it."""

from paged_backend.kernels import cpu
from paged_backend.kernels.copy_blocks import copy_blocks
from paged_backend.kernels.decode_attention import decode_attention
from paged_backend.kernels.dispatch import implementations
from paged_backend.kernels.first_argmax import first_argmax
from paged_backend.kernels.gated_activation import gelu_mul, silu_mul
from paged_backend.kernels.prefill_attention import prefill_attention
from paged_backend.kernels.rms_norm import add_rms_norm, rms_norm
from paged_backend.kernels.rotary_store_kv import rotary_store_kv
from paged_backend.kernels.store_kv import store_kv

__all__ = [
    "add_rms_norm",
    "copy_blocks",
    "cpu",
    "decode_attention",
    "first_argmax",
    "gelu_mul",
    "implementations",
    "prefill_attention",
    "rms_norm",
    "rotary_store_kv",
    "silu_mul",
    "store_kv",
]

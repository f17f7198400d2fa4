"""Operations on a paged KV cache, one file each, with the plain-torch reference beside the kernels that equal it."""

from paged_backend.kernels.copy_blocks import copy_blocks
from paged_backend.kernels.decode_attention import decode_attention
from paged_backend.kernels.dispatch import implementations
from paged_backend.kernels.prefill_attention import prefill_attention
from paged_backend.kernels.store_kv import store_kv

__all__ = ["copy_blocks", "decode_attention", "implementations", "prefill_attention", "store_kv"]

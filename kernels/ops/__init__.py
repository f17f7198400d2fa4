"""Operations on paged KV caches and recurrent state: a file each for contract and reference, a folder for a backend."""

from paged_backend.kernels import cpu, triton
from paged_backend.kernels.attention_variant import AttentionVariant
from paged_backend.kernels.copy_blocks import copy_blocks
from paged_backend.kernels.decode_attention import decode_attention
from paged_backend.kernels.dispatch import AUTO, Backend, backends, preferred, register
from paged_backend.kernels.first_argmax import first_argmax
from paged_backend.kernels.gated_activation import gelu_mul, silu_mul
from paged_backend.kernels.gated_delta_update import gated_delta_update
from paged_backend.kernels.kv_layout import QUANTISED_MAX, LayerCache, empty_cache
from paged_backend.kernels.mask_rule import FULL, MaskRule
from paged_backend.kernels.prefill_attention import prefill_attention
from paged_backend.kernels.rms_norm import add_rms_norm, rms_norm
from paged_backend.kernels.rotary_store_kv import rotary_store_kv
from paged_backend.kernels.selective_state_update import selective_state_update
from paged_backend.kernels.sequences import Sequences
from paged_backend.kernels.store_kv import store_kv

# A backend is a folder and a place here, the one that "auto" prefers first.
for backend in (triton.BACKEND, cpu.BACKEND):
    register(backend)

__all__ = [
    "AUTO",
    "FULL",
    "QUANTISED_MAX",
    "AttentionVariant",
    "Backend",
    "LayerCache",
    "MaskRule",
    "Sequences",
    "add_rms_norm",
    "backends",
    "copy_blocks",
    "cpu",
    "decode_attention",
    "empty_cache",
    "first_argmax",
    "gated_delta_update",
    "gelu_mul",
    "preferred",
    "prefill_attention",
    "rms_norm",
    "rotary_store_kv",
    "selective_state_update",
    "silu_mul",
    "store_kv",
    "triton",
]

"""The backend "triton": operations as kernels for NVIDIA and AMD GPUs. Triton itself is found by `support`."""

from paged_backend.kernels.dispatch import Backend
from paged_backend.kernels.triton.decode_attention import decode_attention
from paged_backend.kernels.triton.gated_activation import gated_activation
from paged_backend.kernels.triton.gated_delta_update import gated_delta_update
from paged_backend.kernels.triton.prefill_attention import prefill_attention
from paged_backend.kernels.triton.rms_norm import add_rms_norm, rms_norm
from paged_backend.kernels.triton.rotary_store_kv import rotary_store_kv
from paged_backend.kernels.triton.selective_state_update import selective_state_update
from paged_backend.kernels.triton.store_kv import store_kv
from paged_backend.kernels.triton.support import unavailable

BACKEND = Backend(
    "triton",
    {
        "add_rms_norm": add_rms_norm,
        "decode_attention": decode_attention,
        "gated_activation": gated_activation,
        "gated_delta_update": gated_delta_update,
        "prefill_attention": prefill_attention,
        "rms_norm": rms_norm,
        "rotary_store_kv": rotary_store_kv,
        "selective_state_update": selective_state_update,
        "store_kv": store_kv,
    },
    devices=("cuda",),
    unavailable=unavailable,
)

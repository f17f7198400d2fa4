"""The operations in C++ for a CPU, compiled on first use; see `loader`."""

from paged_backend.kernels.cpu.advice import faster, running
from paged_backend.kernels.cpu.arena import Arena, reserve
from paged_backend.kernels.cpu.loader import UnavailableWarning, is_available, library
from paged_backend.kernels.cpu.operations import BACKEND, rule_arguments
from paged_backend.kernels.cpu.packed_linear import (
    GELU_GATE,
    SILU_GATE,
    PackedLinear,
    most_rows,
    pack,
    pack_gated,
)
from paged_backend.kernels.cpu.quantised_weight import (
    FORMATS,
    Format,
    QuantisedLinear,
    QuantisedWeight,
    from_gguf,
    int4,
)

__all__ = [
    "BACKEND",
    "FORMATS",
    "GELU_GATE",
    "SILU_GATE",
    "Arena",
    "Format",
    "PackedLinear",
    "QuantisedLinear",
    "QuantisedWeight",
    "UnavailableWarning",
    "faster",
    "from_gguf",
    "int4",
    "is_available",
    "library",
    "most_rows",
    "pack",
    "pack_gated",
    "reserve",
    "rule_arguments",
    "running",
]

"""EngineConfig: every option of an engine, checked once."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from numbers import Integral
from typing import TYPE_CHECKING, Any

from paged_backend.checks import checked_flag, checked_int, describe
from paged_backend.errors import ConfigError

if TYPE_CHECKING:
    import torch

# What torch calls them; torch takes seconds to import, which checking a config need not wait for.
KV_DTYPES = {
    "auto": None,
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "int8": "int8",
    "fp8": "float8_e4m3fn",
}
BATCHING = ("auto", "shared", "separate")
OPTIMIZE = ("auto", "memory", "none")
# What `optimize` may be a list of, the largest first.
SWAPS = ("layer", "mlp", "linear", "norm", "state")
# What weights are rounded to, in bits.
QUANTIZED_BITS = {"int8": 8, "int4": 4}
QUANTIZE = (None, *QUANTIZED_BITS)
MAX_BLOCK_SIZE = 4096
# A seat in the block tables is kept for each request that may run.
MAX_NUM_SEQS = 16384
# Positions and lengths are 32-bit numbers on a device.
MAX_TOKENS = 2**31 - 1
_COUNTS = {
    "max_num_seqs": (1, MAX_NUM_SEQS),
    "max_num_batched_tokens": (1, MAX_TOKENS),
    "max_model_len": (2, MAX_TOKENS),
    "max_waiting": (1, 2**63 - 1),
    "seed": (-(2**63), 2**64 - 1),
}
_OPTIONAL = ("max_model_len", "max_waiting", "seed")
_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True)
class EngineConfig:
    """Options of an engine. A value that cannot be used raises ConfigError here, naming the field and the fix.

    block_size: tokens per block, or the name of a registered rule, ``"module:attribute"`` or a callable
        ``(ModelShape, torch.device) -> int``.
    kv_cache_memory: bytes for keys and values: an int, a string such as ``"2GiB"``, or a fraction (0, 1) of a GPU's
        free memory; at most the device's memory, and at most 4,194,304 blocks. None takes what ``max_num_seqs``
        sequences of full length need, at most 2 GiB. Of a model with recurrent state, half of it at most is for the
        states of running requests, of which fewer run at once where it holds fewer; None allows them 4 GiB more.
    snapshot_memory: bytes for recurrent states that are kept for prompts which begin alike, on top; an int or a string.
        None takes an eighth of ``kv_cache_memory``, or 512 MiB.
    kv_dtype: ``auto`` stores the model's own dtype; float16, bfloat16, int8 and fp8 (e4m3) take less.
    max_num_seqs: requests that run at once, at most 16,384.
    max_num_batched_tokens: prefill tokens of one step; decodes come on top.
    max_model_len: most tokens of a request, prompt and output, at least 2; None takes the model's own limit.
    max_waiting: waiting requests beyond which new ones are refused; None does not limit.
    scheduler, eviction: a policy's registered name, ``"module:attribute"``, class or instance, with its options.
    enable_prefix_caching: reuse the blocks of equal prompt beginnings, and of finished requests.
    batching: ``shared`` runs decodes and prefill chunks in one forward pass, ``separate`` in two; ``auto`` chooses.
    attention_backend: which kernels attend: ``triton``, ``cpu`` (C++), ``reference`` (plain torch) or ``auto``.
    optimize: ``auto`` replaces modules of the engine's copy by equal ones in C++, on a CPU, which takes memory for a
        rearranged copy of the weights; ``memory`` only where no weights are copied; ``none`` leaves all as it is. A
        list of kinds, of ``layer``, ``mlp``, ``linear``, ``norm`` and ``state``, replaces only those.
    quantize: ``int8`` rounds weights to 8 bits, per output channel, which halves what a token reads; ``int4`` to 4 bits
        in groups of 32, with a scale and, where that helps, a minimum; on a CPU.

    strict_policies: a policy that breaks its contract raises PluginError instead of being passed over.
    seed: where the random streams of requests without a seed of their own start; None draws it afresh.
    """

    block_size: Any = 16
    kv_cache_memory: int | float | str | None = None
    snapshot_memory: int | str | None = None
    kv_dtype: str = "auto"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    max_waiting: int | None = None
    scheduler: Any = "fifo"
    scheduler_options: Mapping[str, Any] = field(default_factory=dict)
    eviction: Any = "lru"
    eviction_options: Mapping[str, Any] = field(default_factory=dict)
    enable_prefix_caching: bool = True
    batching: str = "auto"
    attention_backend: str = "auto"
    optimize: str | Sequence[str] = "auto"
    quantize: str | None = None
    strict_policies: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, (low, high) in _COUNTS.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                object.__setattr__(self, name, checked_int(name, value, low, high))
        if isinstance(self.block_size, Integral):
            object.__setattr__(self, "block_size", check_block_size(self.block_size))
        elif not isinstance(self.block_size, str) and not callable(self.block_size):
            raise ConfigError(
                f"block_size must be an int, a rule's name or a callable, got {describe(self.block_size)}"
            )
        if self.kv_cache_memory is not None:
            parse_memory(self.kv_cache_memory)
        if self.snapshot_memory is not None:
            parse_bytes("snapshot_memory", self.snapshot_memory)
        _require_choice("kv_dtype", self.kv_dtype, KV_DTYPES)
        _require_choice("batching", self.batching, BATCHING)
        if not isinstance(self.optimize, str) or self.optimize not in OPTIMIZE:
            object.__setattr__(self, "optimize", _checked_swaps(self.optimize))
        if self.quantize not in QUANTIZE:
            raise ConfigError(f"quantize={self.quantize!r} is unknown; choose from {QUANTIZE}")
        if self.quantize is not None and self.optimize == "none":
            raise ConfigError(
                f"quantize={self.quantize!r} replaces modules of the engine's copy, and optimize='none' leaves all as "
                "they are; use optimize='auto', or quantize=None"
            )
        for name in ("enable_prefix_caching", "strict_policies"):
            checked_flag(name, getattr(self, name))
        if not isinstance(self.attention_backend, str):
            raise ConfigError(
                f"attention_backend must be a name such as 'auto', got {describe(self.attention_backend)}"
            )
        for name in ("scheduler", "eviction"):
            if not isinstance(getattr(self, f"{name}_options"), Mapping):
                raise ConfigError(f"{name}_options must be a mapping, got {getattr(self, f'{name}_options')!r}")

    @classmethod
    def from_options(cls, options: EngineConfig | Mapping[str, Any] | None = None, **more: Any) -> EngineConfig:
        """A config from a mapping of field names, or an existing config with some fields replaced."""
        if options is None:
            options = {}
        if isinstance(options, EngineConfig):
            values = {f.name: getattr(options, f.name) for f in dataclasses.fields(cls)}
        elif isinstance(options, Mapping):
            values = dict(options)
        else:
            raise ConfigError(f"engine options must be a mapping or an EngineConfig, got {type(options).__name__}")
        values.update(more)
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ConfigError(f"unknown engine option {unknown[0]!r}; choose from {', '.join(sorted(known))}")
        return cls(**values)

    @property
    def kv_torch_dtype(self) -> torch.dtype | None:
        """The cache's dtype, or None for each layer's own."""
        import torch

        name = KV_DTYPES[self.kv_dtype]
        return None if name is None else getattr(torch, name)


_SIZES = "bytes (an int), a size such as '512MiB' or '2GiB'"
_FRACTIONS = "a fraction of a GPU between 0 and 1"


def parse_memory(value: Any) -> int | float:
    """Bytes as an int, or a fraction of a GPU's free memory as a float in (0, 1).

    Raises ConfigError for anything else.
    """
    if isinstance(value, float):
        if 0 < value < 1:
            return value
        kind = "a fraction" if value >= 1 else "usable"
        raise ConfigError(f"kv_cache_memory={describe(value)} is not {kind}; give {_SIZES}, or {_FRACTIONS}")
    return parse_bytes("kv_cache_memory", value, f", or {_FRACTIONS}")


def parse_bytes(name: str, value: Any, more: str = "") -> int:
    """Bytes as an int, of an int above 0 or a size in words. Raises ConfigError for anything else, naming ``name``."""
    number = value
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([A-Za-z]*)\s*", value)
        if not match or match[2].upper() not in _UNITS:
            raise ConfigError(f"{name}={describe(value)} is not a size; give {_SIZES}{more}")
        number = int(Fraction(match[1]) * _UNITS[match[2].upper()])
    if isinstance(number, Integral) and not isinstance(number, bool) and 0 < int(number) < 2**63:
        return int(number)
    raise ConfigError(f"{name}={describe(value)} is not usable; give {_SIZES}{more}")


def check_block_size(value: Any, source: str = "block_size") -> int:
    """The value if it is a usable number of tokens per block, else ConfigError naming ``source``."""
    return checked_int(source, value, 1, MAX_BLOCK_SIZE)


def _checked_swaps(value: Any) -> tuple[str, ...]:
    if isinstance(value, (list, tuple, set, frozenset)) and value and all(kind in SWAPS for kind in value):
        return tuple(kind for kind in SWAPS if kind in value)
    raise ConfigError(f"optimize={describe(value)} is unknown; choose from {OPTIMIZE}, or list some of {SWAPS}")


def _require_choice(name: str, value: Any, allowed: Any) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"{name}={describe(value)} is unknown; choose from {', '.join(allowed)}")

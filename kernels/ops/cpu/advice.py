"""What runs a model's operations on a CPU, and what would run them faster, in words."""

from __future__ import annotations

import os

import torch

from paged_backend.kernels.cpu.loader import is_available, level, processor_level


def running() -> str:
    """What runs the operations: ``C++ (avx2)``, by the level that it is compiled for, or ``plain torch``."""
    return f"C++ ({level()})" if is_available() else "plain torch"


def faster(dtype: torch.dtype | None = None, quantize: str | None = None) -> tuple[str, ...]:
    """What would be faster on this machine than what runs, most telling first, for weights of a dtype or of any."""
    if not is_available():
        return ("a C++ compiler: plain torch is several times slower than the operations in C++; `apt install g++`",)
    ways = []
    here, best = level(), processor_level()
    if here != best:
        limit = os.environ.get("ATEN_CPU_CAPABILITY")
        ways.append(f"the level {best!r}, which the processor knows: unset ATEN_CPU_CAPABILITY={limit}")
    # Where activations and weights of half precision are multiplied as they are.
    as_they_are = (torch.float32, torch.bfloat16) if here == "avx512_bf16" else (torch.float32,)
    halves = [half for half in (torch.bfloat16, torch.float16) if half not in as_they_are and dtype in (half, None)]
    if halves:
        others, names = (" or ".join(str(d).removeprefix("torch.") for d in some) for some in (as_they_are, halves))
        ways.append(
            f"dtype {others} where many requests run at once, since {here!r} multiplies no {names}, which is converted "
            f"for every step; weights that half precision holds are read as such in float32 too"
        )
    if quantize is None:
        ways.append('quantize="int8" for few requests at once, which take the time of reading the weights')
    return tuple(ways)

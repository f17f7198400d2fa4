"""The built-in block-size rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paged_backend.hookspecs import hookimpl
from paged_backend.policies import ModelShape

if TYPE_CHECKING:
    import torch

CANDIDATES = (16, 32, 64, 128)
# What a typical request is taken to be: this many tokens long, beside this many others.
CONTEXT_LEN = 512
NUM_SEQS = 8
# Differences below this are noise, and the smaller block is kept.
TOLERANCE = 0.03


def auto(shape: ModelShape, device: torch.device) -> int:
    """The block size with the cheapest token, from the model's own decode attention measured on the device.

    A request's last block is half empty on average, and as much of a shared prefix is not shared, so blocks of ``b``
    tokens cost ``1 + b / length`` times the memory and the recomputed prompts that blocks of one token would. A size is
    as good as its time times this. Takes under half a second, beside compiling kernels that were never used before.
    """
    length = min(CONTEXT_LEN, shape.max_positions or CONTEXT_LEN)
    costs = {size: shape.decode_seconds(size, length, NUM_SEQS) * (1 + size / length) for size in CANDIDATES}
    cheapest = min(costs.values())
    return next(size for size, cost in costs.items() if cost <= cheapest * (1 + TOLERANCE))


@hookimpl
def register_block_sizes(register: Callable[[str, Any], None]) -> None:
    """Offer the rules of this module."""
    register("auto", auto)

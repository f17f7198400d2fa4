"""The built-in block-size rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paged_backend.block_cost import CANDIDATES, Workload, compare, explain, in_turn, pick
from paged_backend.hookspecs import hookimpl
from paged_backend.policies import BlockSize, ModelShape

if TYPE_CHECKING:
    import torch

# How many requests decode in the step that is timed.
NUM_SEQS = 8
# Times that each size is measured, all in turn.
ROUNDS = 4


def auto(shape: ModelShape, device: torch.device) -> BlockSize:
    """The block size with the cheapest token, from the model's own decode attention measured on the device.

    A request's last block is partly empty, and what two prompts have in common is shared in whole blocks only. How much
    that is follows from requests that are taken to be typical (`Workload.typical`); a size is as good as its time times
    the slots held for a token times the tokens computed for one. ``paged-backend tune`` does the same for requests of
    your own, and looks at prompts too. Takes under half a second, beside compiling kernels that were never used before.
    """
    workload = Workload.typical(shape.max_positions)
    length = max(1, round(workload.mean_context))
    seconds = in_turn(lambda size: shape.decode_seconds(size, length, NUM_SEQS), CANDIDATES, ROUNDS)
    costs = compare(workload, seconds)
    return BlockSize(
        pick(costs).block_size,
        f"auto timed steps of {NUM_SEQS} requests of {length} tokens on {device}, and {explain(costs)}",
    )


@hookimpl
def register_block_sizes(register: Callable[[str, Any], None]) -> None:
    """Offer the rules of this module."""
    register("auto", auto)

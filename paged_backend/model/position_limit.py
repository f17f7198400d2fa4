"""How many tokens the positions of a model allow, and at which positions it may begin to compute otherwise."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


def rope_limit(model: nn.Module) -> int | None:
    """The tokens up to which RoPE that looks at the longest request of a batch keeps its original frequencies.

    The two kinds are those of transformers' ``dynamic_rope_update``; None when the model has neither.
    """
    limits = []
    module: Any
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if kind == "longrope":
                parameters = module.config.rope_parameters
                if layer_type is not None:
                    parameters = parameters[layer_type]
                limits.append(int(parameters["original_max_position_embeddings"]))
            elif isinstance(kind, str) and "dynamic" in kind:
                limits.append(int(module.original_max_seq_len))
    return min(limits, default=None)


# Positions are tried up to this one where a model states no number of them.
FAR = 1 << 20
# A number of a configuration that may tell where positions begin to count otherwise has one of these in its name.
_POSITION_WORDS = ("position", "floor", "seq_len", "context", "ctx")


def far_positions(config: Any, end: int, count: int) -> list[int]:
    """The ``count`` farthest of the positions below ``end`` at which a model may compute otherwise than before.

    Those are the last one, the numbers of the configuration that tell of positions, and the powers of two.
    """
    found = {end - 1} | {1 << power for power in range(end.bit_length())}
    pending = [config.to_dict()]
    while pending:
        for name, value in pending.pop().items():
            if isinstance(value, dict):
                pending.append(value)
            elif type(value) is int and any(word in name for word in _POSITION_WORDS):
                found |= {value - 1, value}
    far = sorted((position for position in found if 0 <= position < end), reverse=True)
    return [far[index % len(far)] for index in range(count)]


class PositionTables(TorchDispatchMode):
    """While active, notices tables that are read at ``positions``, shifted by a constant or not.

    ``limit`` is then the number of positions that the shortest of them holds, or None. ``positions`` must ascend by
    one and start above zero, so that an index over the tokens of the batch is not taken for them.

    It watches what torch's functions come to, not the functions: one in Python that was patched would be called by its
    name, and so the patch twice.
    """

    def __init__(self, positions: torch.Tensor) -> None:
        super().__init__()
        self.first, self.num_tokens = int(positions[0]), positions.numel()
        self.limit: int | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for rows, index in _look_ups(func, args):
            shift = self._shift(index)
            if shift is not None:
                self.limit = min(rows - shift, self.limit or rows)
        return func(*args, **(kwargs or {}))

    def _shift(self, index: torch.Tensor) -> int | None:
        if index.dtype not in (torch.int32, torch.int64) or index.numel() < self.num_tokens:
            return None
        # Under tensor parallelism ids come as a distributed tensor, whole on every rank.
        values = getattr(index, "to_local", lambda: index)().unique()
        first, last = int(values[0]), int(values[-1])
        shift = first - self.first
        return shift if shift >= 0 and values.numel() == self.num_tokens == last - first + 1 else None


def _look_ups(func: Any, args: Any) -> list[tuple[int, torch.Tensor]]:
    """The tables that an operation reads by index, as (number of rows, index)."""
    aten = torch.ops.aten
    if func is aten.embedding.default:
        return [(args[0].shape[0], args[1])]
    if func in (aten.gather.default, aten.index_select.default):
        return [(args[0].shape[args[1]], args[2])]
    if func in (aten.index.Tensor, aten._unsafe_index.Tensor):
        return [(args[0].shape[dim], index) for dim, index in enumerate(args[1]) if index is not None]
    return []

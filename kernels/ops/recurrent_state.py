"""What operations on recurrent state share: the pool whose slots hold the states of sequences."""

from __future__ import annotations

import torch


def check_pool(state: torch.Tensor, shape: tuple[int, ...], slots_in: torch.Tensor, slots_out: torch.Tensor) -> None:
    """Raises ValueError unless slots of `state` hold `shape` and both lists name one int64 slot a sequence.

    shape: [batch, ...], what the states of all sequences of a step would be. That slots are within the pool, and that
    none which is written is read or written by another sequence, is left to the caller: asking would wait for a GPU.
    """
    batch, held = shape[0], shape[1:]
    if state.shape[1:] != held:
        raise ValueError(f"state must be [num_slots, {', '.join(map(str, held))}], got {list(state.shape)}")
    for name, slots in (("slots_in", slots_in), ("slots_out", slots_out)):
        if slots.shape != (batch,) or slots.dtype != torch.int64:
            raise ValueError(f"{name} must be torch.int64 [{batch}], got {slots.dtype} {list(slots.shape)}")


def has_plain_slots(state: torch.Tensor) -> bool:
    """Whether kernels take the pool: float32 slots whose own elements follow each other, any distance apart."""
    return state.dtype == torch.float32 and state[:1].is_contiguous()

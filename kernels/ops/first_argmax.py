"""first_argmax: where each row's maximum first stands, which is the greedy token of a row of logits."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_backend.kernels.cpu.loader import is_loaded
from paged_backend.kernels.dispatch import Backend, implementation, reference

# Scores whose maximum is found before its place.
_BLOCK = 256


def first_argmax(scores: Tensor, *, backend: str | Backend = "auto") -> Tensor:
    """Index of the first maximum of each row ([R, V] to [R] int64), -1 for a row with NaN or nothing above -inf.

    In the scores' own dtype, which orders them as float32 would since every half-precision number is one of float32.
    "auto" is C++ on a CPU where other operations have loaded it already. Raises ValueError for an unknown backend.
    """
    if backend == "auto":
        backend = "cpu" if scores.device.type == "cpu" and is_loaded() else "reference"
    result: Tensor = implementation("first_argmax", backend, scores)(scores)
    return result


@reference("first_argmax")
def _first_argmax_reference(scores: Tensor) -> Tensor:
    """By blocks, since torch finds a maximum many times faster than its place."""
    vocab_size = scores.shape[1]
    num_blocks, rest = divmod(vocab_size, _BLOCK)
    maxima = scores[:, : num_blocks * _BLOCK].unflatten(1, (num_blocks, _BLOCK)).amax(-1)
    if rest:
        maxima = torch.cat([maxima, scores[:, -rest:].amax(-1, keepdim=True)], 1)
    places = torch.arange(_BLOCK, device=scores.device)
    # Past the end the last score repeats, which moves no first maximum.
    tokens = (maxima.argmax(-1, keepdim=True) * _BLOCK + places).clamp_(max=vocab_size - 1)
    place = scores.gather(1, tokens).argmax(-1, keepdim=True)
    return torch.where(maxima.amax(-1) > -torch.inf, tokens.gather(1, place)[:, 0], -1)

"""PackedLinear: a weight rearranged so that C++ multiplies by it at the speed of memory, or of arithmetic."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from paged_backend.kernels.cpu.arena import Arena
from paged_backend.kernels.cpu.loader import level, library

# Columns of a panel, and what becomes of a product; product.h says the same.
PANEL = 32
KEEP, SILU_GATE, GELU_GATE = 0, 2, 3

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}

# Where `most_rows` looks, from many rows to few, until C++ wins.
_TRIED_ROWS = (512, 256, 128, 64, 32)
_TRIED_SIZE, _TRIES, _CLEARLY_SLOWER = 2048, 4, 1.1


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight ``[num_columns, depth]`` in panels of 32 columns.

    packed: ``[panels, depth / 2, 32, 2]`` where the processor multiplies pairs of bfloat16 and activations are of that
    dtype, ``[panels, depth, 32]`` elsewhere; of the weight's dtype, int8 with ``scale``, or of half precision where
    that holds every number of a float32 weight.
    scale, bias: float32 ``[num_columns]`` or None.
    """

    packed: torch.Tensor
    scale: torch.Tensor | None
    bias: torch.Tensor | None
    num_columns: int

    def __call__(self, x: torch.Tensor, then: int = KEEP) -> torch.Tensor:
        """``x @ weight.T + bias`` in the dtype of x, or ``activation(gates) * others`` of it, see `pack_gated`."""
        result: torch.Tensor = library().linear(x, self.packed, self.scale, self.bias, self.num_columns, then)
        return result

    @property
    def num_bytes(self) -> int:
        """Of memory that this takes beside the original weight."""
        tensors = (self.packed, self.scale, self.bias)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def pack(
    weight: torch.Tensor, bias: torch.Tensor | None = None, *, int8: bool = False, arena: Arena | None = None
) -> PackedLinear:
    """Pack a weight ``[num_columns, depth]``, of a float dtype that is the activations' too.

    int8 rounds each column's weights to 255 levels, spread evenly up to the largest of them.
    """
    weight = weight.detach()
    pairs = weight.dtype == torch.bfloat16 and level() == "avx512_bf16" and weight.shape[1] % 2 == 0
    num_columns, depth = weight.shape
    scale = None
    if int8:
        wide = weight.float()
        scale = wide.abs().amax(1).div_(127).clamp_(min=torch.finfo(torch.float32).tiny)
        weight = (wide / scale[:, None]).round_().to(torch.int8)
    elif weight.dtype == torch.float32:
        weight = _halved(weight)
    arena = Arena() if arena is None else arena
    panels = -(-num_columns // PANEL)
    shape = (panels, depth // 2, PANEL, 2) if pairs else (panels, depth, PANEL)
    packed = arena.empty(shape, weight.dtype)
    # Two numbers that stay together move as one word.
    word = _WORDS[weight.element_size() * (2 if pairs else 1)]
    words, target = weight.contiguous().view(word), packed.view(word).view(*shape[:2], PANEL)
    whole, rest = divmod(num_columns, PANEL)
    target[:whole] = words[: whole * PANEL].unflatten(0, (whole, PANEL)).transpose(1, 2)
    if rest:
        target[whole].zero_()[:, :rest] = words[whole * PANEL :].T
    return PackedLinear(packed, scale, None if bias is None else bias.detach().float(), num_columns)


def _halved(weight: torch.Tensor) -> torch.Tensor:
    """A float32 weight in half precision if that changes no number, as it is where a checkpoint was in half precision.

    It is multiplied in float32 all the same, and half as much is read.
    """
    for dtype in (torch.bfloat16, torch.float16):
        half = weight.to(dtype)
        # NaN equals nothing, and stays as it is.
        if torch.equal(half.float(), weight):
            return half
    return weight


def pack_gated(
    gate: torch.Tensor,
    other: torch.Tensor,
    gate_bias: torch.Tensor | None = None,
    other_bias: torch.Tensor | None = None,
    *,
    int8: bool = False,
    arena: Arena | None = None,
) -> PackedLinear:
    """Pack the weights ``[num_columns, depth]`` of a gate and of what it gates so that one product holds both.

    Call the result with SILU_GATE or GELU_GATE. Raises ValueError unless num_columns is a multiple of 16.
    """
    half = PANEL // 2
    if gate.shape != other.shape or gate.shape[0] % half:
        raise ValueError(f"gated columns must be a multiple of {half}, got {tuple(gate.shape)}, {tuple(other.shape)}")

    def mix(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.stack((a.detach().unflatten(0, (-1, half)), b.detach().unflatten(0, (-1, half))), 1).flatten(0, 2)

    bias = None
    if gate_bias is not None or other_bias is not None:
        none = torch.zeros(gate.shape[0], dtype=torch.float32, device="cpu")
        bias = mix(*(none if b is None else b.float() for b in (gate_bias, other_bias)))
    return pack(mix(gate, other), bias, int8=int8, arena=arena)


@functools.cache
def most_rows(dtype: torch.dtype, num_threads: int) -> float:
    """Up to how many rows a PackedLinear is no slower than torch's own product, measured once for a number of threads.

    Infinity where torch has no fast product of the dtype. Elsewhere, and most where matrices have instructions of their
    own, it is ahead for many rows.
    """
    weight = torch.randn(_TRIED_SIZE, _TRIED_SIZE, device="cpu").to(dtype)
    packed = pack(weight)
    slower_at = math.inf
    for rows in _TRIED_ROWS:
        x = torch.randn(rows, _TRIED_SIZE, device="cpu").to(dtype)
        # Alternating and repeated, since others may use the machine meanwhile.
        ours = theirs = math.inf
        for _ in range(_TRIES):
            ours = min(ours, _seconds(functools.partial(packed, x)))
            theirs = min(theirs, _seconds(functools.partial(torch.nn.functional.linear, x, weight)))
            if not theirs < 2 * ours < 4 * theirs:
                break
        if ours < theirs * _CLEARLY_SLOWER:
            return slower_at
        slower_at = rows
    return _TRIED_ROWS[-1]


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start

"""QuantisedWeight: a weight of four to eight bits, in groups of inputs that share a scale, packed for C++.

The plain-torch `QuantisedWeight.widened` is the oracle of the C++, and what runs where it does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from paged_backend.kernels.cpu.arena import Arena
from paged_backend.kernels.cpu.loader import library
from paged_backend.kernels.cpu.packed_linear import KEEP, PANEL

# Inputs whose weights lie together, and how many such stretches share a scale of scales in some formats;
# quantised_product.h says the same.
STRETCH, STRETCHES = 32, 8
# Weights that are repacked at a time, so that loading takes no memory to speak of beside the result.
_AT_A_TIME = 1 << 22


@dataclass(frozen=True, slots=True)
class Format:
    """How a weight is stored; one of FORMATS, by its name in GGUF files.

    A weight is ``scale * (level - zero)``, plus the group's minimum where it has one. Levels are of ``bits``, groups of
    ``group`` inputs. shared: scales and minima are whole multiples of those that 256 inputs share. code: what
    quantised_product.h calls it. block_bytes: of a GGUF block, which holds ``block_inputs``.
    """

    name: str
    code: int
    bits: int
    zero: int
    minimum: bool
    shared: bool
    group: int
    block_bytes: int

    @property
    def block_inputs(self) -> int:
        return STRETCH * STRETCHES if self.shared else STRETCH

    @property
    def num_scales(self) -> int:
        """Numbers beside the levels of a stretch: a scale for each group, and a minimum."""
        return STRETCH // self.group + self.minimum

    def panel_bytes(self, depth: int) -> int:
        """Bytes of 32 columns of ``depth`` inputs."""
        levels = depth * PANEL * self.bits // 8
        scales = depth // STRETCH * PANEL * self.num_scales * (1 if self.shared else 2)
        heads = depth // (STRETCH * STRETCHES) * PANEL * 2 * (1 + self.minimum) if self.shared else 0
        return levels + scales + heads


FORMATS = {
    fmt.name: fmt
    for fmt in (
        Format("Q4_0", 0, 4, 8, False, False, 32, 18),
        Format("Q4_1", 1, 4, 0, True, False, 32, 20),
        Format("Q5_0", 2, 5, 16, False, False, 32, 22),
        Format("Q5_1", 3, 5, 0, True, False, 32, 24),
        Format("Q8_0", 4, 8, 128, False, False, 32, 34),
        Format("Q4_K", 5, 4, 0, True, True, 32, 144),
        Format("Q5_K", 6, 5, 0, True, True, 32, 176),
        Format("Q6_K", 7, 6, 32, False, True, 16, 210),
    )
}


@dataclass(frozen=True, slots=True)
class Levels:
    """What a format stores of a weight ``[num_columns, depth]``.

    levels: uint8 ``[num_columns, depth]``. scales: ``[num_columns, depth / 32, Format.num_scales]``, the minimum last;
    float16, or int8 where they are multiples of heads. heads: float16 ``[num_columns, depth / 256, 1 or 2]``, of scales
    and of minima, which count negative.
    """

    levels: torch.Tensor
    scales: torch.Tensor
    heads: torch.Tensor | None = None

    def values(self, fmt: Format) -> torch.Tensor:
        """The weight, float32."""
        columns, depth = self.levels.shape
        scales, minima = self.scales.float(), None
        if self.heads is not None:
            heads = self.heads.float().repeat_interleave(STRETCHES, 1)
            scales = scales * heads * (torch.tensor([1.0, -1.0]) if fmt.minimum else 1)
        if fmt.minimum:
            scales, minima = scales[..., :1], scales[..., 1:]
        levels = (self.levels.int() - fmt.zero).float().view(columns, depth // fmt.group, fmt.group)
        values = levels * scales.reshape(columns, -1, 1)
        if minima is not None:
            values += minima
        return values.view(columns, depth)


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """A weight ``[num_columns, depth]`` in panels of 32 columns: uint8 ``[panels, Format.panel_bytes(depth)]``.

    quantised_product.cpp says what a panel looks like.
    """

    packed: torch.Tensor
    format: Format
    num_columns: int
    depth: int

    @property
    def num_bytes(self) -> int:
        return self.packed.numel()

    def widened(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight ``[num_columns, depth]`` that this stands for, computed in float32 and rounded to ``dtype``."""
        result = torch.empty(self.num_columns, self.depth, dtype=dtype, device=self.packed.device)
        for first, last in _pieces(self.num_columns, self.depth):
            panels = self.packed[first // PANEL : -(-last // PANEL)]
            result[first:last] = _unpanelled(panels, self.format, self.depth).values(self.format)[: last - first]
        return result

    def columns(self, ids: torch.Tensor) -> torch.Tensor:
        """Weights of the columns ``ids`` of any shape, int64: float32 ``[*ids.shape, depth]``. Raises IndexError."""
        found: torch.Tensor = library().widen_columns(
            self.packed, self.format.code, self.num_columns, self.depth, ids.long()
        )
        return found

    def split(self, *sizes: int) -> list[QuantisedWeight]:
        """Weights of so many columns each, over the same memory. Raises ValueError but for multiples of 32."""
        if any(size % PANEL for size in sizes) or sum(sizes) != self.num_columns:
            raise ValueError(f"parts of {self.num_columns} columns must be multiples of {PANEL}, got {sizes}")
        parts = zip(self.packed.split([size // PANEL for size in sizes]), sizes, strict=True)
        return [QuantisedWeight(panels, self.format, size, self.depth) for panels, size in parts]


@dataclass(frozen=True, slots=True)
class QuantisedLinear:
    """A product with weights whose columns follow each other, of any formats and one depth.

    biases: float32 ``[num_columns]`` or None, one for each weight. owned: whether the weights lie here only, beside
    others that they were made from.
    """

    weights: tuple[QuantisedWeight, ...]
    biases: tuple[torch.Tensor | None, ...]
    owned: bool = True

    def __call__(self, x: torch.Tensor, then: int = KEEP) -> torch.Tensor:
        """``x @ weights.T + biases`` in the dtype of x, or with two weights ``activation(gates) * others``."""
        result: torch.Tensor = library().quantised_linear(
            x,
            [weight.packed for weight in self.weights],
            [weight.format.code for weight in self.weights],
            list(self.biases),
            [weight.num_columns for weight in self.weights],
            then,
        )
        return result

    @property
    def num_bytes(self) -> int:
        """Of memory that this takes beside the original weights."""
        own = sum(weight.num_bytes for weight in self.weights) if self.owned else 0
        return own + sum(4 * bias.numel() for bias in self.biases if bias is not None)


def from_gguf(
    blocks: torch.Tensor, fmt: Format, order: torch.Tensor | None = None, arena: Arena | None = None
) -> QuantisedWeight:
    """Pack the blocks of a GGUF file, uint8 ``[num_columns, bytes of a row]``, their columns in another ``order``.

    Raises ValueError for rows that are no whole blocks.
    """
    num_columns, row_bytes = blocks.shape
    if row_bytes % fmt.block_bytes:
        raise ValueError(f"rows of {row_bytes} bytes are no whole blocks of {fmt.name}, {fmt.block_bytes} bytes each")
    depth = row_bytes // fmt.block_bytes * fmt.block_inputs

    def levels(first: int, last: int) -> Levels:
        rows = blocks[first:last] if order is None else blocks[order[first:last]]
        return _READERS[fmt.name](rows.reshape(last - first, -1, fmt.block_bytes))

    return _pack(levels, fmt, num_columns, depth, arena)


def int4(weight: torch.Tensor, arena: Arena | None = None) -> QuantisedWeight:
    """Round a weight ``[num_columns, depth]`` to 4 bits in groups of 32 inputs.

    Each group has a scale, and a minimum too where that makes the weight's squared error smaller by a tenth or more,
    for it costs an eighth more memory. Raises ValueError for a depth that is no multiple of 32.
    """
    num_columns, depth = weight.shape
    if depth % STRETCH:
        raise ValueError(f"4 bits are for inputs in groups of {STRETCH}, got {depth} inputs")
    weight = weight.detach()
    errors = [0.0, 0.0]
    for first, last in _pieces(num_columns, depth):
        piece = weight[first:last].float()
        for i, (fmt, rounded) in enumerate(_ROUNDINGS):
            errors[i] += (rounded(piece).values(fmt) - piece).square().sum().item()
    fmt, rounded = _ROUNDINGS[errors[1] < 0.9 * errors[0]]
    return _pack(lambda first, last: rounded(weight[first:last].float()), fmt, num_columns, depth, arena)


def _symmetric(weight: torch.Tensor) -> Levels:
    """The largest number of a group, whatever its sign, becomes the level 0, which is 8 scales from zero."""
    groups = weight.unflatten(1, (-1, STRETCH))
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scale = _half(largest / -8)
    levels = (groups / _divisor(scale)).round_().add_(8).clamp_(0, 15)
    return Levels(levels.flatten(1).to(torch.uint8), scale)


def _with_minimum(weight: torch.Tensor) -> Levels:
    groups = weight.unflatten(1, (-1, STRETCH))
    low, high = groups.aminmax(dim=-1, keepdim=True)
    minimum = _half(low)
    scale = _half((high - minimum.float()) / 15)
    levels = ((groups - minimum.float()) / _divisor(scale)).round_().clamp_(0, 15)
    return Levels(levels.flatten(1).to(torch.uint8), torch.cat((scale, minimum), -1))


_ROUNDINGS: tuple[tuple[Format, Callable[[torch.Tensor], Levels]], ...] = (
    (FORMATS["Q4_0"], _symmetric),
    (FORMATS["Q4_1"], _with_minimum),
)


def _half(x: torch.Tensor) -> torch.Tensor:
    largest = torch.finfo(torch.float16).max
    return x.clamp(-largest, largest).half()


def _divisor(scale: torch.Tensor) -> torch.Tensor:
    """Scales as float32, and 1 where all of a group is alike, whose levels then are of no account."""
    wide = scale.float()
    return torch.where(wide == 0, 1, wide)


# The blocks of GGUF files, uint8 [columns, blocks, bytes of a block].


def _halves(blocks: torch.Tensor, count: int, at: int = 0) -> torch.Tensor:
    """So many float16 of each block."""
    return blocks[..., at : at + 2 * count].contiguous().view(torch.float16)


def _nibbles(packed: torch.Tensor, run: int) -> torch.Tensor:
    """The low halves of a run of bytes, their high halves, those of the next run, in order."""
    runs = packed.unflatten(-1, (-1, run))
    return torch.stack((runs & 15, runs >> 4), -2).flatten(-3)


def _bits(packed: torch.Tensor, width: int) -> torch.Tensor:
    """The lowest bits of a row of bytes, then the next."""
    return torch.stack([packed >> shift & (1 << width) - 1 for shift in range(0, 8, width)], -2).flatten(-2)


def _read_q4_0(blocks: torch.Tensor) -> Levels:
    return Levels(_nibbles(blocks[..., 2:], 16).flatten(1), _halves(blocks, 1))


def _read_q4_1(blocks: torch.Tensor) -> Levels:
    return Levels(_nibbles(blocks[..., 4:], 16).flatten(1), _halves(blocks, 2))


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """Bit i of four bytes belongs to the i-th input."""
    return torch.stack([packed >> shift & 1 for shift in range(8)], -1).flatten(-2) << 4


def _read_q5_0(blocks: torch.Tensor) -> Levels:
    levels = _nibbles(blocks[..., 6:], 16) | _fifth_bits(blocks[..., 2:6])
    return Levels(levels.flatten(1), _halves(blocks, 1))


def _read_q5_1(blocks: torch.Tensor) -> Levels:
    levels = _nibbles(blocks[..., 8:], 16) | _fifth_bits(blocks[..., 4:8])
    return Levels(levels.flatten(1), _halves(blocks, 2))


def _read_q8_0(blocks: torch.Tensor) -> Levels:
    # A number with sign, plus 128.
    return Levels((blocks[..., 2:] ^ 128).flatten(1), _halves(blocks, 1))


def _multiples(packed: torch.Tensor) -> torch.Tensor:
    """Eight scales and eight minima of six bits, in twelve bytes: int8 ``[columns, depth / 32, 2]``."""
    scales, minima, rest = packed.unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat((scales & 63, rest & 15 | scales >> 2 & 48), -1)
    minima = torch.cat((minima & 63, rest >> 4 | minima >> 2 & 48), -1)
    return torch.stack((scales, minima), -1).flatten(1, 2).view(torch.int8)


def _read_q4_k(blocks: torch.Tensor) -> Levels:
    return Levels(_nibbles(blocks[..., 16:], 32).flatten(1), _multiples(blocks[..., 4:16]), _halves(blocks, 2))


def _read_q5_k(blocks: torch.Tensor) -> Levels:
    levels = _nibbles(blocks[..., 48:], 32) | _bits(blocks[..., 16:48], 1) << 4
    return Levels(levels.flatten(1), _multiples(blocks[..., 4:16]), _halves(blocks, 2))


def _read_q6_k(blocks: torch.Tensor) -> Levels:
    high = _bits(blocks[..., 128:192].unflatten(-1, (2, 32)), 2).flatten(-2)
    levels = _nibbles(blocks[..., :128], 64) | high << 4
    scales = blocks[..., 192:208].contiguous().view(torch.int8)
    return Levels(levels.flatten(1), scales.unflatten(-1, (-1, 2)).flatten(1, 2), _halves(blocks, 1, 208))


_READERS: dict[str, Callable[[torch.Tensor], Levels]] = {
    "Q4_0": _read_q4_0,
    "Q4_1": _read_q4_1,
    "Q5_0": _read_q5_0,
    "Q5_1": _read_q5_1,
    "Q8_0": _read_q8_0,
    "Q4_K": _read_q4_k,
    "Q5_K": _read_q5_k,
    "Q6_K": _read_q6_k,
}


# The panels of quantised_product.cpp.


def _pieces(num_columns: int, depth: int) -> list[tuple[int, int]]:
    """Ranges of columns, of whole panels but for the last, that are worked on at a time."""
    step = max(1, _AT_A_TIME // (PANEL * depth)) * PANEL
    return [(first, min(first + step, num_columns)) for first in range(0, num_columns, step)]


def _pack(
    levels: Callable[[int, int], Levels], fmt: Format, num_columns: int, depth: int, arena: Arena | None
) -> QuantisedWeight:
    """Pack what ``levels`` gives of a range of columns."""
    arena = Arena() if arena is None else arena
    packed = arena.empty((-(-num_columns // PANEL), fmt.panel_bytes(depth)), torch.uint8)
    for first, last in _pieces(num_columns, depth):
        packed[first // PANEL : -(-last // PANEL)] = _panelled(levels(first, last), fmt)
    return QuantisedWeight(packed, fmt, num_columns, depth)


def _panelled(given: Levels, fmt: Format) -> torch.Tensor:
    """Panels uint8 ``[panels, Format.panel_bytes(depth)]``, absent columns zero."""

    def by_panel(x: torch.Tensor) -> torch.Tensor:
        missing = -len(x) % PANEL
        return torch.cat((x, x.new_zeros(missing, *x.shape[1:]))).unflatten(0, (-1, PANEL))

    # [panels, columns, stretches, places, inputs of a place]
    levels = by_panel(given.levels.unflatten(1, (-1, STRETCH // 4, 4)))
    if fmt.bits == 8:
        words = [levels]
    else:
        pairs = (levels & 15).unflatten(3, (-1, 2))
        words = [pairs[..., 0, :] | pairs[..., 1, :] << 4]
        if high_bits := fmt.bits - 4:
            high = (levels >> 4).unflatten(3, (high_bits, -1))
            shifted = [high[..., i, :] << i * high_bits for i in range(high.shape[4])]
            words.append(torch.stack(shifted).sum(0, dtype=torch.uint8))
    scales = by_panel(given.scales).unsqueeze(-1).contiguous().view(torch.uint8)
    # What a stretch holds, of all columns in turn: [panels, stretches, bytes].
    stretches = torch.cat([part.permute(0, 2, 3, 1, 4).flatten(2) for part in (*words, scales)], 2)
    if given.heads is None:
        return stretches.flatten(1)
    heads = by_panel(given.heads).unsqueeze(-1).contiguous().view(torch.uint8).permute(0, 2, 3, 1, 4).flatten(2)
    return torch.cat((heads, stretches.unflatten(1, (-1, STRETCHES)).flatten(2)), 2).flatten(1)


def _unpanelled(panels: torch.Tensor, fmt: Format, depth: int) -> Levels:
    """What `_panelled` was given, absent columns included."""
    count, num_stretches = len(panels), depth // STRETCH
    heads = None
    if fmt.shared:
        panels = panels.view(count, num_stretches // STRETCHES, -1)
        num_heads = 1 + fmt.minimum
        head_bytes, panels = panels[..., : 2 * PANEL * num_heads], panels[..., 2 * PANEL * num_heads :]
        heads = head_bytes.contiguous().view(torch.float16).view(count, -1, num_heads, PANEL)
        heads = heads.permute(0, 3, 1, 2).flatten(0, 1)
    stretches = panels.reshape(count, num_stretches, -1)

    def words(first: int, number: int) -> torch.Tensor:
        """Words of the stretches as ``[columns, stretches, number, 4]`` bytes."""
        at = 4 * PANEL * first
        part = stretches[..., at : at + 4 * PANEL * number].view(count, num_stretches, number, PANEL, 4)
        return part.permute(0, 3, 1, 2, 4).flatten(0, 1)

    if fmt.bits == 8:
        levels = words(0, 8)
    else:
        low = words(0, 4)
        levels = torch.stack((low & 15, low >> 4), 3).flatten(2, 3)
        if high_bits := fmt.bits - 4:
            high = words(4, high_bits)
            mask = (1 << high_bits) - 1
            spread = torch.stack([high >> shift & mask for shift in range(0, 8, high_bits)], 3).flatten(2, 3)
            levels = levels | spread << 4
    dtype = torch.int8 if fmt.shared else torch.float16
    scales = stretches[..., PANEL * fmt.bits * STRETCH // 8 :].contiguous().view(dtype)
    scales = scales.view(count, num_stretches, fmt.num_scales, PANEL).permute(0, 3, 1, 2).flatten(0, 1)
    return Levels(levels.flatten(1), scales, heads)

"""Tile sizes of the attention kernels, per architecture, with a default that fits everywhere."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a kernel is cut: query rows and keys per tile, warps, and tiles in flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# Keyed by bits of the elements and the larger head dim, rounded up to a power of two: 32 and 16 for what is multiplied,
# 8 for a quantised cache that is multiplied in 16 bits. The defaults fit the 64 KiB of shared memory that the smallest
# devices have. What is listed compiles without spilled registers, but for the few bytes that ptxas parks to let one
# block more run on a processor; which entries were measured, kernels/README.md says.
_DEFAULT_PREFILL = {
    (32, 64): Tiles(32, 32, 8, 1),
    (32, 128): Tiles(32, 16, 8, 1),
    (32, 256): Tiles(16, 16, 8, 1),
    (32, 512): Tiles(16, 16, 8, 1),
    (16, 64): Tiles(64, 32, 4, 1),
    (16, 128): Tiles(64, 32, 4, 1),
    (16, 256): Tiles(32, 32, 4, 1),
    (16, 512): Tiles(32, 16, 8, 1),
}
_DEFAULT_DECODE = {
    (32, 64): Tiles(16, 32, 4, 1),
    (32, 128): Tiles(16, 16, 4, 1),
    (32, 256): Tiles(16, 16, 8, 1),
    (32, 512): Tiles(16, 16, 8, 1),
    (16, 64): Tiles(32, 64, 4, 1),
    (16, 128): Tiles(32, 32, 4, 1),
    (16, 256): Tiles(32, 32, 4, 1),
    (16, 512): Tiles(32, 16, 8, 1),
}
_PREFILL = {
    "sm_80": {
        (16, 64): Tiles(128, 64, 8, 3),
        (16, 128): Tiles(64, 32, 4, 2),
        (16, 256): Tiles(64, 32, 8, 2),
        (8, 64): Tiles(64, 64, 8, 2),
        (8, 128): Tiles(64, 64, 8, 2),
        (8, 256): Tiles(32, 32, 8, 1),
        (32, 512): Tiles(32, 16, 16, 1),
    },
    "sm_90": {
        (16, 64): Tiles(128, 128, 8, 3),
        (16, 128): Tiles(128, 64, 8, 3),
        (16, 256): Tiles(64, 64, 8, 2),
        (8, 64): Tiles(128, 64, 8, 3),
        (8, 128): Tiles(128, 64, 8, 3),
        (8, 256): Tiles(64, 32, 8, 2),
        (32, 512): Tiles(32, 16, 16, 1),
    },
    "gfx942": {
        (16, 64): Tiles(128, 32, 8, 1),
        (16, 128): Tiles(128, 32, 8, 1),
        (8, 128): Tiles(64, 16, 4, 1),
        (8, 512): Tiles(32, 16, 4, 1),
        (32, 512): Tiles(16, 16, 4, 1),
    },
    "gfx90a": {(32, 512): Tiles(16, 16, 4, 1)},
}
# A load through the block table waits for the table, so that it takes two stages more to have one tile more in flight:
# three stages hold one, five hold two.
_DECODE = {
    "sm_80": {
        (16, 64): Tiles(32, 64, 4, 5),
        (16, 128): Tiles(32, 64, 4, 3),
        (16, 256): Tiles(32, 32, 4, 3),
        (8, 64): Tiles(32, 64, 4, 5),
        (8, 128): Tiles(32, 64, 4, 3),
    },
    "sm_90": {
        (16, 64): Tiles(32, 64, 4, 5),
        (16, 128): Tiles(32, 64, 4, 3),
        (16, 256): Tiles(32, 32, 4, 3),
        (8, 64): Tiles(32, 64, 4, 5),
        (8, 128): Tiles(32, 64, 4, 3),
    },
    "gfx942": {
        (16, 64): Tiles(32, 64, 4, 2),
        (16, 128): Tiles(32, 32, 4, 2),
        (32, 512): Tiles(16, 16, 4, 1),
    },
    "gfx90a": {(32, 512): Tiles(16, 16, 4, 1)},
}
_LARGEST_HEAD_DIM = 512


def prefill_tiles(architecture: str, element_bits: int, head_dim: int) -> Tiles:
    """The tiles of prefill_attention; head_dim is the larger of key's and value's, as a power of two."""
    return _look_up(_PREFILL, _DEFAULT_PREFILL, architecture, element_bits, head_dim)


def decode_tiles(architecture: str, element_bits: int, head_dim: int) -> Tiles:
    """The tiles of decode_attention; block_m is the most query heads that one program takes."""
    return _look_up(_DECODE, _DEFAULT_DECODE, architecture, element_bits, head_dim)


def _look_up(
    tuned: dict[str, dict[tuple[int, int], Tiles]],
    default: dict[tuple[int, int], Tiles],
    architecture: str,
    element_bits: int,
    head_dim: int,
) -> Tiles:
    if head_dim > _LARGEST_HEAD_DIM:
        raise ValueError(
            f"the triton backend takes head dims up to {_LARGEST_HEAD_DIM}, got {head_dim}; use backend='reference'"
        )
    dim = max(head_dim, 64)
    table = tuned.get(architecture, {})
    # What a quantised cache has no entry of its own for fits the tiles of what it is multiplied as.
    return (
        table.get((element_bits, dim)) or table.get((max(element_bits, 16), dim)) or default[max(element_bits, 16), dim]
    )

"""The tensors that hold keys and values in blocks, and how many blocks a byte budget buys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paged_backend.kernels import QUANTISED_MAX, LayerCache, MaskRule, copy_blocks, cpu, empty_cache
from paged_backend.memory.kv_group import KVGroup


@dataclass(frozen=True)
class LayerSpec:
    """What the load probe saw one attention layer do. Dimensions count elements, not bytes."""

    name: str
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    rule: MaskRule

    def bytes_per_token(self, kv_dtype: torch.dtype | None = None) -> int:
        """Bytes that one token's key, value and scales take in the cache."""
        dtype = kv_dtype or self.dtype
        scales = 2 * 4 if dtype in QUANTISED_MAX else 0
        return self.num_kv_heads * ((self.key_dim + self.value_dim) * dtype.itemsize + scales)


def group_layers(layers: Sequence[LayerSpec], kv_dtype: torch.dtype | None = None) -> list[KVGroup]:
    """One group per distinct mask rule, full attention first, in the order in which the layers run."""
    members: dict[MaskRule, list[int]] = {}
    for index, layer in enumerate(layers):
        members.setdefault(layer.rule, []).append(index)
    rules = sorted(members, key=lambda rule: (rule.kind != "full", members[rule][0]))
    return [
        KVGroup(rule, tuple(members[rule]), sum(layers[i].bytes_per_token(kv_dtype) for i in members[rule]))
        for rule in rules
    ]


class KVCache:
    """The block pool of every layer.

    Memory is reserved, not touched: on a CPU the large page of a block becomes resident when it is first written.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        groups: Sequence[KVGroup],
        num_blocks: Sequence[int],
        block_size: int,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.specs = tuple(layers)
        self.groups = tuple(groups)
        self.num_blocks = tuple(num_blocks)
        self.block_size = block_size
        self.kv_dtype = kv_dtype
        self.layers: list[LayerCache] = [None] * len(layers)  # type: ignore[list-item]
        arena = cpu.Arena()
        for group, count in zip(self.groups, self.num_blocks, strict=True):
            for index in group.layers:
                self.layers[index] = _layer_cache(layers[index], count, block_size, kv_dtype, arena)

    @property
    def num_bytes(self) -> int:
        """Reserved bytes over all layers."""
        return sum(t.numel() * t.element_size() for layer in self.layers for t in layer.tensors())

    def resized(self, num_blocks: Sequence[int], kept: Sequence[Sequence[int]]) -> KVCache:
        """A pool of another size that holds the ``kept`` blocks of each group under their old numbers."""
        other = KVCache(self.specs, self.groups, num_blocks, self.block_size, self.kv_dtype)
        for group, blocks in zip(self.groups, kept, strict=True):
            index = torch.tensor(blocks, dtype=torch.long, device="cpu")
            for layer in group.layers if blocks else ():
                for old, new in zip(self.layers[layer].tensors(), other.layers[layer].tensors(), strict=True):
                    on_device = index.to(old.device)
                    new[on_device] = old[on_device]
        return other

    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks ``(source, target)`` in every layer of a group: the second half of copy on write."""
        if not pairs:
            return
        sources, targets = [p[0] for p in pairs], [p[1] for p in pairs]
        copy_blocks([t for i in self.groups[group].layers for t in self.layers[i].tensors()], sources, targets)


def _layer_cache(
    layer: LayerSpec, num_blocks: int, block_size: int, kv_dtype: torch.dtype | None, arena: cpu.Arena
) -> LayerCache:
    def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if layer.device.type == "cpu":
            return arena.empty(shape, dtype)
        return torch.empty(shape, dtype=dtype, device=layer.device)

    dtype = kv_dtype or layer.dtype
    return empty_cache(num_blocks, layer.num_kv_heads, block_size, layer.key_dim, layer.value_dim, dtype, allocate)

"""Caches that hold nothing and say how many tokens came before, to models that ask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig


class ClaimedPast(DynamicCache):
    """The cache that stock ``generate`` makes, which claims to have seen ``length`` tokens already.

    was_asked: whether anything wanted to know.
    """

    def __init__(self, length: int, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        self._length = length
        self.was_asked = False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The tokens claimed."""
        self.was_asked = True
        return self._length


class PackedPast(DynamicCache):
    """What a model is given in place of a cache that it asks for lengths: each token of a pack has its own.

    positions: ``[num_tokens]`` int64. devices: where the layer of an index computes.
    """

    def __init__(self, positions: torch.Tensor, devices: Mapping[int, torch.device]) -> None:
        super().__init__()
        # A model adds the place in the pack to it.
        self._lengths = positions - torch.arange(positions.numel(), device=positions.device)
        self._devices = devices

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """``[num_tokens]`` int64."""
        return self._lengths.to(self._devices.get(layer_idx, self._lengths.device))

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """As without a cache, since blocks have masks of their own."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """As without a cache."""
        return query_length, 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values given: blocks keep them."""
        return key_states, value_states

"""SeenTokens: which tokens a request holds, and how often."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class SeenTokens:
    """The distinct tokens of a prompt and its output, and how often the output holds each; O(1) per new token.

    Tokens from ``vocab_size`` on, which some models embed but never give logits for, are left out.
    """

    __slots__ = ("_counts", "_ids", "_num_tokens", "_places", "_vocab_size")

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._places: dict[int, int] = {}
        # NumPy, since setting one element of a tensor costs microseconds.
        self._ids = np.zeros(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)
        self._num_tokens = 0

    def update(self, token_ids: Sequence[int], num_prompt_tokens: int) -> tuple[Tensor, Tensor]:
        """Take in the tokens since the last call; returns views of the ids [U] int64 and output counts [U] float32."""
        for position in range(self._num_tokens, len(token_ids)):
            token = token_ids[position]
            if token >= self._vocab_size:
                continue
            place = self._places.get(token)
            if place is None:
                place = self._add(token)
            if position >= num_prompt_tokens:
                self._counts[place] += 1
        self._num_tokens = len(token_ids)
        used = len(self._places)
        return torch.from_numpy(self._ids[:used]), torch.from_numpy(self._counts[:used])

    def _add(self, token: int) -> int:
        place = len(self._places)
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._places[token] = place
        self._ids[place] = token
        return place

"""BadWords: token sequences that must not come about."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor


class BadWords:
    """Bans the last token of each word where the others stand at the end, as NoBadWordsLogitsProcessor does.

    That one's bias has the process's default dtype, so that it fails under any but that of the scores. words: of token
    ids in the vocabulary. eos_token_ids: no word of one of these alone is banned.
    """

    def __init__(self, words: Sequence[Sequence[int]], eos_token_ids: Collection[int]) -> None:
        words = [list(word) for word in words if len(word) > 1 or word[0] not in eos_token_ids]
        self._single = torch.tensor([word[0] for word in words if len(word) == 1], dtype=torch.int64, device="cpu")
        self._longer = [word for word in words if len(word) > 1]
        self._longest = max(map(len, words), default=0)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """``scores`` ([1, V]) with -inf for banned tokens; input_ids: all tokens so far, [1, N]."""
        seen = input_ids[0, -self._longest :].tolist() if self._longer else []
        last = [word[-1] for word in self._longer if seen[1 - len(word) :] == word[:-1]]
        banned = torch.cat([self._single, torch.tensor(last, dtype=torch.int64, device="cpu")])
        return scores.index_fill(1, banned.to(scores.device), -torch.inf)

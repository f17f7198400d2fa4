"""Shared prefixes: how much of each prompt of a trace stood at the beginning of an earlier one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from paged_backend.lab.block_tokens import SPAN, BlockTokens
from paged_backend.lab.trace import TraceRequest


def shared_lengths(requests: Sequence[TraceRequest]) -> list[int]:
    """For each request, how many tokens its prompt has in common with an earlier one of the same salt.

    As if nothing was ever dropped from a cache. Less than the whole prompt, whose last token is computed in any case.
    O(n log n) comparisons of prompts.
    """
    keys = [_Key(request) for request in requests]
    order = sorted(range(len(keys)), key=lambda index: (keys[index].kind, keys[index].ids))
    # Sorted neighbours have most in common. The latest is taken out first, so that only earlier ones are left.
    before, after = [-1] * len(keys), [-1] * len(keys)
    common = [0] * len(keys)
    for left, right in pairwise(order):
        before[right], after[left] = left, right
        common[right] = keys[left].common(keys[right])
    shared = [0] * len(keys)
    for index in reversed(range(len(keys))):
        left, right = before[index], after[index]
        gap = common[right] if right >= 0 else 0
        shared[index] = min(max(common[index], gap), len(requests[index].prompt) - 1)
        if right >= 0:
            before[right], common[right] = left, min(common[index], gap)
        if left >= 0:
            after[left] = right
    return shared


class _Key:
    """What prompts are told apart by: their tokens, or less where a few numbers stand for many tokens.

    kind: prompts of different kinds share nothing. ids: each stands for ``span`` tokens, the last perhaps for fewer.
    """

    def __init__(self, request: TraceRequest) -> None:
        prompt = request.prompt
        self.length = len(prompt)
        if isinstance(prompt, range):
            self.span, self.ids = max(1, self.length), [prompt.start]
        elif isinstance(prompt, BlockTokens):
            self.span, self.ids = SPAN, [prompt[start] for start in range(0, self.length, SPAN)]
        else:
            self.span, self.ids = 1, list(prompt)
        self.kind = (type(prompt).__name__, request.cache_salt is not None, request.cache_salt or "")

    def common(self, other: _Key) -> int:
        """Tokens in common at the beginning."""
        if self.kind != other.kind:
            return 0
        count = min(len(self.ids), len(other.ids))
        differ = np.flatnonzero(np.asarray(self.ids[:count]) != np.asarray(other.ids[:count]))
        same = int(differ[0]) if len(differ) else count
        return min(same * max(self.span, other.span), self.length, other.length)

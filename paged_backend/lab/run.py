"""Run: what became of requests under one way of batching."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paged_backend.lab.replay import Outcome


class KVMoment(NamedTuple):
    """Seconds, and how many tokens' keys and values were allocated and filled from then on."""

    time: float
    allocated: int
    filled: int


@dataclass(frozen=True)
class Run:
    """What became of requests.

    outcomes: in order of arrival, in seconds since the first could come. seconds: until the last answer. memory: over
    time. computed_tokens: token positions that went through the model, padding and what was computed again included;
    useful_tokens: those that had to. num_cached_tokens: prompt tokens found in the prefix cache.
    """

    outcomes: Sequence[Outcome]
    seconds: float
    memory: Sequence[KVMoment]
    computed_tokens: int
    useful_tokens: int
    num_preemptions: int = 0
    num_cached_tokens: int = 0

    @property
    def kv_utilisation(self) -> float:
        """Filled slots over allocated ones, weighted by time."""
        allocated = filled = 0.0
        for moment, later in zip(self.memory, self.memory[1:], strict=False):
            allocated += moment.allocated * (later.time - moment.time)
            filled += moment.filled * (later.time - moment.time)
        return filled / allocated if allocated else 0.0

    @property
    def waste(self) -> float:
        """The share of computed positions that nobody needed."""
        return 1 - self.useful_tokens / self.computed_tokens if self.computed_tokens else 0.0


def useful_tokens(outcomes: Sequence[Outcome]) -> int:
    """Positions that have to go through the model: every token but the last of each request."""
    return sum(outcome.num_prompt_tokens + outcome.num_output_tokens - 1 for outcome in outcomes)

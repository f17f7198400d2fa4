"""Lockstep: requests that choose each of their tokens at the same time, as the rows of one batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paged_backend.errors import SamplingFailed, contained

if TYPE_CHECKING:
    from torch import Tensor


class Lockstep(ABC):
    """Processes the logits of all its members in one call, in place of what SamplingParams would do to each.

    For what sees a whole batch. The same object goes to ``Engine.add_request`` for every member. A member that comes to
    its next token ahead of the others is held, until all that are unfinished have come so far. They must be able to run
    at the same time (``Engine.runs_at_once``). A member with which they never could is refused; those before it go on
    without it, unless they are aborted.
    """

    def __init__(self) -> None:
        # Requests, whose module knows this one.
        self.members: list[Any] = []

    @abstractmethod
    def process(self, requests: Sequence[Any], scores: Tensor) -> Tensor:
        """Scores to choose from, given logits: [R, V] float32 both, a row for each of ``requests``.

        These are the unfinished members, in any order.

        temperature, top_k, top_p and min_p act on the result. An exception fails all members. ``stop_condition`` is
        called when all of them have their tokens.
        """

    @property
    def num_unfinished(self) -> int:
        return sum(not member.is_finished for member in self.members)

    def __call__(self, scores: Tensor, requests: Sequence[Any]) -> dict[int, Exception]:
        """Change ``scores`` ([R, V] float32) in place; returns the rows that could not be processed, and why."""
        try:
            processed = self.process(requests, scores)
            if processed.shape != scores.shape:
                expected, got = tuple(scores.shape), tuple(processed.shape)
                raise SamplingFailed(f"logits processors must return scores of shape {expected}, got {got}")
            scores.copy_(processed)
        # Whatever the members' own code raises is their result and no other request's.
        except BaseException as error:
            return dict.fromkeys(range(len(requests)), contained(error))
        return {}

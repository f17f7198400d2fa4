"""Lockstep: requests that choose each of their tokens at the same time, as the rows of one batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paged_backend.errors import SamplingFailed, contained
from paged_backend.sampling.distribution import take_rows

if TYPE_CHECKING:
    from paged_backend.request.request import Request


class Lockstep(ABC):
    """Processes the logits of all its members in one call, in place of what SamplingParams would do to each.

    For what sees a whole batch. The same object goes to ``Engine.add_request`` for every member. A member that comes to
    its next token ahead of the others is held, until all that are unfinished have come so far. They must be able to run
    at the same time (``Engine.runs_at_once``), or they would hold each other back for ever.
    """

    def __init__(self) -> None:
        self.members: list[Request] = []

    @abstractmethod
    def process(self, requests: Sequence[Request], scores: Tensor) -> Tensor:
        """Scores to choose from, given logits: [R, V] float32 both, a row for each unfinished member in any order.

        temperature, top_k, top_p and min_p act on the result. An exception fails all members. ``stop_condition`` is
        called when all of them have their tokens.
        """

    @property
    def num_unfinished(self) -> int:
        return sum(not member.is_finished for member in self.members)

    def __call__(self, scores: Tensor, requests: Sequence[Request]) -> dict[int, Exception]:
        """Change ``scores`` ([R, V] float32) in place; returns the rows that could not be processed, and why."""
        try:
            processed = self.process(requests, scores)
            if processed.shape != scores.shape:
                expected, got = tuple(scores.shape), tuple(processed.shape)
                raise SamplingFailed(f"logits processors must return scores of shape {expected}, got {got}")
            scores.copy_(processed)
        # Whatever the members' own code raises is their result and no other request's.
        except (Exception, SystemExit) as error:
            return dict.fromkeys(range(len(requests)), contained(error))
        return {}


class HeldRows:
    """The logits of members that are held."""

    def __init__(self) -> None:
        self._logits: dict[Request, Tensor] = {}

    def join(self, logits: Tensor | None, requests: list[Request]) -> tuple[Tensor | None, list[Request]]:
        """The rows of a step whose tokens can be chosen now: without members that are held, with those let go.

        logits: [R, V] of the ``requests``, None if there are none; so is what is returned.
        """
        if not self._logits and all(request.lockstep is None for request in requests):
            return logits, requests
        # Whoever was preempted or ended is not held any more.
        self._logits = {request: row for request, row in self._logits.items() if request.is_held}
        ready = []
        for index, request in enumerate(requests):
            if request.lockstep is None:
                ready.append(index)
            else:
                assert logits is not None
                self._logits[request] = logits[index].clone()
        counts = Counter(request.lockstep for request in self._logits)
        released = [
            r for r in self._logits if r.lockstep is not None and counts[r.lockstep] == r.lockstep.num_unfinished
        ]
        rows = [self._logits.pop(request) for request in released]
        parts = [torch.stack(rows)] if rows else []
        if ready and logits is not None:
            parts.insert(0, take_rows(logits, ready))
        return (torch.cat(parts) if parts else None), [*(requests[index] for index in ready), *released]

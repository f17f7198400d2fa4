"""HeldRows: logits that wait until every member of their lockstep has come so far."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from paged_backend.request.request import Request
from paged_backend.sampling.distribution import take_rows


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

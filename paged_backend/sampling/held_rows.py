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
        in_lockstep = [index for index, request in enumerate(requests) if request.lockstep is not None]
        if not self._logits and not in_lockstep:
            return logits, requests
        self._hold(logits, requests, in_lockstep)
        released = self._release()
        free = [index for index, request in enumerate(requests) if request.lockstep is None]
        parts = [take_rows(logits, free)] if free and logits is not None else []
        if released:
            parts.append(torch.stack(list(released.values())))
        return (torch.cat(parts) if parts else None), [*(requests[index] for index in free), *released]

    def _hold(self, logits: Tensor | None, requests: list[Request], rows: list[int]) -> None:
        """Keep these rows, and forget those of members that were preempted or ended."""
        self._logits = {request: row for request, row in self._logits.items() if request.is_held}
        for index in rows:
            assert logits is not None
            self._logits[requests[index]] = logits[index].clone()

    def _release(self) -> dict[Request, Tensor]:
        """The rows, no longer held, of each lockstep whose unfinished members have all come so far."""
        counts = Counter(request.lockstep for request in self._logits)
        complete = {lockstep for lockstep, count in counts.items() if lockstep and count == lockstep.num_unfinished}
        released = {request: row for request, row in self._logits.items() if request.lockstep in complete}
        for request in released:
            del self._logits[request]
        return released

"""RequestState: where a request is in its life."""

from __future__ import annotations

from enum import Enum


class RequestState(Enum):
    """Where a request is in its life; preemption leads from PREFILL or DECODE back to WAITING."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"

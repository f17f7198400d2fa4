"""SamplingState: what choosing and stopping keep for one request between its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paged_backend.request.request import Request
from paged_backend.sampling.stop_strings import StopStrings
from paged_backend.sampling_params import LogitsProcessor

if TYPE_CHECKING:
    # They take torch, which asking whether a request ends does without.
    from torch import Tensor

    from paged_backend.sampling.seen_tokens import SeenTokens
    from paged_backend.sampling.structured import Constraint


class SamplingState:
    """Held by ``Request.sampling_state``. All of it follows from the request, so that losing it loses nothing.

    stream: key of the request's random stream. seen: its distinct tokens. bias: the ids and values of its logit_bias.
    processors: what runs on its row alone. constraint: how far it is in what its output must match.
    stop_strings: its text so far, where it has stop strings.
    """

    __slots__ = ("bias", "constraint", "processors", "seen", "stop_strings", "stream")

    def __init__(self) -> None:
        self.stream: int | None = None
        self.seen: SeenTokens | None = None
        self.bias: tuple[Tensor, Tensor] | None = None
        self.processors: list[LogitsProcessor] | None = None
        self.constraint: Constraint | None = None
        self.stop_strings: StopStrings | None = None

    @classmethod
    def of(cls, request: Request) -> SamplingState:
        """The request's state, made on first use."""
        if request.sampling_state is None:
            request.sampling_state = cls()
        state: SamplingState = request.sampling_state
        return state

"""How many tokens a request will generate: what size-based policies need to know."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from paged_backend.checks import checked_int, checked_number
from paged_backend.errors import ConfigError
from paged_backend.policies import RequestView

MAX_CLIENTS = 4096
# Fewer lengths than this of prompts of a size say less than those of all the client's prompts.
ENOUGH = 4


@runtime_checkable
class LearningPredictor(Protocol):
    """A predictor that is told of the requests that ended."""

    def __call__(self, request: RequestView) -> float:
        """The tokens that ``request`` will have generated when it ends."""

    def observe(self, request: RequestView) -> None:
        """``request`` ended."""


Predictor = Callable[[RequestView], float] | LearningPredictor


def max_tokens(request: RequestView) -> int:
    """The most it may generate."""
    return request.params.max_tokens


class RunningQuantile:
    """A quantile of the lengths of a client's last requests with prompts of like length, at most ``max_tokens``.

    Prompts are alike within a factor of about 1.4; until four requests with such prompts have ended, all prompts of the
    client are. A request that ran into its ``max_tokens`` would have been longer, nobody knows how much: where most do,
    the answer is ``max_tokens``, and so it is before a client has finished any. Of a request that has generated tokens
    already, only longer lengths are asked; if there are none, it is taken to be half done.

    O(window) for each request; the longest unseen clients are forgotten beyond 4,096.
    """

    def __init__(self, quantile: float = 0.5, window: int = 64) -> None:
        self.quantile = checked_number("quantile", quantile, 0, 1)
        self.window = checked_int("window", window, 1)
        # Per client, its last lengths by the size of the prompt; under None, those of all sizes.
        self._lengths: OrderedDict[str | None, dict[int | None, deque[float]]] = OrderedDict()

    def __call__(self, request: RequestView) -> float:
        """The client's quantile."""
        most, known = max_tokens(request), self._lengths.get(request.client_id)
        if known is None:
            return most
        alike = known.get(_size(request), ())
        lengths = alike if len(alike) >= ENOUGH else known[None]
        generated = request.num_output_tokens
        longer = sorted(length for length in lengths if length > generated)
        if not longer:
            return min(most, 2 * generated)
        return min(most, longer[round(self.quantile * (len(longer) - 1))])

    def observe(self, request: RequestView) -> None:
        """Learn from a request that came to its own end."""
        if request.finish_reason not in ("stop", "length"):
            return
        length = request.num_output_tokens if request.finish_reason == "stop" else math.inf
        known = self._lengths.setdefault(request.client_id, {})
        for size in (None, _size(request)):
            known.setdefault(size, deque(maxlen=self.window)).append(length)
        self._lengths.move_to_end(request.client_id)
        if len(self._lengths) > MAX_CLIENTS:
            self._lengths.popitem(last=False)


def _size(request: RequestView) -> int:
    """Prompt lengths by their half octave."""
    return round(2 * math.log2(max(1, request.num_prompt_tokens)))


PREDICTORS: dict[str, Callable[[], Predictor]] = {"max_tokens": lambda: max_tokens, "quantile": RunningQuantile}


def predictor(option: str | Predictor) -> Predictor:
    """The predictor that an option names or is; ConfigError for anything else."""
    if isinstance(option, str) and option in PREDICTORS:
        return PREDICTORS[option]()
    # A class can be called too, but what it makes is no number.
    if isinstance(option, (str, type)) or not callable(option):
        raise ConfigError(
            f"predict={option!r:.200} is unknown; choose from {', '.join(PREDICTORS)}, or pass a function"
        )
    return option


class RemainingTokens:
    """How many tokens a request has yet to compute until it ends, by a predictor that learns from those that ended."""

    def __init__(self, predict: str | Predictor = "max_tokens") -> None:
        self.predict = predictor(predict)

    def __call__(self, request: RequestView) -> float:
        """Uncomputed tokens, and those predicted to be generated; at least one more."""
        return request.num_uncomputed_tokens + self.output(request)

    def output(self, request: RequestView) -> float:
        """Tokens yet to be generated, at least one."""
        return max(1, self.predict(request) - request.num_output_tokens)

    def observe(self, request: RequestView) -> None:
        """``request`` ended."""
        if isinstance(self.predict, LearningPredictor):
            self.predict.observe(request)

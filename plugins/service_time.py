"""How long a request will take: what deadline policies need to know, learned from the steps that ran."""

from __future__ import annotations

import math
from collections.abc import Iterator

from paged_backend.errors import ConfigError
from paged_backend.plugins.length_prediction import Predictor, RemainingTokens
from paged_backend.plugins.victims import due
from paged_backend.policies import LazyHeap, RequestView

# How much the newest of many observations counts.
SMOOTHING = 0.1


class StepCost:
    """Seconds of a decode step and of a prompt token, as running means; 0 until a step of the kind was seen.

    Steps without prompts tell what a decode step takes; what others take beyond that is shared by their prompt tokens.
    """

    def __init__(self) -> None:
        self.decode_step_s = 0.0
        self.prompt_token_s = 0.0
        self._num_decode_steps = 0
        self._num_prompt_steps = 0

    def observe(self, num_decodes: int, num_prefill_tokens: int, seconds: float) -> None:
        """A step took this long."""
        if num_prefill_tokens:
            decoding = self.decode_step_s if num_decodes else 0.0
            self._num_prompt_steps += 1
            share = max(SMOOTHING, 1 / self._num_prompt_steps)
            self.prompt_token_s += share * (max(0.0, seconds - decoding) / num_prefill_tokens - self.prompt_token_s)
        elif num_decodes:
            self._num_decode_steps += 1
            share = max(SMOOTHING, 1 / self._num_decode_steps)
            self.decode_step_s += share * (seconds - self.decode_step_s)

    def seconds(self, num_prompt_tokens: float, num_decode_steps: float) -> float:
        """How long this takes for a request that never has to wait."""
        return num_prompt_tokens * self.prompt_token_s + num_decode_steps * self.decode_step_s


class LatestStarts:
    """Requests by the latest moment at which they could start and still make their deadlines, never having to wait.

    predict: how much a request will generate. cost: what steps take. Both learn, so moments are kept as they were
    estimated last, and estimated again when they come. O(log n) amortised.
    """

    def __init__(self, predict: str | Predictor = "max_tokens", cost: StepCost | None = None) -> None:
        if cost is not None and not isinstance(cost, StepCost):
            raise ConfigError(f"cost must be a StepCost or None, got {cost!r:.200}")
        self.remaining = RemainingTokens(predict)
        self.cost = StepCost() if cost is None else cost
        self._heap: LazyHeap[RequestView] = LazyHeap()

    def of(self, request: RequestView) -> float:
        """The latest start by the estimate as it is now, infinity without a deadline."""
        return due(request) - self.cost.seconds(request.num_uncomputed_tokens, self.remaining.output(request))

    def add(self, request: RequestView) -> None:
        """Watch a request."""
        self._heap.push(request.order, self.of(request), request)

    def discard(self, order: int) -> None:
        """Watch it no longer."""
        self._heap.discard(order)

    def is_past(self, request: RequestView, now: float) -> bool:
        """Whether ``request`` is lost; if so, the next ``past`` yields it."""
        if self.of(request) >= now:
            return False
        self._heap.push(request.order, -math.inf, request)
        return True

    def past(self, now: float) -> Iterator[RequestView]:
        """Those that are lost, and watched no longer."""
        while (first := self._heap.first()) is not None and first[0] < now:
            request = first[1]
            self.add(request)
            if self.of(request) < now:
                self._heap.discard(request.order)
                yield request

"""How long a request will take: what policies need to know of time, learned from the steps that ran."""

from __future__ import annotations

import math
from collections.abc import Iterator

from paged_backend.errors import ConfigError
from paged_backend.plugins.length_prediction import Predictor, RemainingTokens
from paged_backend.plugins.victims import due
from paged_backend.policies import LazyHeap, RequestView

# What a step tells loses this share of its weight with each step after it: what steps cost hardly changes, but how full
# they are does.
COST_FORGETTING = 0.002
LOAD_FORGETTING = 0.01
# Relative to the squared mean: what varies less than this is taken not to vary.
RIDGE = 1e-3
# A start too late costs two requests: the one that misses its deadline, and the one whose place it took. So service is
# taken to be longer by this share than it looks.
MARGIN = 0.1


class StepCost:
    """What steps take, ``base + decodes * decode_s + prompt tokens * prompt_token_s``, and how full they are of late.

    A regression over the last several hundred steps tells what a prompt token takes beside whatever else its step
    does. 0 seconds until there were steps that differ in their prompt tokens; each observation costs O(1).
    """

    def __init__(self) -> None:
        self.prompt_token_s = 0.0
        self._alone_s = 0.0
        # Sums over steps, the older the lighter: 1, d, p, s, dd, dp, pp, ds, ps of decodes, prompt tokens, seconds.
        self._sums = [0.0] * 9
        # The seconds of the steps that decoded since the machine last was idle, as a mean, and how many they were.
        self._loaded_s = 0.0
        self._num_loaded = 0

    def observe(self, num_decodes: int, num_prefill_tokens: int, seconds: float) -> None:
        """A step took this long."""
        d, p, s = num_decodes, num_prefill_tokens, seconds
        new = (1.0, d, p, s, d * d, d * p, p * p, d * s, p * s)
        self._sums = [old * (1 - COST_FORGETTING) + term for old, term in zip(self._sums, new, strict=True)]
        self._fit()
        if num_decodes:
            self._num_loaded += 1
            self._loaded_s += max(LOAD_FORGETTING, 1 / self._num_loaded) * (seconds - self._loaded_s)

    def idle(self) -> None:
        """Nothing runs: what runs next finds no batch to share its steps with."""
        self._num_loaded = 0

    @property
    def decode_step_s(self) -> float:
        """A step of the running batch, prompts beside it included; after idling, one of a request alone."""
        return self._loaded_s if self._num_loaded else self._alone_s

    @property
    def prompt_weight(self) -> float:
        """What a prompt token costs beside an output token, from 0 to 1; 1 until steps of both kinds were seen."""
        _, decodes, prompt_tokens, seconds, *_ = self._sums
        decoding_s = seconds - prompt_tokens * self.prompt_token_s
        if not decodes or not self.prompt_token_s or decoding_s <= 0:
            return 1.0
        return min(1.0, self.prompt_token_s * decodes / decoding_s)

    def seconds(self, num_prompt_tokens: float, num_decode_steps: float) -> float:
        """How long this takes for a request that shares its steps with the running batch and never waits."""
        return num_prompt_tokens * self.prompt_token_s + num_decode_steps * self.decode_step_s

    def _fit(self) -> None:
        """Least squares with slopes of at least 0, of a prompt token at most what all steps took for theirs."""
        n, d, p, s, *products = self._sums
        d, p, s = d / n, p / n, s / n
        dd, dp, pp, ds, ps = (product / n for product in products)
        dd, dp, pp, ds, ps = dd - d * d, dp - d * p, pp - p * p, ds - d * s, ps - p * s
        dd, pp = dd + RIDGE * d * d, pp + RIDGE * p * p
        determinant = dd * pp - dp * dp
        decode = prompt = 0.0
        if determinant > RIDGE * dd * pp:
            decode, prompt = (pp * ds - dp * ps) / determinant, (dd * ps - dp * ds) / determinant
        if decode <= 0 or prompt <= 0:
            # One of them explains nothing: the other explains what there is.
            decode, prompt = (ds / dd if dd and decode > prompt else 0.0), (ps / pp if pp and decode <= prompt else 0.0)
        self.prompt_token_s = min(max(0.0, prompt), s / p) if p else 0.0
        decode = max(0.0, decode)
        self._alone_s = max(0.0, s - d * decode - p * self.prompt_token_s) + decode


class LatestStarts:
    """Requests by the latest moment at which they could start and still make their deadlines, with 10 % to spare.

    predict: how much a request will generate. cost: what steps take. Both learn, so moments are kept as they were
    estimated last, and estimated again when they come. O(log n) amortised.
    """

    def __init__(self, predict: str | Predictor = "quantile", cost: StepCost | None = None) -> None:
        if cost is not None and not isinstance(cost, StepCost):
            raise ConfigError(f"cost must be a StepCost or None, got {cost!r:.200}")
        self.remaining = RemainingTokens(predict)
        self.cost = StepCost() if cost is None else cost
        self._heap: LazyHeap[RequestView] = LazyHeap()

    def of(self, request: RequestView) -> float:
        """The latest start by the estimate as it is now, infinity without a deadline."""
        return due(request) - (1 + MARGIN) * self.service(request)

    def service(self, request: RequestView) -> float:
        """Seconds that ``request`` still needs, in the running batch as it is now."""
        return self.cost.seconds(request.num_uncomputed_tokens, self.remaining.output(request))

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

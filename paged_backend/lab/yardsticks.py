"""Yardsticks: policies that know what no engine can, or that are as plain as can be, to hold others against."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from functools import cached_property
from typing import Any

from paged_backend.hookspecs import hookimpl
from paged_backend.lab.belady import Belady, uses_of
from paged_backend.lab.moore_hodgson import most_in_time
from paged_backend.lab.step_cost import StepCost
from paged_backend.lab.trace import TraceRequest
from paged_backend.plugins.length_prediction import Predictor
from paged_backend.plugins.service_time import LatestStarts
from paged_backend.plugins.victims import due
from paged_backend.policies import KeyedPolicy, RequestView

SCHEDULERS = ("oracle_sjf", "fifo_shed", "moore_hodgson")
EVICTIONS = ("belady",)
# Of the machine, for those who wait; on Azure's conversations 1/2 makes more of them in time than 1 or 1/3.
THEIRS = 0.5


class OracleSjf(KeyedPolicy):
    """The least work left goes first, by the true lengths: near to the least mean latency that there is.

    Work is the share of the machine that a request takes while all seats are taken: its prompt tokens, its decodes, and
    of each step's fixed time one part in ``seats``. Nobody who runs is set aside.
    """

    def __init__(self, output_length: Callable[[RequestView], int], cost: StepCost, seats: int) -> None:
        self._output_length = output_length
        self._cost = cost
        self._decode_s = cost.fixed_s / seats + cost.decode_s

    def key(self, request: RequestView) -> float:
        """Seconds of the machine."""
        left = self._output_length(request) - request.num_output_tokens
        context = left * (request.num_tokens + left / 2)
        prompt_s = self._cost.prefill_token_s * request.num_uncomputed_tokens
        return prompt_s + self._decode_s * left + self._cost.context_token_s * context


class FifoShed(KeyedPolicy):
    """First come, first served, but who would miss its deadline even if it started now is given up, as in ``deadline``.

    predict: output length, as there.
    """

    lookahead = 0

    def __init__(self, predict: str | Predictor = "quantile") -> None:
        self._latest_starts = LatestStarts(predict)
        self._running: set[int] = set()

    def key(self, request: RequestView) -> Any:
        """Arrival."""
        return request.order

    def add(self, request: RequestView, now: float) -> None:
        """O(log n)."""
        self._stops(request)
        super().add(request, now)
        self._latest_starts.add(request)

    def remove(self, request: RequestView) -> None:
        """O(log n) amortised."""
        super().remove(request)
        self._latest_starts.discard(request.order)
        if not request.is_waiting:
            self._running.add(request.order)

    def candidates(self, now: float) -> Generator[RequestView]:
        """Those that can be in time."""
        with closing(super().candidates(now)) as ordered:
            for request in ordered:
                if not self._latest_starts.is_past(request, now):
                    yield request

    def doomed(self, now: float) -> Iterator[RequestView]:
        """Those that cannot."""
        return self._latest_starts.past(now)

    def on_step(self, num_decodes: int, num_prefill_tokens: int, seconds: float) -> None:
        """Learns what steps take."""
        self._latest_starts.cost.observe(num_decodes, num_prefill_tokens, seconds)

    def on_finished(self, request: RequestView, now: float) -> None:
        """Lets the predictor learn."""
        self._stops(request)
        self._latest_starts.remaining.observe(request)

    def _stops(self, request: RequestView) -> None:
        self._running.discard(request.order)
        if not self._running:
            self._latest_starts.cost.idle()


class MooreHodgson(FifoShed):
    """Those go first that Moore and Hodgson's rule chooses of all that wait, by the true lengths.

    Their rule is for one machine that does one job after the other, all of which are there when it begins. Here it is
    asked anew whenever somebody may begin, of those that wait by then. With all seats taken the machine lets a request
    begin every ``service / seats`` seconds, where service is what the request takes beside the running batch, with
    steps as long as they are of late. Half of that rate counts as theirs who wait, for others will come meanwhile: the
    work of a request is ``2 * service / seats``. It must begin by its latest start, so its work is due when it would be
    done then. Who is not chosen comes behind, by deadline, and is given up only once it cannot be in time.

    What the rule chooses is the best for that machine if nobody else came. So a replay under it is no bound, but what
    can be had.
    """

    def __init__(self, output_length: Callable[[RequestView], int], seats: int) -> None:
        super().__init__(output_length)
        self._seats = seats

    def key(self, request: RequestView) -> float:
        """The deadline."""
        return due(request)

    def candidates(self, now: float) -> Generator[RequestView]:
        """The chosen ones, then the others. O(n log n)."""
        with closing(super().candidates(now)) as in_time:
            waiting = list(in_time)
        jobs = []
        for request in waiting:
            work = self._latest_starts.service(request) / (THEIRS * self._seats)
            jobs.append((self._latest_starts.of(request) + work, work))
        chosen = most_in_time(jobs, now)
        left_out = set(range(len(waiting))).difference(chosen)
        yield from (waiting[place] for place in (*chosen, *sorted(left_out)))


class Yardsticks:
    """A plugin that names the policies above, and ``belady``, for the replay of one trace.

    seats: of the machine. awaits: whether the request of an order has yet to begin.
    """

    def __init__(
        self, trace: Sequence[TraceRequest], cost: StepCost, seats: int, block_size: int, awaits: Callable[[int], bool]
    ) -> None:
        self._trace = trace
        self._cost = cost
        self._seats = seats
        self._block_size = block_size
        self._awaits = awaits

    def output_length(self, request: RequestView) -> int:
        """How many tokens it will have generated."""
        return self._trace[request.order].output_length

    @cached_property
    def _uses(self) -> dict[int, list[int]]:
        return uses_of(self._trace, self._block_size)

    @hookimpl
    def register_schedulers(self, register: Callable[[str, Any], None]) -> None:
        """Offer SCHEDULERS."""
        register("oracle_sjf", lambda: OracleSjf(self.output_length, self._cost, self._seats))
        register("fifo_shed", FifoShed)
        register("moore_hodgson", lambda: MooreHodgson(self.output_length, self._seats))

    @hookimpl
    def register_evictions(self, register: Callable[[str, Any], None]) -> None:
        """Offer EVICTIONS."""
        register("belady", lambda: Belady(self._uses, self._awaits))

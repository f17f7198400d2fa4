"""RequestTable: the requests that are not over, when each has to end, and the outputs of those that ended."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Collection, Iterator, Sequence

from paged_backend.engine.scheduler import ScheduledStep, Scheduler
from paged_backend.errors import RequestRefused, contained
from paged_backend.outputs import FinishReason, RequestOutput
from paged_backend.policy.plugin_manager import PluginManager
from paged_backend.policy.policy_errors import PolicyErrors
from paged_backend.request.request import Request
from paged_backend.sampling.sampled import Sampled
from paged_backend.sampling.stopping import finish_reason

logger = logging.getLogger("paged_backend")


class RequestTable:
    """Knows each unfinished request and its samples by id, delivers their tokens and ends them.

    clock: seconds, for the moments at which requests end.
    """

    def __init__(
        self, scheduler: Scheduler, clock: Callable[[], float], plugins: PluginManager, policy_errors: PolicyErrors
    ) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._plugins = plugins
        self._policy_errors = policy_errors
        self._samples: dict[str, list[Request]] = {}
        self._time_limits: list[tuple[float, int, Request]] = []
        self._ended: list[RequestOutput] = []

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._samples

    def __iter__(self) -> Iterator[Request]:
        """Every unfinished sample of every request."""
        return iter([sample for samples in self._samples.values() for sample in samples])

    def __len__(self) -> int:
        return len(self._samples)

    def samples(self, request_id: str) -> list[Request]:
        """The unfinished samples of a request; none if it is over or unknown."""
        return list(self._samples.get(request_id, ()))

    def check_free(self, request_id: str) -> None:
        """Raise RequestRefused if an unfinished request has this id."""
        if request_id in self._samples:
            raise RequestRefused(f"request_id {request_id!r} is taken by an unfinished request")

    def add(self, request: Request) -> None:
        """Take in a request with its forks."""
        samples = self._samples[request.request_id] = [request, *request.forks]
        if request.lockstep is not None:
            request.lockstep.members += samples
        # Requests that ended long before their limits must not pile up.
        if len(self._time_limits) > 100 + 4 * len(self._samples):
            self._time_limits = [entry for entry in self._time_limits if entry[2].request_id in self._samples]
            heapq.heapify(self._time_limits)
        for limit in {request.time_limit, request.queue_limit}:
            if limit is not None:
                heapq.heappush(self._time_limits, (limit, request.order, request))

    # Delivering

    def deliver(
        self,
        step: ScheduledStep,
        rows: Sequence[Request],
        sampled: Sampled | None,
        now: float,
        eos_token_ids: Collection[int],
    ) -> list[RequestOutput]:
        """Append each row's token, end what is complete; returns the outputs of those that go on."""
        for request in step.admitted:
            metrics = request.output.metrics
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = step.time
                metrics.num_cached_tokens = request.num_cached_tokens
        if sampled is None:
            return []
        advanced = []
        for request, token, logprobs in zip(rows, sampled.tokens, sampled.logprobs, strict=True):
            if isinstance(token, Exception):
                self.fail(request, token, now=now)
                continue
            request.append_token(token)
            output = request.output
            output.new_token_ids = [token]
            if output.metrics.first_token_time is None:
                output.metrics.first_token_time = now
            if logprobs is not None:
                output.logprobs = output.logprobs or []
                output.logprobs.append(logprobs)
            advanced.append(request)
        # Only now that all have their tokens: a stop condition may look at those of its lockstep.
        going_on = []
        for request in advanced:
            try:
                reason = finish_reason(request, request.output.token_ids[-1], eos_token_ids)
            except BaseException as error:
                self.fail(request, contained(error), keep_new_tokens=True, now=now)
                continue
            if reason is None:
                going_on.append(request.output)
            else:
                self.end(request, reason, keep_new_tokens=True, now=now)
        return going_on

    # Ending

    @property
    def has_ended(self) -> bool:
        """Whether outputs of ended requests wait to be taken."""
        return bool(self._ended)

    def take_ended(self) -> list[RequestOutput]:
        """The outputs of requests that ended since they were last taken."""
        ended, self._ended = self._ended, []
        return ended

    def give_back(self, outputs: Sequence[RequestOutput]) -> None:
        """Let outputs that could not be handed out be taken again."""
        self._ended = [*(output for output in outputs if output.finished), *self._ended]

    def end(
        self, request: Request, reason: FinishReason, *, keep_new_tokens: bool = False, now: float | None = None
    ) -> None:
        """Finish a request and the forks that never split from it; their outputs wait to be taken.

        now: when that is, in seconds of the clock, which is read if nobody has just done so.
        """
        now = self._clock() if now is None else now
        for sample in (request, *request.forks):
            if sample.is_finished:
                continue
            if not keep_new_tokens:
                sample.output.new_token_ids = []
            sample.output.error = request.output.error
            self._scheduler.finish(sample, reason, now)
            samples = self._samples[sample.request_id]
            samples.remove(sample)
            if not samples:
                del self._samples[sample.request_id]
            self._ended.append(sample.output)
            if self._plugins.listens("request_finished"):
                copy = sample.output.snapshot()
                self._plugins.notify("request_finished", self._policy_errors, request=sample.view, output=copy)
            sample.forget_view()

    def abort(self, request_id: str) -> bool:
        """End a request with ``"abort"``; False if it is over or unknown."""
        samples = self.samples(request_id)
        for request in samples:
            self.end(request, "abort")
        return bool(samples)

    def fail(
        self, request: Request, error: Exception, *, keep_new_tokens: bool = False, now: float | None = None
    ) -> None:
        """End a request with ``"error"`` because of ``error``."""
        logger.warning("request %s failed: %r", request.request_id, error)
        request.output.error = error
        self.end(request, "error", keep_new_tokens=keep_new_tokens, now=now)

    @property
    def next_time_limit(self) -> float | None:
        """When the next request may have to end with ``"timeout"``."""
        return self._time_limits[0][0] if self._time_limits else None

    def expire(self, now: float) -> None:
        """End with ``"timeout"`` what is past its time limit, or given up by the scheduling policy."""
        while self._time_limits and self._time_limits[0][0] <= now:
            limit, _, request = self._time_limits[0]
            if limit == request.time_limit:
                for sample in self.samples(request.request_id):
                    if sample.time_limit == limit and not sample.is_finished:
                        self.end(sample, "timeout", now=now)
            elif request.last_scheduled_time is None and not request.is_finished:
                self.end(request, "timeout", now=now)
            heapq.heappop(self._time_limits)
        for request in self._scheduler.policy.doomed(now):
            self.end(request, "timeout", now=now)

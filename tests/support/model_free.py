"""A virtual engine for tests: what a scheduling policy needs to show what it does, and a record of who began when."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from paged_backend.engine.scheduler import ScheduledStep
from paged_backend.lab.virtual_engine import VirtualEngine
from paged_backend.plugins.eviction import Lru
from paged_backend.policies import EvictionPolicy, SchedulingPolicy
from paged_backend.request.request import Request
from paged_backend.sampling_params import SamplingParams


class ModelFree(VirtualEngine):
    """Runs requests of given lengths through the real scheduler; time passes by ``step_s`` a step.

    starts: the requests in the order in which they began to run, each with those that waited on at that moment.
    ended: the requests in the order in which they ended.
    """

    def __init__(
        self,
        policy: SchedulingPolicy,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 4,
        budget: int = 16,
        eviction: Callable[[], EvictionPolicy] = Lru,
        step_s: Callable[[int, int], float] = lambda num_decodes, num_prefill_tokens: 0.01,
    ) -> None:
        super().__init__(
            policy,
            eviction,
            lambda step: self.step_s(len(step.decodes), step.num_prefill_tokens),
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
        )
        self.step_s = step_s
        self.starts: list[tuple[Request, list[Request]]] = []
        self.ended: list[Request] = []
        self._by_id: dict[str, Request] = {}
        self._orders = itertools.count()
        self._tokens = itertools.count(1)

    def add(
        self,
        prompt: int | list[int],
        output: int,
        *,
        max_tokens: int | None = None,
        deadline: float | None = None,
        **options: Any,
    ) -> Request:
        """Queue a request that generates ``output`` tokens after ``prompt`` tokens, given or that many unique ones."""
        tokens = list(itertools.islice(self._tokens, prompt)) if isinstance(prompt, int) else prompt
        order = next(self._orders)
        params = SamplingParams(max_tokens=max_tokens or output)
        request = Request(str(order), tokens, params, self.now, order, deadline=deadline, **options)
        assert self.blocks.shortage(request.num_tokens + output) is None
        self._by_id[request.request_id] = request
        self.enqueue(request, output)
        return request

    def step(self, *, drain: bool = False) -> ScheduledStep:  # type: ignore[override]
        """Plan a step, pretend to run it, and let what is complete end."""
        waiting = dict.fromkeys(self.policy.waiting)
        stepped = super().step(drain=drain)
        if not stepped.step:
            # Whoever drives an engine that holds everybody back comes again later.
            self.now += self.step_s(0, 0)
        for request in stepped.step.admitted:
            waiting.pop(request)
            self.starts.append((request, [other for other in waiting if other.output.finish_reason != "timeout"]))
        self.ended += [self._by_id[output.request_id] for output in stepped.outputs if output.finished]
        return stepped.step

    def run(self, max_steps: int = 10_000, *, drain: bool = True) -> None:
        """Step until nothing is left."""
        for _ in range(max_steps):
            if not self.scheduler.has_work():
                return
            self.step(drain=drain)
        raise AssertionError(
            f"{self.policy.waiting} wait and {list(self.scheduler.running)} run after {max_steps} steps"
        )

    def abort(self, request: Request) -> None:
        self.requests.end(request, "abort")
        self.requests.take_ended()
        self.ended.append(request)

    @property
    def start_orders(self) -> list[int]:
        return [request.order for request, _ in self.starts]

    def assert_sound(self) -> None:
        """Nothing was reported, no block is lost."""
        assert not self.errors.counts, self.errors.counts
        self.blocks.check_integrity()

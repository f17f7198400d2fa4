"""A scheduler and a block manager at work without a model: what a scheduling policy needs to show what it does."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from paged_backend.engine.scheduler import ScheduledStep, Scheduler
from paged_backend.kernels import FULL
from paged_backend.memory.block_manager import BlockManager
from paged_backend.memory.kv_group import KVGroup
from paged_backend.plugins.eviction import Lru
from paged_backend.policies import EvictionPolicy, SchedulingPolicy
from paged_backend.policy.policy_errors import SlowAnswer
from paged_backend.policy.policy_guard import PolicyGuard
from paged_backend.request.request import Request
from paged_backend.sampling_params import SamplingParams


class ModelFree:
    """Runs requests of given lengths through the real scheduler; time passes by ``step_s`` a step.

    starts: the requests in the order in which they began to run, each with those that waited on at that moment.
    errors: what the policies were found guilty of. ended: the requests in the order in which they ended.
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
        self.errors: list[tuple[object, str, object]] = []
        self.blocks = BlockManager(
            [KVGroup(FULL, (0,), 1)], [num_blocks], block_size, max_num_seqs, budget, [eviction()], self._note
        )
        self.policy = PolicyGuard(policy, self._note)
        self.scheduler = Scheduler(self.blocks, self.policy, budget)
        self.now = 0.0
        self.step_s = step_s
        self.starts: list[tuple[Request, list[Request]]] = []
        self.ended: list[Request] = []
        self._outputs: dict[Request, int] = {}
        self._orders = itertools.count()
        self._tokens = itertools.count(1)

    def _note(self, policy: object, method: str, error: object) -> None:
        # A busy machine makes anybody slow.
        if not isinstance(error, SlowAnswer):
            self.errors.append((policy, method, error))

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
        self._outputs[request] = output
        self.scheduler.add(request, self.now)
        return request

    def step(self, *, drain: bool = False) -> ScheduledStep:
        """Plan a step, pretend to run it, and let what is complete end."""
        for request in self.policy.doomed(self.now):
            self._end(request, "timeout")
        waiting = dict.fromkeys(self.policy.waiting)
        step = self.scheduler.schedule(self.now, drain=drain)
        for request in step.admitted:
            waiting.pop(request)
            self.starts.append((request, list(waiting)))
        rows = step.sampling
        self.now += self.step_s(len(step.decodes), step.num_prefill_tokens)
        self.scheduler.commit(step, self.now)
        for request in rows:
            request.append_token(next(self._tokens))
            if request.num_output_tokens == self._outputs[request]:
                self._end(request, "stop" if request.num_output_tokens < request.params.max_tokens else "length")
        return step

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
        self._end(request, "abort")

    def _end(self, request: Request, reason: Any) -> None:
        self.scheduler.finish(request, reason, self.now)
        self.ended.append(request)

    @property
    def start_orders(self) -> list[int]:
        return [request.order for request, _ in self.starts]

    def assert_sound(self) -> None:
        """Nothing was reported, no block is lost."""
        assert not self.errors, self.errors
        self.blocks.check_integrity()

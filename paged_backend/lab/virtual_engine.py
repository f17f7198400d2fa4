"""VirtualEngine: all of an engine that decides who runs when, and no model."""

from __future__ import annotations

from collections.abc import Callable

from paged_backend.engine.request_table import RequestTable
from paged_backend.engine.scheduler import ScheduledStep, Scheduler
from paged_backend.engine.stats_recorder import StatsRecorder
from paged_backend.engine.step_loop import StepLoop, Stepped
from paged_backend.lab.virtual_executor import EOS, VirtualExecutor
from paged_backend.memory.block_manager import BlockManager
from paged_backend.memory.kv_group import KVGroup
from paged_backend.policies import EvictionPolicy, SchedulingPolicy
from paged_backend.policy.plugin_manager import PluginManager
from paged_backend.policy.policy_errors import PolicyErrors
from paged_backend.policy.policy_guard import PolicyGuard
from paged_backend.request.request import Request
from paged_backend.stats import EngineStats


class VirtualEngine:
    """The scheduler, the books of blocks and the step loop of engines, on a clock that passes with the steps.

    One KV group of full attention; no recurrent state. num_blocks, block_size, max_num_seqs, max_num_batched_tokens: as
    an engine's. step_seconds: how long a planned step takes. guard: what stands between the scheduler and its policy.
    errors: what the policies did wrong; slow answers are none, since the machine's time does not count here. plugins:
    those whose hooks are called; by default none but the built-in ones.
    """

    def __init__(
        self,
        policy: SchedulingPolicy,
        make_eviction: Callable[[], EvictionPolicy],
        step_seconds: Callable[[ScheduledStep], float],
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool = True,
        guard: Callable[[SchedulingPolicy, PolicyErrors], PolicyGuard] = PolicyGuard,
        plugins: PluginManager | None = None,
    ) -> None:
        # It takes torch, which importing this does without.
        from paged_backend.kernels import FULL

        self.errors = PolicyErrors(times_answers=False)
        self.blocks = BlockManager(
            [KVGroup(FULL, (0,), 1)],
            [num_blocks],
            block_size,
            max_num_seqs,
            max_num_batched_tokens,
            [make_eviction()],
            self.errors,
            enable_prefix_caching=enable_prefix_caching,
        )
        self.policy = guard(policy, self.errors)
        self.scheduler = Scheduler(self.blocks, self.policy, max_num_batched_tokens)
        self.executor = VirtualExecutor(self.blocks, step_seconds)
        self._recorder = StatsRecorder()
        plugins = plugins or PluginManager(load_entry_points=False)
        self.requests = RequestTable(self.scheduler, self.executor.clock, plugins, self.errors)
        self._steps = StepLoop(self.scheduler, self.requests, self._recorder, self.executor.clock)

    @property
    def now(self) -> float:
        """Seconds; it passes with the steps, and may be set forward between them."""
        return self.executor.now

    @now.setter
    def now(self, seconds: float) -> None:
        self.executor.now = seconds

    def enqueue(self, request: Request, output_length: int) -> None:
        """Queue a request that generates so many tokens."""
        self.executor.expect(request, output_length)
        self.requests.add(request)
        self.scheduler.add(request, self.now)

    def step(self, *, drain: bool = False) -> Stepped:
        """One step. drain: nothing more will be added, so nobody is held back for more company."""
        return self._steps.run(self.executor, (EOS,), drain=drain)

    def stats(self) -> EngineStats:
        """Numbers since it began; a token takes one byte."""
        reserved = self.blocks.pools[0].num_blocks * self.blocks.block_size
        return self._recorder.snapshot(self.scheduler, reserved, dict(self.errors.counts))

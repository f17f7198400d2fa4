"""StatsRecorder: adds up what the steps of an engine did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paged_backend.engine.scheduler import ScheduledStep, Scheduler
from paged_backend.memory.block_manager import BlockManager
from paged_backend.outputs import RequestOutput
from paged_backend.stats import EngineStats, GroupStats, StepStats


class StatsRecorder:
    """Adds up what the steps of an engine did."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_finished = 0
        self.num_prompt_tokens = 0
        self.num_prefill_tokens = 0
        self.num_generated_tokens = 0
        self.peak_running = 0
        self.peak_allocated_bytes = 0
        self._memory: list[MemoryOverTime] = []

    def record_step(
        self,
        scheduler: Scheduler,
        step: ScheduledStep,
        outputs: Sequence[RequestOutput],
        num_prefill_tokens: int,
        num_new_prompt_tokens: int,
        laps: Mapping[str, float],
        now: float,
    ) -> StepStats:
        """Book one step and describe it."""
        num_new_tokens = sum([len(output.new_token_ids) for output in outputs])
        num_finished = sum([output.finish_reason is not None for output in outputs])
        self.num_steps += 1
        self.num_finished += num_finished
        self.num_prompt_tokens += num_new_prompt_tokens
        self.num_prefill_tokens += num_prefill_tokens
        self.num_generated_tokens += num_new_tokens
        self.peak_running = max(self.peak_running, len(step.decodes) + len(step.prefills))
        self._record_memory(scheduler, now)
        return StepStats(
            step=self.num_steps,
            time=now,
            num_waiting=scheduler.num_waiting,
            num_running=len(scheduler.running),
            num_decodes=len(step.decodes),
            num_prefill_tokens=num_prefill_tokens,
            num_context_tokens=sum([request.num_computed_tokens for request in step.requests]),
            num_new_tokens=num_new_tokens,
            num_finished=num_finished,
            num_preempted=len(step.preempted),
            schedule_s=laps.get("schedule", 0.0),
            batch_s=laps.get("batch", 0.0),
            forward_s=laps.get("forward", 0.0),
            sample_s=laps.get("sample", 0.0),
            update_s=laps.get("update", 0.0),
        )

    def _record_memory(self, scheduler: Scheduler, now: float) -> None:
        blocks = scheduler.blocks
        if not self._memory:
            self._memory = [MemoryOverTime() for _ in blocks.groups]
        allocated_bytes = 0
        for g, (group, pool) in enumerate(zip(blocks.groups, blocks.pools, strict=True)):
            allocated = pool.num_owned * blocks.block_size
            filled = allocated - blocks.num_unfilled_slots(g)
            self._memory[g].record(now, allocated, filled, pool.num_cached * blocks.block_size)
            allocated_bytes += allocated * group.bytes_per_token
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, allocated_bytes)

    def snapshot(self, scheduler: Scheduler, reserved_bytes: int, policy_errors: dict[str, int]) -> EngineStats:
        """Everything so far, and the memory as it is now."""
        groups = tuple(self._group(scheduler.blocks, g) for g in range(len(scheduler.blocks.groups)))
        allocated = sum(group.mean_allocated_slots * group.bytes_per_token for group in groups)
        wasted = sum(group.mean_wasted_slots * group.bytes_per_token for group in groups)
        return EngineStats(
            num_waiting=scheduler.num_waiting,
            num_running=len(scheduler.running),
            num_finished=self.num_finished,
            num_steps=self.num_steps,
            num_prompt_tokens=self.num_prompt_tokens,
            num_prefill_tokens=self.num_prefill_tokens,
            num_generated_tokens=self.num_generated_tokens,
            num_cached_tokens=scheduler.num_cached_tokens,
            num_prefix_hits=scheduler.num_prefix_hits,
            num_preemptions=scheduler.num_preemptions,
            num_recomputed_tokens=scheduler.num_recomputed_tokens,
            peak_running=self.peak_running,
            reserved_bytes=reserved_bytes,
            peak_allocated_bytes=self.peak_allocated_bytes,
            waste=wasted / allocated if allocated else 0.0,
            groups=groups,
            policy_errors=policy_errors,
        )

    def _group(self, blocks: BlockManager, g: int) -> GroupStats:
        group, pool, size = blocks.groups[g], blocks.pools[g], blocks.block_size
        memory = self._memory[g] if self._memory else MemoryOverTime()
        return GroupStats(
            rule=str(group.rule),
            num_layers=len(group.layers),
            block_size=size,
            num_blocks=pool.num_blocks,
            num_owned_blocks=pool.num_owned,
            num_cached_blocks=pool.num_cached,
            num_free_blocks=pool.num_free,
            num_filled_slots=pool.num_owned * size - blocks.num_unfilled_slots(g),
            bytes_per_token=group.bytes_per_token,
            num_evictions=pool.num_evictions,
            mean_allocated_slots=memory.mean(0),
            mean_filled_slots=memory.mean(1),
            mean_cached_slots=memory.mean(2),
            peak_allocated_slots=memory.peak,
        )


class MemoryOverTime:
    """Time-weighted sums of allocated, filled and cached slots, each value holding until the next is recorded."""

    def __init__(self) -> None:
        self.peak = 0
        self._last: tuple[float, tuple[int, int, int]] | None = None
        self._sums = [0.0, 0.0, 0.0]
        self._seconds = 0.0

    def record(self, now: float, allocated: int, filled: int, cached: int) -> None:
        if self._last is not None:
            then, values = self._last
            self._seconds += now - then
            for i, value in enumerate(values):
                self._sums[i] += value * (now - then)
        self._last = (now, (allocated, filled, cached))
        self.peak = max(self.peak, allocated)

    def mean(self, index: int) -> float:
        return self._sums[index] / self._seconds if self._seconds else 0.0

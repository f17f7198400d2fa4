"""Numbers about a step, about memory, and about an engine since it started."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paged_backend.request import RequestOutput
    from paged_backend.scheduler import ScheduledStep, Scheduler


class Stopwatch:
    """Splits a step's wall time into named laps, in seconds."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Book the time since the last lap under ``name``."""
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._last
        self._last = now


@dataclass(frozen=True)
class GroupStats:
    """One KV group's blocks now.

    reserved: slots of the pool. allocated: slots of the blocks that requests own. filled: allocated slots with a
    token in them. wasted: allocated minus filled. cached: slots of unused blocks kept for reuse. free: the rest.
    """

    rule: str
    num_layers: int
    block_size: int
    num_blocks: int
    num_owned_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
    num_filled_slots: int
    bytes_per_token: int
    num_evictions: int

    @property
    def num_reserved_slots(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def num_allocated_slots(self) -> int:
        return self.num_owned_blocks * self.block_size

    @property
    def num_cached_slots(self) -> int:
        return self.num_cached_blocks * self.block_size

    @property
    def num_wasted_slots(self) -> int:
        return self.num_allocated_slots - self.num_filled_slots


@dataclass(frozen=True)
class StepStats:
    """One step. Times are seconds of the engine's clock, durations wall seconds."""

    step: int
    time: float
    num_waiting: int
    num_running: int
    num_decodes: int
    num_prefill_tokens: int
    num_new_tokens: int
    num_finished: int
    num_preempted: int
    schedule_s: float
    batch_s: float
    forward_s: float
    sample_s: float
    update_s: float

    @property
    def overhead_s(self) -> float:
        """What the step took beside the forward pass."""
        return self.schedule_s + self.batch_s + self.sample_s + self.update_s


@dataclass(frozen=True)
class EngineStats:
    """An engine since it started. Token counts are per request token, not per layer.

    waste: the time-weighted share of allocated slots that no token filled.
    """

    num_waiting: int
    num_running: int
    num_finished: int
    num_steps: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_cached_tokens: int
    num_prefix_hits: int
    num_preemptions: int
    num_recomputed_tokens: int
    peak_running: int
    reserved_bytes: int
    peak_allocated_bytes: int
    waste: float
    groups: tuple[GroupStats, ...]
    policy_errors: dict[str, int] = field(default_factory=dict)


class StatsRecorder:
    """Adds up what the steps of an engine did."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_finished = 0
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.peak_running = 0
        self.peak_allocated_bytes = 0
        self._allocated_seconds = 0.0
        self._wasted_seconds = 0.0
        self._last: tuple[float, int, int] | None = None

    def record_step(
        self,
        scheduler: Scheduler,
        step: ScheduledStep,
        outputs: Sequence[RequestOutput],
        num_prefill_tokens: int,
        laps: Mapping[str, float],
        now: float,
    ) -> StepStats:
        """Book one step and describe it."""
        num_new_tokens = sum(len(output.new_token_ids) for output in outputs)
        num_finished = sum(output.finished for output in outputs)
        self.num_steps += 1
        self.num_finished += num_finished
        self.num_prompt_tokens += num_prefill_tokens
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
        allocated = wasted = 0
        for g, (group, pool) in enumerate(zip(blocks.groups, blocks.pools, strict=True)):
            allocated += pool.num_owned * blocks.block_size * group.bytes_per_token
            wasted += blocks.num_unfilled_slots(g) * group.bytes_per_token
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, allocated)
        if self._last is not None:
            then, allocated_then, wasted_then = self._last
            self._allocated_seconds += allocated_then * (now - then)
            self._wasted_seconds += wasted_then * (now - then)
        self._last = (now, allocated, wasted)

    def snapshot(
        self,
        scheduler: Scheduler,
        groups: tuple[GroupStats, ...],
        reserved_bytes: int,
        policy_errors: dict[str, int],
    ) -> EngineStats:
        return EngineStats(
            num_waiting=scheduler.num_waiting,
            num_running=len(scheduler.running),
            num_finished=self.num_finished,
            num_steps=self.num_steps,
            num_prompt_tokens=self.num_prompt_tokens,
            num_generated_tokens=self.num_generated_tokens,
            num_cached_tokens=scheduler.num_cached_tokens,
            num_prefix_hits=scheduler.num_prefix_hits,
            num_preemptions=scheduler.num_preemptions,
            num_recomputed_tokens=scheduler.num_recomputed_tokens,
            peak_running=self.peak_running,
            reserved_bytes=reserved_bytes,
            peak_allocated_bytes=self.peak_allocated_bytes,
            waste=self._wasted_seconds / self._allocated_seconds if self._allocated_seconds else 0.0,
            groups=groups,
            policy_errors=policy_errors,
        )

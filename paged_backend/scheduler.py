"""Scheduler: what the next step computes, under a token budget and the blocks there are."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field

from paged_backend.block_manager import BlockManager
from paged_backend.policy_guard import PolicyGuard
from paged_backend.request import FinishReason, Request, RequestState


@dataclass
class ScheduledStep:
    """One step's work: every decode feeds one token; each prefill a chunk of ``request.num_scheduled_tokens``.

    admitted, preempted: who began to run, and who had to stop with the number of blocks it gave up.
    """

    decodes: list[Request] = field(default_factory=list)
    prefills: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    preempted: list[tuple[Request, int]] = field(default_factory=list)

    @property
    def requests(self) -> list[Request]:
        return self.decodes + self.prefills

    @property
    def sampling(self) -> list[Request]:
        """Whose next token the step yields, one logits row each: decodes, then finished prompts and their forks."""
        rows = list(self.decodes)
        for request in self.prefills:
            if request.num_scheduled_tokens == request.num_uncomputed_tokens:
                rows += [request, *request.forks]
        return rows

    @property
    def num_prefill_tokens(self) -> int:
        return sum(request.num_scheduled_tokens for request in self.prefills)

    def __bool__(self) -> bool:
        return bool(self.decodes or self.prefills)


class Scheduler:
    """Every running decode first, then prefill chunks in the policy's order, then new requests while budget lasts.

    ``running`` is in order of admission. The policy orders, the block manager gives blocks, the scheduler decides that
    something always moves: whoever runs alone fits, and a victim comes back ahead of later arrivals.
    """

    def __init__(self, blocks: BlockManager, policy: PolicyGuard, max_num_batched_tokens: int) -> None:
        self.blocks = blocks
        self.policy = policy
        self.max_num_batched_tokens = max_num_batched_tokens
        self.running: dict[Request, None] = {}
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0
        self.num_prefix_hits = 0
        self.num_cached_tokens = 0

    @property
    def num_waiting(self) -> int:
        return len(self.policy)

    def has_work(self) -> bool:
        return bool(self.running) or len(self.policy) > 0

    def add(self, request: Request, now: float) -> None:
        request.state = RequestState.WAITING
        self.policy.add(request, now)

    def schedule(self, now: float) -> ScheduledStep:
        """Plan one step. Nothing is lost if the step is never carried out: it is planned again."""
        step = ScheduledStep()
        for request in self.running:
            request.num_scheduled_tokens = 0
        self._schedule_decodes(step, now)
        budget = self._schedule_prefills(step, now)
        if not step.preempted:
            self._admit(step, budget, now)
        for request in step.requests:
            request.last_scheduled_time = now
        return step

    def _schedule_decodes(self, step: ScheduledStep, now: float) -> None:
        for request in list(self.running):
            if request.state is not RequestState.DECODE:
                continue
            if self._make_room(request, request.num_tokens, step, now):
                request.num_scheduled_tokens = 1
        step.decodes = [r for r in self.running if r.state is RequestState.DECODE and r.num_scheduled_tokens]

    def _schedule_prefills(self, step: ScheduledStep, now: float) -> int:
        """Feed half-prefilled requests; returns the token budget that is left."""
        budget = self.max_num_batched_tokens
        prefilling = [r for r in self.running if r.state is RequestState.PREFILL]
        if not prefilling:
            return budget
        ranked = self.policy.rank_prefills(prefilling, now)
        for request in ranked:
            if budget and request.state is RequestState.PREFILL:
                budget -= self._schedule_chunk(request, budget, step)
        if not step:
            # Nothing decodes and no chunk finds blocks: the others make room for the first.
            request = ranked[0]
            chunk = min(request.num_uncomputed_tokens, budget)
            if self._make_room(request, request.num_computed_tokens + chunk, step, now):
                budget -= self._schedule_chunk(request, budget, step)
        return budget

    def _schedule_chunk(self, request: Request, budget: int, step: ScheduledStep) -> int:
        chunk = min(request.num_uncomputed_tokens, budget)
        if not self.blocks.reserve(request, request.num_computed_tokens + chunk):
            return 0
        request.num_scheduled_tokens = chunk
        step.prefills.append(request)
        return chunk

    def _make_room(self, request: Request, num_tokens: int, step: ScheduledStep, now: float) -> bool:
        """Reserve slots, preempting victims until it works; False when ``request`` itself had to give way."""
        while request in self.running and not self.blocks.reserve(request, num_tokens):
            self.preempt(self._victim(now), step, now)
        return request in self.running

    def _victim(self, now: float) -> Request:
        # Whoever got nothing done since it was admitted would only be put off for ever: spare it if others can pay.
        running = list(self.running)
        served = [r for r in running if r.tokens_since_admission > 0]
        return self.policy.victim(served if len(served) > 1 else running, now)

    def preempt(self, request: Request, step: ScheduledStep, now: float) -> None:
        """Take all blocks of ``request``; it waits again and keeps its tokens."""
        num_blocks = self.blocks.num_held(request)
        self._stop_running(request, now)
        request.num_preemptions += 1
        request.output.metrics.num_preemptions += 1
        self.num_preemptions += 1
        request.num_lost_tokens, request.num_computed_tokens = request.num_computed_tokens, 0
        if request in step.decodes:
            step.decodes.remove(request)
        if request in step.prefills:
            step.prefills.remove(request)
        step.preempted.append((request, num_blocks))
        self.add(request, now)

    def _admit(self, step: ScheduledStep, budget: int, now: float) -> None:
        passed_over: list[Request] = []
        promised = self._promised_blocks()
        lookahead = self.policy.lookahead
        with closing(self.policy.candidates(now)) as candidates:
            for request in candidates:
                if not budget:
                    break
                if not self._start(request, promised):
                    victim = self._set_aside(request, step, now)
                    if victim is None or not self._start(request, promised):
                        passed_over.append(request)
                        if len(passed_over) > lookahead:
                            break
                        continue
                for overtaken in passed_over:
                    overtaken.overtaken += 1
                step.admitted.append(request)
                budget -= self._schedule_chunk(request, budget, step)
                if request.num_uncomputed_tokens > request.num_scheduled_tokens:
                    for g, need in enumerate(self.blocks.still_needed(request)):
                        promised[g] += need
        for request in step.admitted:
            if request in self.policy:
                self.policy.remove(request)

    def _set_aside(self, candidate: Request, step: ScheduledStep, now: float) -> Request | None:
        """Preempt the running request that the policy would rather see ``candidate`` run instead of, if any."""
        running = [r for r in self.running if r not in step.admitted]
        victim = self.policy.preempts(candidate, running, now) if running else None
        if victim is not None:
            self.preempt(victim, step, now)
        return victim

    def _start(self, request: Request, promised: Sequence[int]) -> bool:
        """Let ``request`` run if a seat and enough blocks are there."""
        if self._free_seats() < request.num_seats:
            return False
        match = self.blocks.match_prefix(request)
        headroom = len(self.running)
        if not self.blocks.can_admit(request, match, promised, headroom):
            return False
        self.blocks.admit(request, match)
        request.state = RequestState.PREFILL
        request.num_computed_tokens = request.num_cached_tokens = match.num_tokens
        request.tokens_since_admission = 0
        self.running[request] = None
        self.num_recomputed_tokens += max(0, request.num_lost_tokens - match.num_tokens)
        self.num_prefix_hits += match.num_tokens > 0
        self.num_cached_tokens += match.num_tokens
        return True

    def _free_seats(self) -> int:
        return self.blocks.num_free_seats - sum(len(r.forks) for r in self.running if r.state is RequestState.PREFILL)

    def _promised_blocks(self) -> list[int]:
        """Per group, the blocks that half-prefilled requests have yet to take."""
        promised = [0] * len(self.blocks.groups)
        for request in self.running:
            if request.state is RequestState.PREFILL:
                for g, need in enumerate(self.blocks.still_needed(request)):
                    promised[g] += need
        return promised

    def commit(self, step: ScheduledStep, now: float) -> None:
        """Book the step's tokens as computed; a request whose prompt is done decodes, and its forks split off."""
        for request in step.requests:
            count, request.num_scheduled_tokens = request.num_scheduled_tokens, 0
            request.num_computed_tokens += count
            self.blocks.register(request)
            if request.state is RequestState.PREFILL and request.num_uncomputed_tokens == 0:
                request.state = RequestState.DECODE
                self._split(request)
            self.policy.on_tokens(request, count, now)

    def _split(self, request: Request) -> None:
        forks, request.forks = request.forks, ()
        for fork in forks:
            self.blocks.fork(request, fork)
            fork.state = RequestState.DECODE
            fork.num_cached_tokens = request.num_cached_tokens
            self.running[fork] = None

    def restart(self, now: float) -> None:
        """Begin anew after a step was broken off at an unknown point: nothing runs, all wait, no block is held."""
        self.blocks.reset()
        requests = {r.order: r for r in [*self.running, *self.policy.waiting] if not r.is_finished}
        self.running.clear()
        for order in sorted(requests):
            request = requests[order]
            request.num_computed_tokens = request.num_scheduled_tokens = 0
            request.state = RequestState.WAITING
            if request not in self.policy:
                self.policy.add(request, now)

    def finish(self, request: Request, reason: FinishReason, now: float) -> None:
        """End a request from whatever state; its blocks are free or cached afterwards."""
        if request in self.policy:
            self.policy.remove(request)
        elif request in self.running:
            self._stop_running(request, now)
        request.state = RequestState.FINISHED
        request.output.finish_reason = reason
        request.output.metrics.finished_time = now

    def _stop_running(self, request: Request, now: float) -> None:
        del self.running[request]
        self.blocks.free(request, now)
        request.num_scheduled_tokens = 0

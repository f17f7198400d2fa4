"""Scheduler: what the next step computes, under a token budget and the blocks there are."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from paged_backend.memory.block_manager import BlockManager, PrefixMatch
from paged_backend.outputs import FinishReason
from paged_backend.policy.policy_guard import PolicyGuard
from paged_backend.request.lockstep import Lockstep
from paged_backend.request.request import Request
from paged_backend.request.state import RequestState

# Recurrent layers scan a prompt in pieces of this many tokens or more, and a shorter chunk costs them as much.
_SCAN = 64


@dataclass
class ScheduledStep:
    """One step's work: every decode feeds one token; each prefill a chunk of ``request.num_scheduled_tokens``.

    admitted, preempted: who began to run, and who had to stop with the number of blocks it gave up. time: when it was
    planned, in seconds of the engine's clock.
    """

    time: float = 0.0
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

    @property
    def num_new_prompt_tokens(self) -> int:
        """Tokens of the prompts that begin in this step for the first time, cached ones included."""
        new = (request for request in self.admitted if request.output.metrics.first_scheduled_time is None)
        return sum(request.num_prompt_tokens for request in new)

    def __bool__(self) -> bool:
        return bool(self.decodes or self.prefills)


class Scheduler:
    """Every running decode first, then prefill chunks in the policy's order, then new requests while budget lasts.

    A policy that ranks prefills may put a new request ahead of half-computed prompts. ``running`` is in order of
    admission. ``held_until`` is when to plan again if the policy holds everybody back while nothing runs, else None.
    The policy orders, the block manager gives blocks, the scheduler decides that
    something always moves: whoever runs alone fits, a victim comes back ahead of later arrivals, and the members of a
    lockstep begin one behind the other, whatever the policy says of those behind the first.
    """

    def __init__(self, blocks: BlockManager, policy: PolicyGuard, max_num_batched_tokens: int) -> None:
        self.blocks = blocks
        self.policy = policy
        self.max_num_batched_tokens = max_num_batched_tokens
        self.running: dict[Request, None] = {}
        # Those of them whose prompt is not computed yet.
        self._prefilling: dict[Request, None] = {}
        self.held_until: float | None = None
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0
        self.num_prefix_hits = 0
        self.num_cached_tokens = 0

    @property
    def num_waiting(self) -> int:
        return len(self.policy)

    def has_work(self) -> bool:
        return bool(self.running) or len(self.policy) > 0

    def use(self, blocks: BlockManager) -> None:
        """Give out other blocks from now on; nothing may run at the moment."""
        for request in self.policy.waiting:
            self.blocks.expect_no_more(request)
            blocks.expect(request)
        self.blocks = blocks

    def add(self, request: Request, now: float) -> None:
        request.state = RequestState.WAITING
        self._wait(request, now)

    def _wait(self, request: Request, now: float) -> None:
        self.blocks.expect(request)
        self.policy.add(request, now)

    def schedule(self, now: float, *, drain: bool = False) -> ScheduledStep:
        """Plan one step. Nothing is lost if the step is never carried out: it is planned again.

        drain: nothing more will arrive, so a policy that waits for more company is not waited for.
        """
        step = ScheduledStep(now)
        for request in self.running:
            request.num_scheduled_tokens = 0
        self._schedule_decodes(step, now)
        ranked = self.policy.rank_prefills([*self._prefilling], now)
        prefilling, budget = list(ranked), self.max_num_batched_tokens
        if not step.preempted and (self.policy.can_preempt or self._free_seats() > 0):
            budget = self._admit(step, self._in_groups(self.policy.candidates(now)), prefilling, budget, now)
        budget = self._feed(prefilling, budget, step)
        if not step and self._prefilling:
            first = next(request for request in [*ranked, *self._prefilling] if request in self._prefilling)
            self._make_progress(first, step, now)
        self.held_until = None
        if len(self.policy) and not self.running and not step.preempted:
            self.held_until = None if drain else self.policy.hold_until(now)
            if self.held_until is None:
                self._admit(step, self._in_groups(self.policy.by_arrival()), [], budget, now)
        for request in step.requests:
            request.last_scheduled_time = now
        return step

    def _schedule_decodes(self, step: ScheduledStep, now: float) -> None:
        decoding = [r for r in self.running if r.state is RequestState.DECODE and not r.is_held]
        for request in self.blocks.without_room(decoding):
            self._make_room(request, request.num_tokens, step, now)
        step.decodes = [r for r in decoding if r in self.running] if step.preempted else decoding
        for request in step.decodes:
            request.num_scheduled_tokens = 1

    def _feed(self, prefilling: Sequence[Request], budget: int, step: ScheduledStep) -> int:
        """Give half-prefilled requests their chunks, first come first served; returns the token budget that is left."""
        for request in prefilling:
            if not budget:
                break
            if request.state is RequestState.PREFILL and not request.num_scheduled_tokens:
                budget -= self._schedule_chunk(request, budget, step)
        return budget

    def _make_progress(self, request: Request, step: ScheduledStep, now: float) -> None:
        """Nothing decodes and no chunk found blocks: the others make room for ``request``."""
        chunk = min(request.num_uncomputed_tokens, self.max_num_batched_tokens)
        if self._make_room(request, request.num_computed_tokens + chunk, step, now):
            self._schedule_chunk(request, chunk, step)

    def _schedule_chunk(self, request: Request, budget: int, step: ScheduledStep) -> int:
        chunk = min(request.num_uncomputed_tokens, budget)
        if step and chunk < self._shortest_chunk(request):
            # Its turn has come, so that nobody behind it gets the rest of the budget either.
            return budget
        if not self.blocks.reserve(request, request.num_computed_tokens + chunk):
            return 0
        request.num_scheduled_tokens = chunk
        step.prefills.append(request)
        return chunk

    def _shortest_chunk(self, request: Request) -> int:
        """Tokens below which a chunk is put off, if the step has other work."""
        if self.blocks.states is None:
            return 0
        return min(request.num_uncomputed_tokens, self.max_num_batched_tokens, _SCAN)

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
        self._stop(request, step, now)
        self.add(request, now)

    def _stop(self, request: Request, step: ScheduledStep, now: float) -> None:
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
        request.state = RequestState.WAITING

    def _admit(
        self,
        step: ScheduledStep,
        candidates: Generator[Request],
        prefilling: list[Request],
        budget: int,
        now: float,
    ) -> int:
        """Let candidates begin while budget lasts, after those of ``prefilling`` that go first; returns what is left.

        ``prefilling`` keeps those that were not ranked before any candidate.
        """
        passed_over: list[Request] = []
        set_aside: list[Request] = []
        try:
            with closing(candidates):
                for request in candidates:
                    budget = self._feed(self._ahead_of(request, prefilling, now), budget, step)
                    if not budget:
                        break
                    set_aside += self._set_aside_for(request, step, now)
                    if self._start(request, passed_over, step):
                        budget -= self._schedule_chunk(request, budget, step)
                    elif len(passed_over) > self.policy.lookahead:
                        break
        finally:
            # The policy's books change only when it is done iterating.
            for request in step.admitted:
                if request in self.policy:
                    self.policy.remove(request)
            for request in set_aside:
                self._wait(request, now)
        return budget

    def _in_groups(self, candidates: Generator[Request]) -> Generator[Request]:
        """``candidates``, but one lockstep at a time, and its members as one: behind the first go all the others.

        None of them gets a token before the last one runs, so nobody else begins until then. Members of two locksteps
        could take the room that the other needs, each for ever.
        """
        lockstep = next((request.lockstep for request in self.running if request.lockstep is not None), None)
        with closing(candidates):
            if not (yield from self._rest_of(lockstep)):
                return
            for request in candidates:
                is_of_another = request.lockstep is not None and lockstep not in (None, request.lockstep)
                if is_of_another or request in self.running:
                    continue
                yield request
                if request.lockstep is not None and request in self.running:
                    lockstep = request.lockstep
                    if not (yield from self._rest_of(lockstep)):
                        return

    def _rest_of(self, lockstep: Lockstep | None) -> Generator[Request, None, bool]:
        """Its members that wait, until one of them finds no room; returns whether there was room for all."""
        for member in [] if lockstep is None else lockstep.members:
            if member in self.policy and member not in self.running:
                yield member
                if member not in self.running:
                    return False
        return True

    def _ahead_of(self, candidate: Request, prefilling: list[Request], now: float) -> list[Request]:
        """Take those out of ``prefilling`` that get budget before ``candidate`` does."""
        ahead = [request for request in prefilling if request in self._prefilling]
        if ahead and self.policy.ranks_prefills:
            ranked = self.policy.rank_prefills([*ahead, candidate], now)
            ahead = ranked[: ranked.index(candidate)]
        prefilling[:] = [request for request in prefilling if request not in ahead]
        return ahead

    def _set_aside_for(self, candidate: Request, step: ScheduledStep, now: float) -> list[Request]:
        """Stop the running requests that the policy sets aside for ``candidate``: enough for it to begin, or nobody."""
        if not self.policy.can_preempt:
            return []
        # Whoever was set aside before is spared until it got something done, so that two cannot take turns for ever.
        running = [r for r in self.running if r.tokens_since_admission > 0 or r.num_preemptions == 0]
        running = [request for request in running if request not in step.admitted]
        victims: list[Request] = []
        while self._match_if_it_fits(candidate, victims) is None:
            victim = self.policy.preempts(candidate, running, now)
            if victim is None:
                return []
            running.remove(victim)
            victims.append(victim)
        for victim in victims:
            self._stop(victim, step, now)
        return victims

    def _match_if_it_fits(self, request: Request, victims: Sequence[Request] = ()) -> PrefixMatch | None:
        """The cached beginning of ``request`` if a seat and enough blocks are there, given back by ``victims`` too."""
        if self._free_seats() + sum(victim.num_seats for victim in victims) < request.num_seats:
            return None
        match = self.blocks.match_prefix(request)
        taken = self._promised_blocks(victims)
        if victims:
            taken = [promised - freed for promised, freed in zip(taken, self.blocks.freed_by(victims), strict=True)]
        headroom = len(self.running) - len(victims)
        return match if self.blocks.can_admit(request, match, taken, headroom) else None

    def _start(self, request: Request, passed_over: list[Request], step: ScheduledStep) -> bool:
        """Let ``request`` run ahead of those ``passed_over``, which it joins if it does not fit."""
        match = self._match_if_it_fits(request)
        if match is None:
            passed_over.append(request)
            return False
        for overtaken in passed_over:
            overtaken.overtaken += 1
        step.admitted.append(request)
        self.blocks.admit(request, match)
        request.state = RequestState.PREFILL
        request.num_computed_tokens = request.num_cached_tokens = match.num_tokens
        request.tokens_since_admission = 0
        self.running[request] = self._prefilling[request] = None
        self.num_recomputed_tokens += max(0, request.num_lost_tokens - match.num_tokens)
        self.num_prefix_hits += match.num_tokens > 0
        self.num_cached_tokens += match.num_tokens
        return True

    def _free_seats(self) -> int:
        return self.blocks.num_free_seats - sum(len(request.forks) for request in self._prefilling)

    def _promised_blocks(self, but_for: Sequence[Request] = ()) -> list[int]:
        """Per group, the blocks that half-prefilled requests have yet to take."""
        promised = [0] * len(self.blocks.groups)
        for request in self._prefilling:
            if request not in but_for:
                for g, need in enumerate(self.blocks.still_needed(request)):
                    promised[g] += need
        return promised

    def commit(self, step: ScheduledStep, now: float) -> None:
        """Book the step's tokens as computed; a request whose prompt is done decodes, and its forks split off."""
        counts = [(request, request.num_scheduled_tokens) for request in step.requests]
        if step:
            self.policy.on_step(len(step.decodes), step.num_prefill_tokens, now - step.time)
        blocks = self.blocks
        for request, count in counts:
            request.num_scheduled_tokens = 0
            request.num_computed_tokens += count
        blocks.register(counts)
        for request in step.prefills:
            if request.num_uncomputed_tokens == 0:
                request.state = RequestState.DECODE
                del self._prefilling[request]
                self._split(request)
        self.policy.on_tokens(counts, now)

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
        self._prefilling.clear()
        for order in sorted(requests):
            request = requests[order]
            request.num_computed_tokens = request.num_scheduled_tokens = 0
            request.state = RequestState.WAITING
            if request not in self.policy:
                self._wait(request, now)

    def finish(self, request: Request, reason: FinishReason, now: float) -> None:
        """End a request from whatever state; its blocks are free or cached afterwards."""
        if request in self.policy:
            self.blocks.expect_no_more(request)
            self.policy.remove(request)
        elif request in self.running:
            self._stop_running(request, now)
        request.state = RequestState.FINISHED
        request.output.finish_reason = reason
        request.output.metrics.finished_time = now
        self.policy.on_finished(request, now)

    def _stop_running(self, request: Request, now: float) -> None:
        del self.running[request]
        self._prefilling.pop(request, None)
        self.blocks.free(request, now)
        request.num_scheduled_tokens = 0

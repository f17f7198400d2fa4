"""StepLoop: plans a step, has it carried out and books what came of it, whoever carries it out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paged_backend.engine.request_table import RequestTable
from paged_backend.engine.scheduler import ScheduledStep, Scheduler
from paged_backend.engine.stats_recorder import StatsRecorder
from paged_backend.engine.stopwatch import Stopwatch
from paged_backend.outputs import RequestOutput
from paged_backend.request.request import Request
from paged_backend.sampling.sampled import Sampled
from paged_backend.stats import StepStats


@dataclass
class Executed:
    """What carrying out a step gave: the tokens chosen for ``rows``, None for no rows, and why requests failed.

    Those that failed are taken out of the step.
    """

    rows: Sequence[Request]
    sampled: Sampled | None
    failures: dict[Request, Exception] = field(default_factory=dict)


class Stepped(NamedTuple):
    """A step that is over: what it did, what got a token or ended, and its numbers."""

    step: ScheduledStep
    outputs: list[RequestOutput]
    stats: StepStats


# Computes the tokens of a step and chooses the next ones; the clock may be read before and after.
Execute = Callable[[ScheduledStep, Stopwatch], Executed]


class StepLoop:
    """The one order in which a step is planned, carried out and committed, for engines and replays.

    clock: seconds; it is read once when a step begins and once when its tokens are there, and all that happens in
    between is booked at these two times.
    """

    def __init__(
        self, scheduler: Scheduler, requests: RequestTable, stats: StatsRecorder, clock: Callable[[], float]
    ) -> None:
        self.scheduler = scheduler
        self.requests = requests
        self.stats = stats
        self.clock = clock

    def run(self, execute: Execute, eos_token_ids: Collection[int], *, drain: bool = False) -> Stepped:
        """One step. drain: nothing more will be added for now, so nobody is held back for more company."""
        watch, started = Stopwatch(), self.clock()
        self.requests.expire(started)
        step = self.scheduler.schedule(started, drain=drain)
        watch.lap("schedule")
        executed = execute(step, watch)
        watch.lap("sample")
        num_prefill_tokens, num_new_prompt_tokens = step.num_prefill_tokens, step.num_new_prompt_tokens
        now = self.clock()
        self.scheduler.commit(step, now)
        outputs = self.requests.deliver(step, executed.rows, executed.sampled, now, eos_token_ids)
        for request, error in executed.failures.items():
            self.requests.fail(request, error, now=now)
        outputs += self.requests.take_ended()
        watch.lap("update")
        stats = self.stats.record_step(
            self.scheduler, step, outputs, num_prefill_tokens, num_new_prompt_tokens, watch.laps, now
        )
        return Stepped(step, outputs, stats)

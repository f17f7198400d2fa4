"""A replay plans what an engine plans, step by step, and tells the same bytes every time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from clock import Clock
from lab_cases import COST, MACHINE, Entry, live_engine, replayed_schedule, run_live, small_trace, watch

from paged_backend.errors import ConfigError, UnknownPolicy
from paged_backend.lab import report
from paged_backend.lab.replay import Machine, Policies, Replay, at_load, replay
from paged_backend.lab.trace import TraceRequest, read_trace
from paged_backend.lab.trace_recorder import TraceRecorder
from paged_backend.lab.virtual_executor import VirtualExecutor
from paged_backend.request.request import Request

CASES = {
    "fifo": Policies("fifo"),
    "starvation_aware": Policies("starvation_aware", scheduler_options={"max_overtakes": 4}),
    "priority": Policies("priority", scheduler_options={"preempt": True}),
    "deadline": Policies("deadline", scheduler_options={"shed": True}),
    "window": Policies("window"),
}


@pytest.fixture(scope="module")
def live() -> dict[str, list[Entry]]:
    """What an engine of a tiny model plans for the small trace."""
    schedules = {}
    for name in ("fifo", "starvation_aware", "priority", "deadline"):
        clock = Clock()
        with live_engine(clock, CASES[name].scheduler, CASES[name].scheduler_options) as engine:
            schedules[name] = watch(engine.scheduler)
            run_live(engine, clock, small_trace())
    return schedules


@pytest.mark.parametrize("name", ["fifo", "starvation_aware", "priority", "deadline"])
def test_a_replay_schedules_what_an_engine_does_step_by_step(live: dict[str, list[Entry]], name: str) -> None:
    assert replayed_schedule(small_trace(), CASES[name]) == live[name]


def test_the_small_trace_makes_engines_chunk_preempt_and_reorder(live: dict[str, list[Entry]]) -> None:
    for name in ("fifo", "priority"):
        assert any(entry[4] for entry in live[name]), name
    assert any(tokens == MACHINE.max_num_batched_tokens for entry in live["fifo"] for _, tokens in entry[2])
    begun = [order for entry in live["starvation_aware"] for order in entry[3]]
    assert begun != sorted(begun)


def ends_early(patch: pytest.MonkeyPatch) -> None:
    expect = VirtualExecutor.expect
    patch.setattr(VirtualExecutor, "expect", lambda self, request, length: expect(self, request, max(1, length - 1)))


def takes_longer(patch: pytest.MonkeyPatch) -> None:
    call = VirtualExecutor.__call__

    def slower(self: VirtualExecutor, step: Any, stopwatch: Any) -> Any:
        executed = call(self, step, stopwatch)
        self.now += 1e-6
        return executed

    patch.setattr(VirtualExecutor, "__call__", slower)


def arrives_late(patch: pytest.MonkeyPatch) -> None:
    make = Replay.__init__

    def late(self: Replay, trace: Sequence[TraceRequest], *args: Any, **options: Any) -> None:
        make(self, [replace(request, arrival=request.arrival + 0.02) for request in trace], *args, **options)

    patch.setattr(Replay, "__init__", late)


def forgets_classes(patch: pytest.MonkeyPatch) -> None:
    make = Request.__init__
    patch.setattr(Request, "__init__", lambda self, *args, **options: make(self, *args, **{**options, "priority": 0}))


MUTANTS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "requests end a token early": ("fifo", ends_early),
    "time passes beside the steps": ("fifo", takes_longer),
    "requests arrive late": ("starvation_aware", arrives_late),
    "classes are forgotten": ("priority", forgets_classes),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_replay_that_goes_wrong_plans_something_else(
    live: dict[str, list[Entry]], mutant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, break_it = MUTANTS[mutant]
    break_it(monkeypatch)
    assert replayed_schedule(small_trace(), CASES[name]) != live[name]


@pytest.mark.parametrize(
    ("name", "machine", "options"),
    [
        ("fifo", replace(MACHINE, seats=3), {}),
        ("fifo", replace(MACHINE, num_blocks=25), {}),
        ("fifo", replace(MACHINE, block_size=5), {}),
        ("fifo", replace(MACHINE, max_num_batched_tokens=15), {}),
        ("fifo", replace(MACHINE, enable_prefix_caching=False), {}),
        ("fifo", replace(MACHINE, cost=replace(COST, context_token_s=0.0)), {}),
        ("starvation_aware", MACHINE, {"length_knowledge": "max"}),
    ],
    ids=["seats", "memory", "block size", "budget", "prefix caching", "context", "length knowledge"],
)
def test_every_setting_of_the_machine_shows_in_the_schedule(
    live: dict[str, list[Entry]], name: str, machine: Machine, options: dict[str, Any]
) -> None:
    assert replayed_schedule(small_trace(), CASES[name], machine, **options) != live[name]


def test_what_a_live_engine_recorded_replays_as_the_engine_ran(live: dict[str, list[Entry]], tmp_path: Any) -> None:
    clock, path = Clock(), tmp_path / "live.jsonl"
    recorder = TraceRecorder(path)
    with live_engine(clock, "fifo", {}, plugins=[recorder]) as engine:
        run_live(engine, clock, small_trace())
    recorder.close()
    assert replayed_schedule(read_trace(path), CASES["fifo"]) == live["fifo"]


@pytest.mark.parametrize("name", CASES)
def test_the_same_trace_gives_the_same_bytes(name: str) -> None:
    texts = {
        report.to_json([replay(small_trace(), MACHINE, CASES[name], deadline="tight")], MACHINE, {}) for _ in range(2)
    }
    assert len(texts) == 1


def test_every_request_ends_and_accounts_for_its_tokens() -> None:
    trace = small_trace()
    result = replay(trace, MACHINE)
    assert [outcome.num_output_tokens for outcome in result.outcomes] == [request.output_length for request in trace]
    assert {outcome.reason for outcome in result.outcomes} == {"length"}
    assert result.stats.num_generated_tokens == sum(request.output_length for request in trace)
    assert result.stats.num_preemptions > 0
    assert not result.stats.policy_errors


def test_policies_that_do_not_know_lengths_see_requests_stop_before_their_limit() -> None:
    result = replay(small_trace(), MACHINE, length_knowledge="max")
    longest = max(request.output_length for request in small_trace())
    assert {o.reason for o in result.outcomes if o.num_output_tokens < longest} == {"stop"}
    assert {o.reason for o in result.outcomes if o.num_output_tokens == longest} == {"length"}


def test_quantiles_are_learnt_by_policies_that_predict() -> None:
    policy = Replay(small_trace(), MACHINE, CASES["starvation_aware"], length_knowledge="quantile").engine.policy.policy
    assert type(policy._remaining.predict).__name__ == "RunningQuantile"
    Replay(small_trace(), MACHINE, CASES["fifo"], length_knowledge="quantile").run()


def test_a_request_that_can_never_fit_is_refused_alone() -> None:
    giant = TraceRequest(0.0, range(10_000), 5)
    result = replay([giant, *small_trace()], MACHINE, deadline="loose")
    assert [outcome.reason for outcome in result.outcomes].count("refused") == 1
    numbers = report.metrics(result)
    assert numbers["num_refused"] == 1
    assert numbers["attainment"] < 1


def test_load_is_what_arrives_of_what_the_machine_can_do() -> None:
    trace = small_trace()
    capacity_s = replay([replace(request, arrival=0.0) for request in trace], MACHINE).seconds
    assert at_load(trace, MACHINE, 2.0)[-1].arrival == pytest.approx(capacity_s / 2)
    with pytest.raises(ConfigError, match="all at once"):
        at_load([replace(request, arrival=0.0) for request in trace], MACHINE, 1.0)


def test_deadlines_are_multiples_of_the_time_alone() -> None:
    trace = [replace(request, deadline_s=None) for request in small_trace()]
    tight, loose = (replay(trace, MACHINE, deadline=deadline) for deadline in ("tight", 5.0))
    for known, first, second in zip(trace, tight.outcomes, loose.outcomes, strict=True):
        alone = COST.alone(len(known.prompt), known.output_length, MACHINE.seats // 2, MACHINE.max_num_batched_tokens)
        assert first.deadline == pytest.approx(known.arrival + 0.5 + 2 * alone)
        assert second.deadline == pytest.approx(known.arrival + 0.5 + 5 * alone)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"deadline": "soon"}, "deadline='soon' is unknown; choose from tight, loose"),
        ({"deadline": -1.0}, "deadline must be a finite number above 0, got -1.0"),
        ({"length_knowledge": "all"}, "length_knowledge='all' is unknown; choose from oracle, max, quantile"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_words(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        replay(small_trace(), MACHINE, **options)


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownPolicy, match="choose one of deadline, fair"):
        replay(small_trace(), MACHINE, Policies("best"))

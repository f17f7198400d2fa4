"""Whatever a plugin does, requests get the tokens they would get without it, nothing hangs and no block is lost."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from block_checks import assert_all_blocks_are_back
from clock import Clock
from oracle import draw_prompts
from tiny_models import make_tiny

from paged_backend import Engine, SamplingParams, hookimpl
from paged_backend.errors import EngineClosed, PluginError
from paged_backend.plugins.eviction import Lru
from paged_backend.plugins.fifo import Fifo
from paged_backend.policies import RequestView, SchedulingPolicy
from paged_backend.policy.answer_time import BLOCKED_S, SLOW_S
from paged_backend.request.state import RequestState

GREEDY = SamplingParams(max_tokens=10, ignore_eos=True)
# Few seats, few blocks and short chunks, so that requests wait, are preempted, and cached blocks are dropped.
PRESSURE = {"block_size": 4, "kv_cache_memory": 12 * 4 * 256, "max_num_seqs": 3, "max_num_batched_tokens": 16}
MAX_STEPS = 2000


@pytest.fixture(scope="module")
def model():
    return make_tiny("llama", num_hidden_layers=1)


@pytest.fixture(scope="module")
def prompts():
    drawn = draw_prompts((9, 26, 5, 21, 3))
    return [*drawn, drawn[1][:20] + drawn[0]]


def serve(engine: Engine, prompts, *, strict: bool = False) -> tuple[list[list[int]], int]:
    """The tokens of requests that arrive while others run, and how many calls raised PluginError."""
    outputs, raised = [], 0
    arriving = list(prompts)
    for count in range(MAX_STEPS):
        if not arriving and not engine.has_unfinished_requests():
            break
        if arriving and count % 2 == 0:
            request_id = engine.add_request(arriving.pop(0), GREEDY)
            outputs += engine.outputs(request_id)
        try:
            engine.step()
        except PluginError:
            raised += 1
            assert strict
        if engine.held_until is not None:
            engine.clock.now = engine.held_until
    else:
        raise AssertionError(
            f"{engine.stats().num_waiting} wait, {engine.stats().num_running} run after {MAX_STEPS} steps"
        )
    assert [output.finish_reason for output in outputs] == ["length"] * len(prompts)
    return [output.token_ids for output in outputs], raised


def assert_no_block_is_lost(engine: Engine) -> None:
    assert_all_blocks_are_back(engine)


@pytest.fixture(scope="module")
def expected(model, prompts):
    engine = Engine(model, clock=Clock(tick=0.001), **PRESSURE)
    tokens, _ = serve(engine, prompts)
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.groups[0].num_evictions > 0
    assert stats.num_prefix_hits > 0
    assert stats.policy_errors == {}
    return tokens


class Box:
    """Gives the engine to a plugin that must not use it."""

    engine: Engine | None = None

    @hookimpl
    def engine_started(self, engine) -> None:
        self.engine = engine


# name -> (what makes an engine's options, who is to be blamed)
KINDS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {}


def kind(name: str, blamed: str) -> Callable:
    """Registers a function that returns an engine's options as a kind of misbehaviour."""

    def register(function: Callable) -> Callable:
        assert name not in KINDS
        KINDS[name] = (function, blamed)
        return function

    return register


def raising(error: BaseException | type[BaseException]) -> Callable:
    def method(*args: Any) -> Any:
        raise error

    return method


def returning(value: Any) -> Callable:
    return lambda *args: value


def scheduler(name: str, blamed: str, base: type = Fifo, **methods: Any) -> None:
    """A scheduling policy that is right but for the given methods."""
    kind(name, blamed)(lambda: {"scheduler": type("Hostile", (base,), methods)()})


def eviction(name: str, blamed: str, **methods: Any) -> None:
    kind(name, blamed)(lambda: {"eviction": type("Hostile", (Lru,), methods)})


def observer(name: str, blamed: str, **hooks: Callable) -> None:
    kind(name, blamed)(lambda: {"plugins": [SimpleNamespace(**{k: hookimpl(f) for k, f in hooks.items()})]})


# Everything raises.

METHODS = (
    "add",
    "remove",
    "candidates",
    "rank_prefills",
    "victim",
    "preempts",
    "doomed",
    "on_tokens",
    "on_step",
    "on_finished",
)
for _method in METHODS:
    scheduler(f"{_method} raises", _method, **{_method: raising(ValueError("broken"))})
for _error in (SystemExit(3), GeneratorExit(), RecursionError("deep"), MemoryError(), StopIteration(), Exception):
    scheduler(f"candidates raises {_error!r}", "candidates", candidates=raising(_error))
    scheduler(f"victim raises {_error!r}", "victim", victim=raising(_error))
scheduler("lookahead raises", "lookahead", lookahead=property(raising(ValueError("broken"))))
scheduler("len raises while all are held back", "__len__", __len__=raising(OSError("broken")), candidates=returning(()))
scheduler("next_wakeup raises", "next_wakeup", candidates=returning(()), next_wakeup=raising(ValueError("broken")))


class Unprintable(Exception):
    """Cannot even be told about."""

    def __repr__(self) -> str:
        raise ValueError("no")

    __str__ = __repr__


scheduler("an error that cannot be printed", "candidates", candidates=raising(Unprintable()))


def recurse(self, *args: Any) -> Any:
    return recurse(self, *args)


scheduler("endless recursion", "candidates", candidates=recurse)


# Answers that are none.

for _answer in (None, 5, "all of them", object()):
    scheduler(f"candidates returns {type(_answer).__name__}", "candidates", candidates=returning(_answer))
    scheduler(f"victim returns {type(_answer).__name__}", "victim", victim=returning(_answer))
    scheduler(
        f"rank_prefills returns {type(_answer).__name__}",
        "rank_prefills",
        rank_prefills=returning(_answer),
    )
for _answer in (0, float("nan"), float("inf"), -5.0, "soon", None):
    scheduler(
        f"holds back all until {_answer!r}", "next_wakeup", candidates=returning(()), next_wakeup=returning(_answer)
    )
scheduler(
    "holds back all for ever, a second at a time",
    "next_wakeup",
    candidates=returning(()),
    next_wakeup=lambda self, now: now + 1,
)
for _answer in (-1, "many", 2.5, None):
    scheduler(f"lookahead is {_answer!r}", "lookahead", lookahead=_answer)
scheduler("doomed returns a number", "doomed", doomed=returning(7))
scheduler("preempts returns a number", "preempts", preempts=returning(7))


def kept(self) -> list[RequestView]:
    return self.__dict__.setdefault("kept", [])


def keep(self, request, now) -> None:
    kept(self).append(request)
    Fifo.add(self, request, now)


def keep_only(self, request, now) -> None:
    kept(self).append(request)


def first_then(*extra: Callable) -> Callable:
    """Candidates as they should be, then some more."""

    def candidates(self, now):
        for view in Fifo.candidates(self, now):
            yield view
            yield from (item for make in extra for item in make(self))
        yield from (item for make in extra for item in make(self))

    return candidates


def of_state(*states: RequestState) -> Callable:
    return lambda self, *args: [view for view in kept(self) if view.state in states]


scheduler("yields everybody twice", "candidates", candidates=lambda self, now: [*Fifo.candidates(self, now)] * 2)
scheduler(
    "yields the first for ever",
    "candidates",
    candidates=lambda self, now: itertools.repeat(next(Fifo.candidates(self, now), None)),
)
scheduler(
    "yields running requests",
    "candidates",
    add=keep,
    candidates=first_then(of_state(RequestState.PREFILL, RequestState.DECODE)),
)
scheduler("yields finished requests", "candidates", add=keep, candidates=first_then(of_state(RequestState.FINISHED)))
scheduler(
    "yields views of its own",
    "candidates",
    add=keep,
    candidates=first_then(lambda self: [RequestView(SimpleNamespace(order=0))]),
)
scheduler("yields numbers for ever", "candidates", candidates=lambda self, now: itertools.count())


def raises_midway(self, now):
    yield from itertools.islice(Fifo.candidates(self, now), 1)
    raise KeyError("midway")


def will_not_close(self, now):
    try:
        yield from Fifo.candidates(self, now)
    finally:
        yield None


scheduler("raises midway", "candidates", candidates=raises_midway)
scheduler("cannot be closed", "candidates", candidates=will_not_close)
scheduler(
    "the iterator raises on close",
    "candidates",
    candidates=lambda self, now: type(
        "I", (), {"__iter__": lambda i: i, "__next__": raising(StopIteration), "close": raising(SystemExit)}
    )(),
)
scheduler("forgets every request", "__len__", add=returning(None), candidates=returning(()))
scheduler(
    "forgets every request and lies about it",
    "next_wakeup",
    add=keep_only,
    remove=returning(None),
    candidates=returning(()),
    __len__=lambda self: sum(view.is_waiting for view in kept(self)),
    next_wakeup=lambda self, now: -1,
)
scheduler(
    "counts one too many",
    "__len__",
    __len__=lambda self: Fifo.__len__(self) + bool(Fifo.__len__(self)),
    candidates=lambda self, now: itertools.islice(Fifo.candidates(self, now), 1),
)
scheduler("loses a request that it saw", "candidates", add=keep, remove=returning(None))
scheduler(
    "victim waits",
    "victim",
    add=keep,
    victim=lambda self, running, now: next((view for view in kept(self) if view.is_waiting), None),
)
scheduler("victim has finished", "victim", add=keep, victim=lambda self, running, now: kept(self)[0])
scheduler("victim is a copy", "victim", victim=lambda self, running, now: RequestView(running[0]._request))
scheduler("preempts whom it was asked for", "preempts", preempts=lambda self, candidate, running, now: candidate)
scheduler("ranks with duplicates", "rank_prefills", rank_prefills=lambda self, some, now: [some[0]] * len(some))
scheduler("ranks nobody", "rank_prefills", rank_prefills=returning([]))
scheduler("ranks all but the first", "rank_prefills", rank_prefills=lambda self, some, now: some[1:])
scheduler("counts fewer than none", "__len__", __len__=returning(-1))
scheduler("ranks for ever", "rank_prefills", rank_prefills=lambda self, some, now: itertools.cycle(some))
scheduler("ranks unhashable things", "rank_prefills", rank_prefills=lambda self, some, now: [[view] for view in some])
scheduler("dooms running requests", "doomed", add=keep, doomed=of_state(RequestState.DECODE))
scheduler("dooms strangers for ever", "doomed", doomed=lambda self, now: itertools.count())


# Changing what is not its own.

for _name in ("order", "state", "params", "priority", "num_computed_tokens", "token_ids", "_request"):
    scheduler(f"sets {_name}", "add", add=lambda self, request, now, name=_name: setattr(request, name, 0))
scheduler("deletes a field", "victim", victim=lambda self, running, now: delattr(running[0], "state"))
scheduler(
    "changes the params", "on_tokens", on_tokens=lambda self, request, n, now: setattr(request.params, "max_tokens", 1)
)
scheduler("appends a token", "on_tokens", on_tokens=lambda self, request, n, now: request.token_ids.append(7))


@kind("empties the list of running requests", "victim")
def _empties_running() -> dict[str, Any]:
    def victim(self, running, now):
        running.clear()

    return {"scheduler": type("Hostile", (Fifo,), {"victim": victim})()}


CALLS = {
    "step": lambda engine: engine.step(),
    "add_request": lambda engine: engine.add_request([5, 6, 7], GREEDY),
    "abort": lambda engine: engine.abort("0"),
    "close": lambda engine: engine.close(),
    "generate": lambda engine: engine.generate([[5, 6, 7]], GREEDY),
    "weights_changed": lambda engine: engine.weights_changed(),
    "pin_prefix": lambda engine: engine.pin_prefix([5] * 8),
    "fit": lambda engine: engine.fit([5]),
}


def calling_policy(name: str, method: str) -> dict[str, Any]:
    box = Box()

    def call(self, *args: Any) -> Any:
        CALLS[name](box.engine)

    return {"plugins": [box], "scheduler": type("Hostile", (Fifo,), {method: call})()}


def calling_hook(name: str, hook: str) -> dict[str, Any]:
    box = Box()
    namespace = SimpleNamespace(**{hook: hookimpl(lambda: CALLS[name](box.engine))})
    return {"plugins": [box, namespace]}


for _call in CALLS:
    kind(f"calls {_call} in candidates", "candidates")(lambda c=_call: calling_policy(c, "candidates"))
    kind(f"calls {_call} in step_finished", "step_finished")(lambda c=_call: calling_hook(c, "step_finished"))
for _method in ("add", "victim", "on_finished"):
    kind(f"calls abort in {_method}", _method)(lambda m=_method: calling_policy("abort", m))
for _hook in ("request_added", "request_preempted", "request_finished"):
    kind(f"calls abort in {_hook}", _hook)(lambda h=_hook: calling_hook("abort", h))


# Taking its time.


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def once(function: Callable[[], None]) -> Callable[[], None]:
    calls = iter([function])
    return lambda: next(calls, lambda: None)()


def hesitating(hesitate: Callable[[], None]) -> SchedulingPolicy:
    def candidates(self, now):
        hesitate()
        return Fifo.candidates(self, now)

    return type("Hostile", (Fifo,), {"candidates": candidates})()


@kind("computes for long", "candidates (slow)")
def _computes() -> dict[str, Any]:
    return {"scheduler": hesitating(once(lambda: compute(1.5 * SLOW_S)))}


@kind("sleeps for very long", "candidates (slow)")
def _sleeps() -> dict[str, Any]:
    return {"scheduler": hesitating(once(lambda: time.sleep(1.2 * BLOCKED_S)))}


@kind("computes between candidates", "candidates (slow)")
def _computes_between() -> dict[str, Any]:
    hesitate = once(lambda: compute(1.5 * SLOW_S))

    def candidates(self, now):
        for view in Fifo.candidates(self, now):
            hesitate()
            yield view

    return {"scheduler": type("Hostile", (Fifo,), {"candidates": candidates})()}


@kind("observer computes for long", "step_finished (slow)")
def _observer_computes() -> dict[str, Any]:
    hesitate = once(lambda: compute(1.5 * SLOW_S))
    return {"plugins": [SimpleNamespace(step_finished=hookimpl(lambda: hesitate()))]}


# Eviction.

for _answer in (None, -1, 10**9, "0", True, 1.0, [0]):
    eviction(f"evicts {_answer!r}", "evict", evict=returning(_answer))
for _method in ("add", "remove", "evict"):
    eviction(f"eviction's {_method} raises", _method, **{_method: raising(RuntimeError("broken"))})
eviction("eviction exits", "evict", evict=raising(SystemExit(1)))
eviction("changes a block", "add", add=lambda self, block: setattr(block, "id", 3))


@kind("evicts blocks that are in use", "evict")
def _evicts_used() -> dict[str, Any]:
    box = Box()

    def evict(self) -> int:
        pool = box.engine.blocks.pools[0]
        return next(block for block in range(pool.num_blocks) if not pool.is_available(block))

    return {"plugins": [box], "eviction": type("Hostile", (Lru,), {"evict": evict})}


@kind("evicts what it evicted before", "evict")
def _evicts_again() -> dict[str, Any]:
    def evict(self) -> int:
        self.first = getattr(self, "first", None) or Lru.evict(self)
        return self.first

    return {"eviction": type("Hostile", (Lru,), {"evict": evict, "remove": returning(None)})}


# Hooks.

for _hook in ("engine_started", "request_added", "request_preempted", "request_finished", "step_finished"):
    observer(f"{_hook} raises", _hook, **{_hook: lambda: raising(ValueError("broken"))()})
    observer(f"{_hook} exits", _hook, **{_hook: lambda: raising(SystemExit(2))()})
observer("request_added sets a field", "request_added", request_added=lambda request: setattr(request, "priority", 3))
observer("admit_request raises", "admit_request", admit_request=lambda request: raising(ValueError("broken"))())
for _answer in (5, [], object(), 0.0):
    observer(
        f"admit_request returns {type(_answer).__name__}",
        "admit_request",
        admit_request=lambda request, answer=_answer: answer,
    )


# Block sizes: the built-in size of 16 takes over.


def sizes() -> list[tuple[str, Callable]]:
    answers = (0, -4, 10**9, "16", None, 2.5, True)
    return [(f"block size {answer!r}", returning(answer)) for answer in answers] + [
        ("block size raises", raising(ValueError("broken"))),
        ("block size exits", raising(SystemExit(4))),
    ]


for _name, _rule in sizes():
    kind(_name, "block_size")(lambda rule=_rule: {"block_size": rule})


def options_of(name: str) -> dict[str, Any]:
    options = {**PRESSURE, "clock": Clock(tick=0.001), **KINDS[name][0]()}
    if callable(options["block_size"]):
        options["kv_cache_memory"] = 4 * 16 * 256
    return options


def test_there_are_many_kinds():
    assert len(KINDS) >= 25


@pytest.mark.parametrize("name", KINDS)
def test_no_token_changes_no_block_is_lost_and_the_culprit_is_named_once(name, model, prompts, expected, caplog):
    with caplog.at_level(logging.WARNING, logger="paged_backend"):
        engine = Engine(model, **options_of(name))
        tokens, _ = serve(engine, prompts)
    assert tokens == expected
    assert_no_block_is_lost(engine)
    errors = engine.stats().policy_errors
    assert any(key.endswith(f".{KINDS[name][1]}") for key in errors), errors
    named = Counter(record.args[0] for record in caplog.records if record.name == "paged_backend")
    assert named == dict.fromkeys(errors, 1)
    engine.close()


def test_policy_that_waits_for_the_machine_but_computes_little_is_not_called_slow(model, prompts, expected):
    engine = Engine(
        model, clock=Clock(tick=0.001), scheduler=hesitating(once(lambda: time.sleep(2 * SLOW_S))), **PRESSURE
    )
    tokens, _ = serve(engine, prompts)
    assert tokens == expected
    assert engine.stats().policy_errors == {}


# One kind for each way to be blamed; what strict_policies does with it is the same for all.
STRICT = {blamed: name for name, (_, blamed) in KINDS.items() if "slow" not in blamed}


@pytest.mark.parametrize("name", STRICT.values())
def test_strict_policies_raise_and_leave_the_engine_right(name, model, prompts, expected):
    blamed = KINDS[name][1]
    if blamed in ("block_size", "engine_started"):
        with pytest.raises(PluginError, match=blamed):
            Engine(model, strict_policies=True, **options_of(name))
        return
    engine = Engine(model, strict_policies=True, **options_of(name))
    if blamed == "admit_request":
        with pytest.raises(PluginError, match="admit_request"):
            engine.add_request(prompts[0], GREEDY)
        assert not engine.has_unfinished_requests()
        return
    tokens, raised = serve(engine, prompts, strict=True)
    assert raised > 0
    assert tokens == expected
    assert_no_block_is_lost(engine)


def test_observer_gets_copies_it_may_ruin(model, prompts, expected):
    def request_finished(request, output) -> None:
        output.token_ids.clear()
        output.prompt_token_ids.clear()
        output.finish_reason = "error"
        output.metrics.arrival_time = -1.0

    engine = Engine(
        model,
        clock=Clock(tick=0.001),
        plugins=[SimpleNamespace(request_finished=hookimpl(request_finished))],
        **PRESSURE,
    )
    tokens, _ = serve(engine, prompts)
    assert tokens == expected


def test_thrashing_policy_costs_time_but_no_request_its_end(model, prompts, expected):
    class Thrashing(Fifo):
        """Would rather see anybody else run."""

        def preempts(self, candidate, running, now):
            return running[0]

    engine = Engine(model, clock=Clock(tick=0.001), scheduler=Thrashing(), **PRESSURE)
    tokens, _ = serve(engine, prompts)
    assert engine.stats().num_preemptions > len(prompts)
    assert tokens == expected
    assert_no_block_is_lost(engine)


def test_ctrl_c_inside_a_policy_passes_and_loses_nothing(model, prompts, expected):
    class Interrupted(Fifo):
        """Ctrl-C is pressed while it thinks."""

        presses = 0

        def candidates(self, now):
            self.presses += 1
            if self.presses in (3, 9):
                raise KeyboardInterrupt
            return super().candidates(now)

    engine = Engine(model, clock=Clock(tick=0.001), scheduler=Interrupted(), **PRESSURE)
    outputs = [engine.outputs(engine.add_request(prompt, GREEDY))[0] for prompt in prompts]
    interrupts = 0
    while engine.has_unfinished_requests():
        try:
            engine.step()
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 2
    assert [output.token_ids for output in outputs] == expected
    assert_no_block_is_lost(engine)


def test_plugins_may_call_the_engine_between_its_calls(model):
    box = Box()
    engine = Engine(model, plugins=[box])
    assert box.engine is engine
    assert box.engine.generate([[5, 6, 7]], SamplingParams(max_tokens=2))[0].finish_reason is not None
    engine.close()
    with pytest.raises(EngineClosed):
        box.engine.step()

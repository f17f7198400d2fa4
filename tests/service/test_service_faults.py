"""AsyncEngine when things break: a forward pass, too many requests, and a drawn campaign of everything at once."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from oracle import draw_prompts
from service_checks import PATIENCE_S, Broken, Raises, Steps, assert_closed, break_steps, greedy
from tiny_models import make_tiny

from paged_backend import AsyncEngine, Engine, hookimpl
from paged_backend.errors import EngineFailed, PagedBackendError, QueueFull, RequestFailed
from paged_backend.request.request import Request


@pytest.fixture(scope="module")
def llama():
    return make_tiny("llama")


@pytest.fixture
def steps():
    steps = Steps()
    yield steps
    steps.free()


def test_a_forward_pass_that_keeps_failing_fails_its_requests_and_not_the_queue(llama, steps):
    engine = Engine(llama, plugins=[steps], max_num_seqs=2)
    service = AsyncEngine(engine).start()
    forward = engine.runner.forward
    running = [service.submit([5, 6, n + 3], greedy(20)) for n in range(2)]
    waiting = [service.submit([5, 7, n + 3], greedy(4)) for n in range(3)]
    steps.wait()

    def failing(batch):
        raise torch.OutOfMemoryError("no memory")

    engine.runner.forward = failing
    steps.go_on()
    steps.wait()
    engine.runner.forward = forward
    steps.free()
    for handle in running:
        with pytest.raises(RequestFailed, match="no memory"):
            handle.result(PATIENCE_S)
    assert [handle.result(PATIENCE_S).finish_reason for handle in waiting] == ["length"] * 3
    service.close()
    assert_closed(service)


def requests_alive() -> list[Request]:
    gc.collect()
    return [thing for thing in gc.get_objects() if type(thing) is Request]


def test_overload_is_refused_so_that_who_is_let_in_waits_a_bounded_time_in_flat_memory(llama):
    steps = Steps()
    steps.free()
    engine = Engine(llama, plugins=[steps], max_num_seqs=8, max_waiting=16, kv_cache_memory="2MiB")
    max_tokens, num_refused, num_alive, waits = 6, 0, [], []
    # Errors that other tests raised may still hold theirs.
    before = len(requests_alive())
    with AsyncEngine(engine) as service:
        for number in range(600):
            arrived = steps.num_finished

            def note(handle, arrived=arrived):
                assert handle.outputs[0].finish_reason == "length"
                waits.append(steps.num_finished - arrived)

            try:
                prompt = [5 + number % 200, number // 200 + 3]
                service.submit(prompt, greedy(max_tokens), timeout_s=1000).add_done_callback(note)
            except QueueFull:
                num_refused += 1
                time.sleep(0.001)
            if number % 200 == 199:
                num_alive.append(len(requests_alive()) - before)
    assert num_refused > 100
    assert len(waits) == 600 - num_refused
    # Two batches may be ahead of the 16th in the queue, and each request has a step for its prompt.
    assert max(waits) <= 4 * (max_tokens + 2)
    # Those that run or wait, and some that only the list of time limits still knows.
    assert max(num_alive) <= 8 + 16 + 100 + 4 * (8 + 16)
    assert num_alive[-1] <= num_alive[0] + 100
    assert_closed(service)


# The campaign


@dataclass
class Campaign:
    """Requests of all sorts from threads and tasks, while forwards, processors and observers fail at drawn moments."""

    seed: int
    num_requests: int
    tasks_per_loop: int
    deaths: set[int]
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    num_forwards_failed: int = 0

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        self.prompts = draw_prompts([draw.randint(1, 60) for _ in range(40)], seed=self.seed)
        self.plans = [self._plan(draw) for _ in range(self.num_requests)]
        # Drawn in the engine's thread alone, one draw a forward pass and one a step.
        self.forward_draw = random.Random(self.seed + 1)
        self.observer_draw = random.Random(self.seed + 2)
        self.num_forwards_to_fail = 0

    def _plan(self, draw: random.Random) -> dict[str, Any]:
        prompt, max_tokens = draw.randrange(40), draw.randint(1, 24)
        plan: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens, "how": draw.choice(HOWS)}
        plan["leave_after"] = draw.choice([None] * 9 + [0, 1, 3])
        plan["slow_s"] = draw.choice([0, 0, 0, 0.002])
        plan["options"] = draw.choice([{}] * 7 + [{"timeout_s": 0.05}, {"queue_timeout_s": 0.05}, {"priority": 3}])
        plan["raises_at"] = draw.randint(0, 5) if draw.random() < 0.08 else None
        return plan

    @hookimpl
    def step_finished(self, stats: object) -> None:
        if self.observer_draw.random() < 0.05:
            raise Broken("an observer")

    def forward(self, batch: Any) -> torch.Tensor:
        draw = self.forward_draw.random()
        # Most failures pass, so that a retry helps; some last until nobody is left in the step.
        if draw < 0.01:
            self.num_forwards_to_fail = 20
        if self.num_forwards_to_fail or draw < 0.05:
            self.num_forwards_to_fail = max(0, self.num_forwards_to_fail - 1)
            self.num_forwards_failed += 1
            raise torch.OutOfMemoryError("no memory") if self.num_forwards_failed % 2 else Broken("a forward pass")
        return self.real_forward(batch)

    def run(self, engine: Engine) -> None:
        self.expected = [out.token_ids for out in engine.generate(self.prompts, greedy(24))]
        self.real_forward, engine.runner.forward = engine.runner.forward, self.forward
        self.service = AsyncEngine(engine).start()
        self.numbers = iter(range(self.num_requests))
        self.lock = threading.Lock()
        with ThreadPoolExecutor(12) as pool:
            workers = [pool.submit(self._work_in_a_thread) for _ in range(8)]
            workers += [pool.submit(asyncio.run, self._work_in_a_loop()) for _ in range(4)]
            for worker in workers:
                worker.result(10 * PATIENCE_S)
        self.service.close()
        engine.runner.forward = self.real_forward

    def _next(self) -> int | None:
        with self.lock:
            number = next(self.numbers, None)
            if number in self.deaths:
                # The next step kills the thread; every worker hears of it, and one of them starts anew.
                break_steps(self.service.engine, Broken("the thread"))
            return number

    def _restart(self) -> None:
        with self.lock:
            self.service.engine.__dict__.pop("step", None)
            self.service.start()

    def _work_in_a_thread(self) -> None:
        while (number := self._next()) is not None:
            plan = self.plans[number]
            for _ in range(PATIENCE_S * 100):
                try:
                    handle = self._submit(plan)
                except QueueFull:
                    self.outcomes["refused"] += 1
                    time.sleep(0.05)
                except EngineFailed:
                    self._restart()
                else:
                    break
            self._book(plan, partial(self._consume, handle, plan))
            del handle

    async def _work_in_a_loop(self) -> None:
        async def one(number: int) -> None:
            plan = self.plans[number]
            while True:
                try:
                    handle = self._submit(plan)
                except QueueFull:
                    self.outcomes["refused"] += 1
                    await asyncio.sleep(0.05)
                except EngineFailed:
                    self._restart()
                else:
                    break
            try:
                result = await self._consume_async(handle, plan)
            except PagedBackendError as error:
                self._book(plan, partial(raise_, error))
            else:
                self._book(plan, lambda: result)

        tasks = set()
        while (number := self._next()) is not None:
            tasks.add(asyncio.create_task(one(number)))
            if len(tasks) >= self.tasks_per_loop:
                _, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.gather(*tasks)

    def _submit(self, plan: dict[str, Any]) -> Any:
        prompt = self.prompts[plan["prompt"]]
        processors = [] if plan["raises_at"] is None else [Raises(len(prompt), at=plan["raises_at"])]
        return self.service.submit(prompt, greedy(plan["max_tokens"], logits_processors=processors), **plan["options"])

    def _consume(self, handle: Any, plan: dict[str, Any]) -> list[int] | str:
        if plan["how"] == "result":
            if plan["leave_after"] is not None:
                handle.cancel()
            output = handle.result(PATIENCE_S)
            return output.finish_reason if output.finish_reason in ("abort", "timeout") else output.token_ids
        tokens: list[int] = []
        for delta in handle:
            tokens += delta.token_ids
            time.sleep(plan["slow_s"])
            if plan["leave_after"] is not None and len(tokens) > plan["leave_after"]:
                return "left"
            if delta.finish_reason == "timeout":
                return "timeout"
        return tokens

    async def _consume_async(self, handle: Any, plan: dict[str, Any]) -> list[int] | str:
        if plan["how"] == "result":
            if plan["leave_after"] is not None:
                try:
                    await asyncio.wait_for(handle, 0.001 * plan["leave_after"])
                except TimeoutError:
                    return "left"
            output = await asyncio.wait_for(handle, PATIENCE_S)
            return output.finish_reason if output.finish_reason in ("abort", "timeout") else output.token_ids
        tokens: list[int] = []
        async for delta in handle:
            tokens += delta.token_ids
            await asyncio.sleep(plan["slow_s"])
            if plan["leave_after"] is not None and len(tokens) > plan["leave_after"]:
                return "left"
            if delta.finish_reason == "timeout":
                return "timeout"
        return tokens

    def _book(self, plan: dict[str, Any], consume: Any) -> None:
        """Count what a caller got: an answer, which must be right, or a named error, which must have a cause."""
        try:
            result = consume()
        except (RequestFailed, EngineFailed) as error:
            cause = error.__cause__
            outcome = f"{type(error).__name__} from {type(cause).__name__}"
            if not isinstance(cause, (Broken, torch.OutOfMemoryError, ZeroDivisionError)):
                self.wrong.append(f"{plan}: {error!r} has the cause {cause!r}")
            if isinstance(cause, ZeroDivisionError) and plan["raises_at"] is None:
                self.wrong.append(f"{plan}: got the exception of somebody else's processor")
        else:
            outcome = result if isinstance(result, str) else "answered"
            expected = self.expected[plan["prompt"]][: plan["max_tokens"]]
            if not isinstance(result, str) and result != expected:
                self.wrong.append(f"{plan}: {result} instead of {expected}")
        with self.lock:
            self.outcomes[outcome] += 1


HOWS = ("result", "stream", "stream")


def raise_(error: Exception) -> None:
    raise error


def run_campaign(llama: Any, seed: int, num_requests: int, tasks_per_loop: int, deaths: set[int]) -> Campaign:
    """Draws are the same for the same seed; which of the threads goes first is the machine's affair."""
    campaign = Campaign(seed, num_requests, tasks_per_loop, deaths)
    # Memory for a few requests only, so that preemption is part of it.
    engine = Engine(
        llama, plugins=[campaign], max_num_seqs=32, max_num_batched_tokens=64, max_waiting=100, kv_cache_memory="300KiB"
    )
    logging.getLogger("paged_backend").setLevel(logging.CRITICAL)
    try:
        campaign.run(engine)
    finally:
        logging.getLogger("paged_backend").setLevel(logging.NOTSET)
    stats = engine.stats()
    print(
        f"seed {seed}: {dict(campaign.outcomes)}, {stats.num_preemptions} preemptions, "
        f"{campaign.num_forwards_failed} forward passes failed"
    )
    assert not campaign.wrong, campaign.wrong[:3]
    assert sum(count for outcome, count in campaign.outcomes.items() if outcome != "refused") == num_requests
    assert campaign.outcomes["answered"] > num_requests / 5
    for outcome in ("left", "EngineFailed from Broken", "RequestFailed from ZeroDivisionError"):
        assert campaign.outcomes[outcome] > 0, outcome
    assert stats.num_preemptions > 0
    assert campaign.num_forwards_failed > 0
    assert_closed(campaign.service)
    return campaign


def test_a_short_campaign_loses_nothing(llama):
    run_campaign(llama, seed=1, num_requests=200, tasks_per_loop=10, deaths={90})


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_campaign_of_a_thousand_requests_loses_nothing(llama, seed):
    campaign = run_campaign(llama, seed, num_requests=1000, tasks_per_loop=40, deaths={500})
    assert campaign.outcomes["refused"] > 0

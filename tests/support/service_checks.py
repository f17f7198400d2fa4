"""What tests of the service share: a small engine, steps that wait to be let through, and what idle means."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
from block_checks import assert_all_blocks_are_back

from paged_backend import AsyncEngine, Engine, SamplingParams, hookimpl
from paged_backend.service.engine_thread import _engine_threads

# Longer than any wait in here can take unless something hangs.
PATIENCE_S = 60


def greedy(max_tokens: int = 8, **fields: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **fields)


class Steps:
    """A plugin that holds the engine's thread at the end of each step until the test lets it go on."""

    def __init__(self) -> None:
        self.num_finished = 0
        self._arrived = threading.Semaphore(0)
        self._allowed = threading.Semaphore(0)
        self._free = threading.Event()

    @hookimpl
    def step_finished(self, stats: object) -> None:
        self.num_finished += 1
        self._arrived.release()
        if not self._free.is_set():
            assert self._allowed.acquire(timeout=PATIENCE_S)

    def wait(self, count: int = 1) -> None:
        """Until the thread stands at the end of a further step, ``count`` times, letting it go on in between."""
        for index in range(count):
            if index:
                self._allowed.release()
            assert self._arrived.acquire(timeout=PATIENCE_S)

    def go_on(self) -> None:
        """Let the thread take the step at whose end it stands as finished."""
        self._allowed.release()

    def free(self) -> None:
        """Hold nothing any more."""
        self._free.set()
        self._allowed.release()


class Script:
    """A logits processor that makes the output be these tokens."""

    def __init__(self, num_prompt_tokens: int, token_ids: list[int]) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.token_ids = token_ids

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        index = input_ids.shape[1] - self.num_prompt_tokens
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.token_ids[index]] = 0.0
        return forced


class Raises:
    """A logits processor that fails at the given output token."""

    def __init__(self, num_prompt_tokens: int, at: int = 0, error: BaseException | None = None) -> None:
        self.length = num_prompt_tokens + at
        self.error = error if error is not None else ZeroDivisionError("mine")

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] >= self.length:
            raise self.error
        return scores


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.002)


def assert_idle(engine: Engine) -> None:
    """Nothing waits, runs or is left to hand out, and every block is free."""
    assert not engine.has_unfinished_requests()
    assert_all_blocks_are_back(engine)


def assert_closed(service: AsyncEngine) -> None:
    """No thread is left, and nothing of the requests."""
    of_its_engine = [thread for thread in _engine_threads if thread.engine is service.engine]
    assert not [thread for thread in of_its_engine if thread._thread.is_alive()]
    assert service.num_unfinished == 0
    assert_idle(service.engine)


class Broken(Exception):
    """What the tests break things with."""


def break_steps(engine: Engine, error: BaseException) -> None:
    def step(**kwargs: object) -> None:
        raise error

    engine.step = step


def repair_steps(engine: Engine) -> None:
    del engine.step

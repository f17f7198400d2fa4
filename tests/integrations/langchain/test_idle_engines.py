"""An engine outlives its last model object by keep_alive seconds, so that an object per request loads it once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from clock import Clock
from tiny_models import save_tiny

from paged_backend.integrations.langchain import ChatPaged, PagedLLM, engines
from paged_backend.integrations.langchain.idle_engines import MOST_IDLE, IdleEngines, after


class AlarmClock(Clock):
    """Stands where threads would sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.alarms: list[tuple[float, Callable[[], None]]] = []

    def after(self, seconds: float, function: Callable[[], None]) -> Any:
        alarm = (self.now + seconds, function)
        self.alarms.append(alarm)

        class Timer:
            @staticmethod
            def cancel() -> None:
                if alarm in self.alarms:
                    self.alarms.remove(alarm)

        return Timer

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for alarm in [alarm for alarm in self.alarms if alarm[0] <= self.now]:
            self.alarms.remove(alarm)
            alarm[1]()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> AlarmClock:
    clock = AlarmClock()
    monkeypatch.setattr(engines, "_idle", IdleEngines(clock.after))
    return clock


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, clock: AlarmClock) -> list[Any]:
    """The engines that were loaded."""
    services: list[Any] = []
    load = engines.load_service

    def noting(*args: Any) -> Any:
        services.append(load(*args))
        return services[-1]

    monkeypatch.setattr(engines, "load_service", noting)
    return services


def ask(folder: str, cls: type = ChatPaged, **fields: Any) -> str:
    """As a request handler does, with an object of its own."""
    answer = cls(model=folder, max_tokens=3, **fields).invoke("x")
    return answer if isinstance(answer, str) else answer.text


def test_an_object_per_request_loads_the_model_once(folder: str, clock: AlarmClock, loaded: list[Any]) -> None:
    answers = set()
    for _ in range(4):
        answers.add(ask(folder))
        clock.advance(299)
    ask(folder, PagedLLM)
    assert len(answers) == len(loaded) == 1
    assert len(clock.alarms) == 1


def test_an_idle_engine_is_closed_when_its_time_is_over(folder: str, clock: AlarmClock, loaded: list[Any]) -> None:
    first = ask(folder, keep_alive=20)
    clock.advance(19.9)
    assert not loaded[0].engine.is_closed
    clock.advance(0.1)
    assert loaded[0].engine.is_closed
    assert ask(folder) == first
    assert len(loaded) == 2


def test_a_keep_alive_of_zero_closes_with_the_last_object(folder: str, clock: AlarmClock, loaded: list[Any]) -> None:
    chat, llm = ChatPaged(model=folder, max_tokens=3, keep_alive=0), PagedLLM(model=folder, max_tokens=3, keep_alive=0)
    chat.invoke("x")
    del chat
    assert llm.invoke("x")
    assert not loaded[0].engine.is_closed
    del llm
    assert loaded[0].engine.is_closed
    assert clock.alarms == []


def test_the_latest_keep_alive_counts(folder: str, clock: AlarmClock, loaded: list[Any]) -> None:
    chat = ChatPaged(model=folder, max_tokens=3)
    chat.invoke("x")
    chat.keep_alive = 0
    del chat
    assert loaded[0].engine.is_closed
    chat = ChatPaged(model=folder, max_tokens=3).model_copy(update={"keep_alive": 7})
    chat.invoke("x")
    del chat
    assert [seconds - clock.now for seconds, _ in clock.alarms] == [7]


def test_no_object_is_closed_while_it_is_used_however_long(folder: str, clock: AlarmClock, loaded: list[Any]) -> None:
    chat = ChatPaged(model=folder, max_tokens=3, keep_alive=1)
    chat.invoke("x")
    clock.advance(1000)
    assert chat.invoke("x").text
    assert len(loaded) == 1


def test_a_model_named_in_a_call_stays_as_long(folder: str, clock: AlarmClock, loaded: list[Any]) -> None:
    llm = PagedLLM(model="unused", max_tokens=3, keep_alive=0)
    llm.invoke("x", model=folder)
    assert not loaded[0].engine.is_closed
    del llm
    assert loaded[0].engine.is_closed


def test_only_some_engines_stay_idle(folder: str, clock: AlarmClock, loaded: list[Any]) -> None:
    for count in range(1, MOST_IDLE + 3):
        ask(folder, engine_kwargs={"max_num_seqs": count})
    assert [service.engine.is_closed for service in loaded] == [True, True] + [False] * MOST_IDLE


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_idle_engines_make_room_for_one_that_does_not_fit(
    folder: str, clock: AlarmClock, loaded: list[Any], monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    ask(folder)
    load = engines.load_service

    def crowded(*args: Any) -> Any:
        if not loaded[0].engine.is_closed:
            raise error("there is no room")
        return load(*args)

    monkeypatch.setattr(engines, "load_service", crowded)
    assert ask(folder, engine_kwargs={"max_num_seqs": 2})


def test_an_engine_that_its_user_closed_is_loaded_again(folder: str, clock: AlarmClock, loaded: list[Any]) -> None:
    ask(folder)
    loaded[0].close()
    loaded[0].engine.close()
    assert ask(folder)
    assert len(loaded) == 2


def test_a_given_engine_is_not_kept(chat: ChatPaged, clock: AlarmClock) -> None:
    chat.invoke("x")
    del chat
    assert clock.alarms == []


def test_seconds_below_zero_are_refused() -> None:
    with pytest.raises(ValueError, match="keep_alive"):
        ChatPaged(model="x", keep_alive=-1)


def test_time_passes_by_itself_and_a_cancelled_timer_does_nothing() -> None:
    rang, never = threading.Event(), threading.Event()
    cancelled = after(60.0, never.set)
    cancelled.cancel()
    after(float("inf"), never.set).cancel()
    after(0.01, rang.set)
    assert rang.wait(30)
    assert not never.is_set()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_the_child_of_a_fork_takes_over_no_idle_engine(folder: str, clock: AlarmClock, loaded: list[Any]) -> None:
    ask(folder)
    child = os.fork()
    if child == 0:
        os._exit(engines._idle.clear())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert engines._idle.clear()

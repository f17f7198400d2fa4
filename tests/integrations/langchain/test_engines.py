"""Engines that are given to models stay their owner's, who may close them when no model runs a request."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tiny_models import make_tiny
from tiny_tokenizers import byte_tokenizer

from paged_backend import Engine
from paged_backend.errors import EngineBusy, EngineClosed
from paged_backend.integrations.langchain import ChatPaged, PagedLLM

CLASSES = [ChatPaged, PagedLLM]
PATIENCE_S = 60


@pytest.fixture
def engine() -> Engine:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return Engine(make_tiny("llama", vocab_size=len(tokenizer)), tokenizer, kv_cache_memory="4MiB")


@pytest.mark.parametrize("cls", CLASSES)
def test_the_owner_of_a_given_engine_closes_it_and_models_over_it_say_so(engine: Engine, cls: Any) -> None:
    with engine:
        model = cls.from_engine(engine, max_tokens=3, ignore_eos=True)
        assert model.invoke("x")
    assert engine.is_closed
    for call in (model.invoke, lambda text: list(model.stream(text))):
        with pytest.raises(EngineClosed, match="the engine is closed; make a new one"):
            call("x")


@pytest.mark.parametrize("cls", CLASSES)
def test_the_owners_own_error_is_not_hidden_by_models_over_the_engine(engine: Engine, cls: Any) -> None:
    model = cls.from_engine(engine, max_tokens=3)
    model.invoke("x")
    with pytest.raises(ZeroDivisionError, match="mine"), engine:
        raise ZeroDivisionError("mine")
    assert engine.is_closed


@pytest.mark.parametrize("cls", CLASSES)
def test_a_given_engine_cannot_be_closed_under_a_call_that_runs(engine: Engine, cls: Any) -> None:
    running, allowed = threading.Event(), threading.Event()

    def wait(input_ids: Any, scores: Any) -> Any:
        running.set()
        assert allowed.wait(PATIENCE_S)
        return scores

    model = cls.from_engine(engine, max_tokens=3, ignore_eos=True, logits_processors=[wait])
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(model.invoke("x")))
    thread.start()
    assert running.wait(PATIENCE_S)
    with pytest.raises(EngineBusy, match="1 are unfinished"):
        engine.close()
    allowed.set()
    thread.join(PATIENCE_S)
    assert len(answers) == 1
    engine.close()


@pytest.mark.parametrize("cls", CLASSES)
def test_a_closed_engine_is_refused_at_once(engine: Engine, cls: Any) -> None:
    engine.close()
    for make in (lambda: cls.from_engine(engine), lambda: cls(model="tiny", engine=engine)):
        with pytest.raises(EngineClosed, match="the engine is closed; make a new one"):
            make()

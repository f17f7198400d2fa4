"""What the chat class and the LLM class have in common: whose engine it is, and what a request is submitted with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from langchain_core.exceptions import ModelTimeoutError
from pydantic import SecretStr, ValidationError
from scripted_engine import ScriptedService

from paged_backend.integrations.langchain import ChatPaged, PagedLLM
from paged_backend.integrations.langchain.errors import PagedInvalidRequestError

CLASSES = pytest.mark.parametrize("cls", [ChatPaged, PagedLLM])


@pytest.fixture
def options(service: ScriptedService, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What each request was submitted with beside its prompt and parameters."""
    seen: list[dict[str, Any]] = []
    submit = service.submit

    def note(prompt: Any, params: Any, **options: Any) -> Any:
        seen.append(options)
        return submit(prompt, params, **options)

    monkeypatch.setattr(service, "submit", note)
    return seen


def say_nothing(service: ScriptedService) -> None:
    service.writer = lambda prompt, params: ""


# Engines, none of which is loaded


@CLASSES
def test_what_only_a_service_far_away_needs_is_ignored(cls: Any) -> None:
    model = cls(model="x", api_key="secret", base_url="http://nowhere", max_retries=2)
    assert "secret" not in repr(model)
    assert not model.engine.is_loaded


@CLASSES
def test_equal_names_and_options_mean_one_engine_and_others_another(cls: Any) -> None:
    kwargs = {"max_num_seqs": 3, "model_kwargs": {"revision": "main"}}
    model = cls(model="x", engine_kwargs=kwargs)
    assert cls(model_name="x", engine_kwargs={**kwargs}, temperature=0.5).engine is model.engine
    assert cls(model="x").engine is not model.engine
    assert cls(model="y", engine_kwargs=kwargs).engine is not model.engine


@CLASSES
def test_the_object_made_last_decides_how_long_an_engine_stays(cls: Any) -> None:
    first = cls(model="x", keep_alive=5)
    assert first.engine.keep_alive == 5
    assert cls(model="x", keep_alive=7).engine is first.engine
    assert first.engine.keep_alive == 7
    first.keep_alive = 9
    assert first.engine.keep_alive == 9


@CLASSES
def test_a_copy_with_other_options_leaves_the_engine_of_the_original(cls: Any) -> None:
    model = cls(model="x")
    before = model.engine
    copied = model.model_copy(update={"engine_kwargs": {"max_num_seqs": 2}})
    assert copied.engine.max_num_seqs == 2
    assert model.engine is before


@CLASSES
def test_a_name_that_is_bound_is_the_name_of_what_is_bound(cls: Any) -> None:
    model = cls(model="x")
    assert model.bind(model="y").bound.model == "y"
    assert model.bind(temperature=0.5).bound is model
    assert model.model == "x"


@CLASSES
@pytest.mark.parametrize("given", [5, SimpleNamespace(name="engine")])
def test_what_is_no_engine_is_refused_with_the_way_to_load_one(cls: Any, given: Any) -> None:
    for make in (lambda: cls.from_engine(given, model="x"), lambda: cls(model="x", engine=given)):
        with pytest.raises((PagedInvalidRequestError, ValidationError), match="an AsyncEngine is wanted, got "):
            make()


@CLASSES
def test_a_given_engine_goes_by_the_name_of_its_tokenizer_or_none(
    cls: Any, service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service.engine.tokenizer, "name_or_path", "")
    assert cls.from_engine(service).model == "paged"
    monkeypatch.setattr(service.engine.tokenizer, "name_or_path", "some/model")
    assert cls.from_engine(service).model == "some/model"
    assert cls.from_engine(service, model_name="mine").model == "mine"


@CLASSES
def test_an_engine_without_a_tokenizer_says_how_to_give_it_one(
    cls: Any, service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = cls.from_engine(service, model="tiny")
    monkeypatch.setattr(service.engine, "tokenizer", None)
    for call in (model.invoke, model.get_num_tokens):
        with pytest.raises(PagedInvalidRequestError, match="no tokenizer; give it one"):
            call("x")


# Parameters


def test_by_default_an_output_has_a_thousand_tokens_or_what_room_is_left(
    service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    say_nothing(service)
    llm = PagedLLM.from_engine(service, model="tiny")
    llm.invoke("x")
    assert service.params[-1].max_tokens == 1024
    monkeypatch.setattr(type(service.engine), "max_model_len", 20)
    for num_tokens, expected in ((1, 19), (19, 1), (20, 1)):
        llm.invoke("x" * num_tokens)
        assert service.params[-1].max_tokens == expected
    monkeypatch.setattr(type(service.engine), "max_model_len", None)
    llm.invoke("x")
    assert service.params[-1].max_tokens == 1024


def test_a_minimum_above_the_default_raises_it(service: ScriptedService) -> None:
    llm = PagedLLM.from_engine(service, model="tiny", min_tokens=2000, timeout=1e-3)
    with pytest.raises(ModelTimeoutError):
        llm.invoke("x")
    assert (service.params[-1].min_tokens, service.params[-1].max_tokens) == (2000, 2000)


@CLASSES
def test_a_call_overrides_the_object_unless_it_says_none(cls: Any, service: ScriptedService) -> None:
    say_nothing(service)
    model = cls.from_engine(service, model="tiny", max_tokens=5, top_k=3)
    for call, expected in (({}, (5, 3)), ({"max_tokens": 7}, (7, 3)), ({"max_tokens": None, "top_k": 2}, (5, 2))):
        model.invoke("x", **call)
        assert (service.params[-1].max_tokens, service.params[-1].top_k) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 2}, 2),
        ({"top_logprobs": 2}, 2),
    ],
)
def test_log_probabilities_are_asked_for_by_either_name(
    service: ScriptedService, given: dict[str, Any], expected: int | None
) -> None:
    PagedLLM.from_engine(service, model="tiny", max_tokens=1, **given).invoke("x")
    assert service.params[-1].logprobs == expected


def test_stop_texts_of_object_and_call_come_once_each_in_order(service: ScriptedService) -> None:
    llm = PagedLLM.from_engine(service, model="tiny", max_tokens=1, stop=["B", "A"])
    llm.invoke("x", stop=["A", "C"])
    assert list(service.params[-1].stop) == ["B", "A", "C"]


def test_the_end_of_a_turn_ends_a_chat_unless_ends_are_ignored(service: ScriptedService) -> None:
    chat = ChatPaged.from_engine(service, model="tiny", max_tokens=1)
    eos = service.engine.tokenizer.eos_token_id
    chat.invoke("x", stop_token_ids=[70])
    assert list(service.params[-1].stop_token_ids) == [70, eos]
    chat.invoke("x", stop_token_ids=[70], ignore_eos=True)
    assert list(service.params[-1].stop_token_ids) == [70]


# Scheduling


@CLASSES
def test_scheduling_goes_beside_the_parameters_and_what_is_not_given_is_left_out(
    cls: Any, service: ScriptedService, options: list[dict[str, Any]]
) -> None:
    model = cls.from_engine(service, model="tiny", max_tokens=1, priority=3, timeout=90.0)
    model.invoke("x")
    model.invoke("x", priority=4, queue_timeout_s=80.0, client_id="me")
    assert options == [
        {"priority": 3, "timeout_s": 90.0},
        {"priority": 4, "timeout_s": 90.0, "queue_timeout_s": 80.0, "client_id": "me"},
    ]


@CLASSES
@pytest.mark.parametrize("salt", ["pepper", SecretStr("pepper")])
def test_the_engine_gets_the_salt_itself(
    cls: Any, service: ScriptedService, options: list[dict[str, Any]], salt: Any
) -> None:
    cls.from_engine(service, model="tiny", max_tokens=1, cache_salt=salt).invoke("x")
    cls.from_engine(service, model="tiny", max_tokens=1).invoke("x", cache_salt=salt)
    assert [given["cache_salt"] for given in options] == ["pepper", "pepper"]

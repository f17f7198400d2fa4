"""Arguments mean the same wherever they are given, secrets stay out of sight, unknown ones get the right hint."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.exceptions import ModelInvalidRequestError
from langchain_core.globals import set_llm_cache
from langchain_core.load import dumpd
from pydantic import SecretStr, ValidationError
from scripted_engine import ScriptedService

from paged_backend.integrations.langchain import ChatPaged, PagedLLM

Model = ChatPaged | PagedLLM
WAYS = ["constructor", "assigned", "copied", "call", "bound"]


@pytest.fixture(params=["chat", "llm"])
def model(request: pytest.FixtureRequest) -> Model:
    return request.getfixturevalue(request.param)


def invoke(model: Any, how: str, name: str, value: Any) -> Any:
    if how == "constructor":
        return type(model)(model=model.model, engine=model.engine, max_tokens=12, **{name: value}).invoke("x")
    if how == "assigned":
        setattr(model, name, value)
        return model.invoke("x")
    if how == "copied":
        return model.model_copy(update={name: value}).invoke("x")
    return model.invoke("x", **{name: value}) if how == "call" else model.bind(**{name: value}).invoke("x")


SPELLINGS = [
    ("logit_bias", {"70": 5}, {70: 5.0}),
    ("logit_bias", {70: float("-inf")}, {70: float("-inf")}),
    ("stop", "END", ("END",)),
    ("stop", ("END", "FIN"), ("END", "FIN")),
    ("stop_token_ids", {70}, (70,)),
    ("bad_words", ("one", (70, 71)), ("one", (70, 71))),
    ("max_tokens", 4.0, 4),
    ("temperature", "0.5", 0.5),
    ("top_k", np.int64(3), 3),
]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize(("name", "value", "expected"), SPELLINGS)
def test_a_value_means_the_same_wherever_it_is_given(
    service: ScriptedService, how: str, name: str, value: Any, expected: Any
) -> None:
    for cls in (ChatPaged, PagedLLM):
        model = cls.from_engine(service, model="tiny", max_tokens=2, ignore_eos=True)
        if name == "max_tokens" and how == "constructor":
            assert cls.from_engine(service, max_tokens=value).max_tokens == expected
            continue
        if how == "constructor":
            cls.from_engine(service, **{"max_tokens": 2, "ignore_eos": True, name: value}).invoke("x")
        else:
            invoke(model, how, name, value)
        assert getattr(service.params[-1], name) == expected


@pytest.mark.parametrize("how", ["assigned", "copied", "call", "bound"])
@pytest.mark.parametrize(
    ("name", "value"), [("logit_bias", [70]), ("stop", 5), ("stop", [["a"]]), ("logprobs", "some"), ("top_p", "high")]
)
def test_a_value_of_another_kind_is_refused_by_name(model: Model, how: str, name: str, value: Any) -> None:
    with pytest.raises(ModelInvalidRequestError, match=f"{name}="):
        invoke(model, how, name, value)


def test_spellings_of_one_value_share_a_cached_answer(service: ScriptedService, model: Model) -> None:
    set_llm_cache(InMemoryCache())
    before = len(service.prompts)
    model.invoke("x", logit_bias={"70": 5})
    model.invoke("x", logit_bias={70: 5.0})
    assert len(service.prompts) == before + 1


# Impossible values

IMPOSSIBLE = [
    ("temperature", -1.0, "temperature must be a number from 0 to 100000, got -1.0"),
    ("top_p", 0.0, "top_p must be above 0, got 0; temperature=0 is greedy"),
    ("max_tokens", 0, "max_tokens must be an int from 1 to 2147483647, got 0"),
    ("n", 0, "n must be an int from 1 to 16384, got 0"),
    ("min_tokens", 99, "min_tokens=99 is above max_tokens=12; lower it"),
    ("top_logprobs", -1, "logprobs must be an int from 0 to 2147483647, got -1"),
    ("stop", [""], "stop must be a text or a sequence of texts, none of them empty, got ''"),
    ("timeout", 0.0, "greater than 0"),
    ("deadline_s", float("inf"), "finite number"),
    ("keep_alive", -1.0, "greater than or equal to 0"),
]


@pytest.mark.parametrize(("name", "value", "message"), IMPOSSIBLE, ids=[name for name, *_ in IMPOSSIBLE])
def test_what_no_request_could_have_is_refused_where_it_is_given(
    model: Model, name: str, value: Any, message: str
) -> None:
    before = getattr(model, name)
    with pytest.raises(ValidationError, match=re.escape(message)):
        type(model)(model="x", **{"max_tokens": 12, name: value})
    with pytest.raises(ModelInvalidRequestError, match=re.escape(message)):
        setattr(model, name, value)
    assert getattr(model, name) == before
    with pytest.raises(ModelInvalidRequestError, match=re.escape(message)):
        model.model_copy(update={name: value})


def test_many_first_tokens_need_no_larger_limit() -> None:
    assert PagedLLM(model="x", min_tokens=5000).min_tokens == 5000


# Hints


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("temprature", "did you mean 'temperature'"),
        ("max_completion_tokens", "did you mean 'max_tokens'"),
        ("max_new_tokens", "did you mean 'max_tokens'"),
        ("request_timeout", "did you mean 'timeout'"),
        ("repeat_penalty", "did you mean 'repetition_penalty'"),
        ("dtype", r"engine_kwargs=\{'model_kwargs': \{'dtype': ...\}\}"),
        ("torch_dtype", r"engine_kwargs=\{'model_kwargs': \{'dtype': ...\}\}"),
        ("quantization_config", r"'model_kwargs': \{'quantization_config'"),
        ("kv_cache_memory", r"engine_kwargs=\{'kv_cache_memory': ...\}"),
        ("plugins", r"engine_kwargs=\{'plugins': ...\}"),
        ("nonsense", "known are .*temperature"),
    ],
)
def test_an_unknown_name_gets_the_right_hint(model: Model, name: str, fix: str) -> None:
    with pytest.raises(ValueError, match=f"unknown field '{name}'.*{fix}"):
        type(model)(model="x", **{name: 5})
    for call in (model.invoke, lambda *args, **kwargs: list(model.stream(*args, **kwargs))):
        with pytest.raises(ModelInvalidRequestError, match=f"unknown argument '{name}'.*{fix}"):
            call("x", **{name: 5})


@pytest.mark.parametrize(
    ("name", "fix"),
    [("stop_sequences", "did you mean 'stop'"), ("keep_alive", "of the constructor"), ("streaming", "constructor")],
)
def test_an_argument_of_the_constructor_is_none_of_a_call(model: Model, name: str, fix: str) -> None:
    with pytest.raises(ModelInvalidRequestError, match=fix):
        model.invoke("x", **{name: ["y"]})


# Secrets


def test_a_salt_and_an_access_token_are_seen_nowhere(service: ScriptedService) -> None:
    for cls in (ChatPaged, PagedLLM):
        kwargs = {"model_kwargs": {"token": "hf_hidden", "revision": "main"}}
        model = cls(model="x", cache_salt="pepper", engine_kwargs=kwargs)
        shown = repr(
            [model, str(model), dumpd(model), model._identifying_params, model.bind(cache_salt=SecretStr("pepper"))]
        )
        assert "pepper" not in shown
        assert "hf_hidden" not in shown
        assert "'revision': 'main'" in repr(model)
        assert model.engine is not cls(model="x", engine_kwargs={"model_kwargs": {"revision": "main"}}).engine


@pytest.mark.parametrize("salt", ["pepper", SecretStr("pepper")])
def test_a_salt_separates_prefixes_however_it_is_given(service: ScriptedService, salt: Any) -> None:
    prompt, options = "a prompt of several blocks " * 4, {"max_tokens": 2}

    def cached(chat: ChatPaged, **kwargs: Any) -> int:
        return chat.invoke(prompt, **kwargs).usage_metadata["input_token_details"]["cache_read"]

    salted = ChatPaged.from_engine(service, cache_salt=salt, **options)
    plain = ChatPaged.from_engine(service, **options)
    other = f"other than {salt}"
    cached(salted)
    assert cached(plain, cache_salt=other) == 0
    assert cached(plain, cache_salt=salt) > 0

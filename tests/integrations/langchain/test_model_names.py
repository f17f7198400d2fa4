"""The model that answers, counts and is named is always the one that was asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain_core.exceptions import ModelInvalidRequestError, ModelNotFoundError
from langchain_core.messages import HumanMessage
from langchain_core.runnables import ConfigurableField
from scripted_engine import ScriptedService
from tiny_models import save_tiny
from tiny_tokenizers import byte_level_bpe

from paged_backend.integrations.langchain import ChatPaged, PagedLLM

Model = ChatPaged | PagedLLM
TEXT = "The quick brown fox"
FIELDS = {"max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("first")))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Another model with another tokenizer, whose tokens hold several bytes."""
    folder = save_tiny(tmp_path_factory.mktemp("other"), family="qwen2", max_positions=512)
    tokenizer = byte_level_bpe(259)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}>"
    tokenizer.save_pretrained(folder)
    held = ChatPaged(model=str(folder))
    yield str(folder)
    del held


@pytest.fixture(params=[ChatPaged, PagedLLM])
def make(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return lambda **fields: request.param(**{**FIELDS, **fields})


def seen(paged: Any, **kwargs: Any) -> tuple[Any, ...]:
    """What the answer is, how long the prompt was, and who is said to have answered."""
    if isinstance(paged, ChatPaged):
        message = paged.invoke(TEXT, **kwargs)
        return message.text, message.usage_metadata["input_tokens"], message.response_metadata["model_name"]
    (generation,) = paged.generate([TEXT], **kwargs).generations[0]
    info = generation.generation_info
    return generation.text, info["token_usage"]["prompt_tokens"], info["model_name"]


def streamed(paged: Any, **kwargs: Any) -> str:
    return "".join(chunk if isinstance(chunk, str) else chunk.text for chunk in paged.stream(TEXT, **kwargs))


async def astreamed(paged: Any, **kwargs: Any) -> str:
    return "".join([chunk if isinstance(chunk, str) else chunk.text async for chunk in paged.astream(TEXT, **kwargs)])


def test_a_model_named_in_a_call_reads_and_writes_with_its_own_tokenizer(
    make: Callable[..., Any], first: str, other: str
) -> None:
    expected = seen(make(model=other))
    assert expected != seen(make(model=first))
    model = make(model=first)
    assert seen(model, model=other) == expected
    assert streamed(model, model=other) == asyncio.run(astreamed(model, model=other)) == expected[0]
    assert seen(model)[2] == first


def test_prompts_are_counted_for_the_model_that_is_named(first: str, other: str) -> None:
    chat, messages = ChatPaged(model=first), [HumanMessage(TEXT)]
    expected = seen(ChatPaged(model=other, **FIELDS))[1]
    assert chat.get_num_tokens_from_messages(messages, model=other) == expected
    assert chat.get_num_tokens_from_messages(messages) != expected


def test_what_a_bound_name_is_asked_is_told_of_that_model(first: str, other: str) -> None:
    messages, expected = [HumanMessage(TEXT)], ChatPaged(model=other)
    chat = ChatPaged(model=first, **FIELDS)
    bound = chat.bind(model=other, temperature=0.0)
    assert bound.get_num_tokens_from_messages(messages) == expected.get_num_tokens_from_messages(messages)
    assert bound.profile == expected.profile
    assert bound.invoke(messages).response_metadata["model_name"] == other
    assert chat.model == first
    assert PagedLLM(model=first).bind(model=other).get_num_tokens(TEXT) == PagedLLM(model=other).get_num_tokens(TEXT)


def test_several_conversations_name_the_model_that_answered(first: str, other: str) -> None:
    conversations = [[HumanMessage(TEXT)], [HumanMessage("x")]]
    result = ChatPaged(model=first, **FIELDS).generate(conversations, model=other)
    assert result.llm_output["model_name"] == other


@pytest.mark.parametrize("how", ["assigned", "copied", "copied deeply", "configured"])
def test_a_model_whose_name_changes_is_the_model_of_that_name(
    make: Callable[..., Any], first: str, other: str, how: str
) -> None:
    expected = seen(make(model=other))
    before = model = make(model=first)
    if how == "assigned":
        seen(model)
        model.model = other
    elif how == "configured":
        field = ConfigurableField(id="model")
        configured = model.configurable_fields(model=field).with_config(configurable={"model": other})
        answer = configured.invoke(TEXT)
        assert (answer if isinstance(answer, str) else answer.text) == expected[0]
        return
    else:
        model = before.model_copy(update={"model": other}, deep=how == "copied deeply")
        assert seen(before)[2] == first
    assert seen(model) == expected
    assert model.engine is make(model=other).engine
    assert model.get_num_tokens(TEXT) == make(model=other).get_num_tokens(TEXT)


def test_engine_options_that_change_lead_to_another_engine(make: Callable[..., Any], first: str) -> None:
    model, options = make(model=first), {"max_num_seqs": 3}
    expected = make(model=first, engine_kwargs=options).engine
    assert model.model_copy(update={"engine_kwargs": options}).engine is expected
    model.engine_kwargs = options
    assert model.engine is expected


def test_a_profile_follows_the_name_unless_it_is_the_users_own(first: str, other: str) -> None:
    chat = ChatPaged(model=first)
    assert chat.model_copy(update={"model": other}).profile["max_input_tokens"] == 512
    chat.model = other
    assert chat.profile["max_input_tokens"] == 512
    own = ChatPaged(model=first, profile={"max_input_tokens": 7})
    own.model = other
    assert own.profile["max_input_tokens"] == 7


@pytest.mark.parametrize("how", ["call", "assigned", "copied", "constructed"])
def test_a_given_engine_answers_under_its_own_name_only(service: ScriptedService, how: str) -> None:
    for cls in (ChatPaged, PagedLLM):
        model, call = cls.from_engine(service, model="tiny", max_tokens=2), {}
        if how == "call":
            call = {"model": "other"}
        elif how == "assigned":
            model.model = "other"
        elif how == "copied":
            model = model.model_copy(update={"model": "other"})
        else:
            model = cls(model="other", engine=model.engine)
        with pytest.raises(ModelNotFoundError, match="other"):
            model.invoke("x", **call)
        with pytest.raises(ModelNotFoundError, match="other"):
            list(model.stream("x", **call))
        assert cls.from_engine(service, model="its second name", max_tokens=2).invoke("x")


def test_a_copy_with_a_misspelt_field_is_refused(chat: ChatPaged) -> None:
    with pytest.raises(ModelInvalidRequestError, match="did you mean 'model'"):
        chat.model_copy(update={"model_name": "x"})

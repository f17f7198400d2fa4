"""What ends an answer, what is told of it, and how much of it was reasoning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from scripted_engine import ScriptedService, scripted_service
from service_checks import Script
from tiny_models import make_tiny
from tiny_tokenizers import byte_fallback_bpe

from paged_backend import AsyncEngine, Engine
from paged_backend.integrations.langchain import ChatPaged, PagedLLM

PAD, BOS, EOS = range(3)
ENDS_WITH_PAD = "{% for m in messages %}{{ m.role }}: {{ m.content }}<pad>{% endfor %}assistant: "


def total(chunks: Any) -> Any:
    first, *rest = chunks
    for chunk in rest:
        first += chunk
    return first


def answers(chat: ChatPaged, **kwargs: Any) -> list[Any]:
    return [chat.invoke("x", **kwargs), total(chat.stream("x", **kwargs))]


@pytest.fixture(scope="module")
def other_end() -> Iterator[ScriptedService]:
    """A model whose generation config lists an end that is not the tokenizer's, which its writer writes."""
    service = scripted_service(lambda prompt, params: "Four.")
    service.close()
    service.engine.close()
    model, tokenizer = make_tiny("llama", vocab_size=259), service.engine.tokenizer
    model.generation_config.eos_token_id = BOS
    engine = Engine(model, tokenizer, kv_cache_memory="4MiB")
    service = ScriptedService(engine, lambda prompt, params: "Four.")
    service.start()
    yield service
    service.close(graceful=False)
    engine.close()


# The end of a turn


def test_an_answer_ends_with_the_tokenizers_end_whatever_the_generation_config_lists(
    other_end: ScriptedService,
) -> None:
    for message in answers(ChatPaged.from_engine(other_end, max_tokens=30)):
        assert message.text == "Four."
        assert message.usage_metadata["output_tokens"] == len("Four.") + 1
        assert message.response_metadata["finish_reason"] == "stop"
        assert "stop_reason" not in message.response_metadata


def test_an_answer_ends_with_the_token_that_the_template_writes_behind_one(service: ScriptedService) -> None:
    tokenizer = service.engine.tokenizer
    prompt = tokenizer("user: x<pad>assistant: ")["input_ids"]
    written = [*tokenizer("Four.")["input_ids"], PAD, *tokenizer("user: and now?")["input_ids"]]
    processors = [Script(len(prompt), written)]
    chat = ChatPaged.from_engine(
        service, chat_template=ENDS_WITH_PAD, logits_processors=processors, max_tokens=len(written)
    )
    for message in answers(chat):
        assert (message.text, message.response_metadata["finish_reason"]) == ("Four.", "stop")
    for message in answers(chat, n=2):
        assert message.text == "Four."
    longer = chat.invoke("x", ignore_eos=True)
    assert longer.usage_metadata["output_tokens"] == len(written)
    assert chat.invoke("x", min_tokens=8).usage_metadata["output_tokens"] >= 8


def test_a_completion_ends_where_generate_ends_it(other_end: ScriptedService) -> None:
    assert PagedLLM.from_engine(other_end, max_tokens=3, stop_token_ids=[5]).invoke("x")
    assert other_end.params[-1].stop_token_ids == (5,)


# What stopped it


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"stop": ["you", "th"]}, "th"), ({"stop_token_ids": [EOS]}, None), ({"max_tokens": 3}, None), ({}, None)],
)
def test_the_stop_that_matched_is_told(service: ScriptedService, options: dict[str, Any], reason: str | None) -> None:
    service.writer = lambda prompt, params: "Hello there, you"
    options = {"max_tokens": 99, **options}
    found = [message.response_metadata for message in answers(ChatPaged.from_engine(service, **options))]
    llm = PagedLLM.from_engine(service, **options)
    found += [llm.generate(["x"]).generations[0][0].generation_info, total(llm._stream("x")).generation_info]
    assert [info.get("stop_reason") for info in found] == [reason] * 4


def test_a_stop_token_that_was_asked_for_is_told_by_its_id(service: ScriptedService) -> None:
    service.writer = lambda prompt, params: "Hello there"
    token = service.engine.tokenizer("o")["input_ids"][0]
    for stops in ([token], [token, EOS]):
        chat = ChatPaged.from_engine(service, max_tokens=99, stop_token_ids=stops)
        for message in answers(chat):
            assert (message.text, message.response_metadata["stop_reason"]) == ("Hell", token)


# Reasoning


def reasoning(message: Any) -> int:
    return message.usage_metadata["output_token_details"]["reasoning"]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("<think>let me see</think>Four.", len("let me see")),
        ("<think>let me se", len("let me se")),
        ("<think>漢</think>x", len("漢".encode())),
        ("<think>é漢", len("é漢".encode())),
        ("<think>a</think><think>b</think>x", 2),
    ],
)
def test_reasoning_tokens_are_those_that_spell_it(service: ScriptedService, text: str, count: int) -> None:
    service.writer = lambda prompt, params: text
    chat = ChatPaged.from_engine(service, max_tokens=len(text.encode()), reasoning_tags=("<think>", "</think>"))
    for message in answers(chat):
        assert reasoning(message) == count


def test_reasoning_that_is_cut_within_a_character_counts_its_tokens(service: ScriptedService) -> None:
    service.writer = lambda prompt, params: "<think>é漢</think>"
    chat = ChatPaged.from_engine(service, max_tokens=len("<think>") + 4, reasoning_tags=("<think>", "</think>"))
    assert [reasoning(message) for message in answers(chat)] == [4, 4]


def test_reasoning_of_all_samples_is_counted(service: ScriptedService) -> None:
    service.writer = lambda prompt, params: "<think>abc</think>Four."
    chat = ChatPaged.from_engine(service, max_tokens=99, reasoning_tags=("<think>", "</think>"))
    result = chat.generate([[HumanMessage("x")]], n=3)
    assert reasoning(result.generations[0][0].message) == 9


def test_reasoning_never_comes_to_more_tokens_than_the_output() -> None:
    """The prompt opens it, the output is nothing else, and the tokenizer begins every text with a token of its own."""
    tokenizer = byte_fallback_bpe()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>"
    written = tokenizer.convert_tokens_to_ids(["<0x61>", "<0x62>", "▁", "<0x63>"])
    engine = Engine(make_tiny("llama", vocab_size=len(tokenizer)), tokenizer, kv_cache_memory="1MiB")
    with engine, AsyncEngine(engine) as service:
        chat = ChatPaged.from_engine(service, max_tokens=4, reasoning_tags=("<think>", "</think>"))
        length = chat.get_num_tokens_from_messages([HumanMessage("x")])
        for message in answers(chat, logits_processors=[Script(length, written)]):
            assert message.additional_kwargs["reasoning_content"] == "ab c"
            assert reasoning(message) == message.usage_metadata["output_tokens"] == 4

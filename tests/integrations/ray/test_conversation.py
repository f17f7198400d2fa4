"""Conversations in OpenAI's form are shown as the template of the model shows them, or refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_tokenizers import byte_tokenizer

from paged_backend.errors import ConfigError, RequestRefused
from paged_backend.integrations.ray.conversation import check_variables, prompt_ids

USER = {"role": "user", "content": "hi"}
CALLS = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments.town }}{% endfor %}"
)


def shown(messages: Any, template: str | None = None, **variables: Any) -> str:
    tokenizer = byte_tokenizer()
    return tokenizer.decode(prompt_ids(tokenizer, messages, template, variables))


def test_a_chat_is_rendered_with_the_template_of_the_model() -> None:
    assert shown([{"role": "system", "content": "Be brief."}, USER]) == "system: Be brief.\nuser: hi\nassistant:"


def test_parts_of_text_are_one_text() -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert shown([{"role": "user", "content": parts}]) == "user: hi\nassistant:"


def test_arguments_of_tool_calls_are_read_from_their_json() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Dent"}'}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert shown([USER, answer], CALLS + "{% endfor %}") == "hiDent"


def test_variables_reach_the_template() -> None:
    assert shown([USER], "{{ greeting }} {{ messages[0].content }}", greeting="oh") == "oh hi"


def test_an_answer_that_is_to_go_on_is_not_closed() -> None:
    begun = [USER, {"role": "assistant", "content": "well"}]
    assert shown(begun, continue_final_message=True).endswith("assistant: well")


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ("hi", "at least one mapping"),
        ([], "at least one mapping"),
        (["hi"], "'hi'"),
        ([{"content": "hi"}], "a role"),
        ([{"role": "us er", "content": "hi"}], "us er"),
        ([{"role": "user"}], "content of a message"),
        ([{"role": "user", "content": 3}], "got 3"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "image_url"),
    ],
)
def test_what_is_no_conversation_of_texts_is_refused_with_the_value(messages: Any, reason: str) -> None:
    with pytest.raises(RequestRefused, match=reason):
        shown(messages)


def test_what_a_template_raises_refuses_the_row_alone() -> None:
    with pytest.raises(RequestRefused, match="refused the messages: only poems"):
        shown([USER], "{{ raise_exception('only poems') }}")


def test_a_model_without_a_template_names_the_ways_out() -> None:
    with pytest.raises(RequestRefused, match=r"chat_template=.*prompts"):
        prompt_ids(byte_tokenizer(chat_template=None), [USER], None, {})


def test_arguments_that_are_no_variables_of_a_template_are_refused() -> None:
    with pytest.raises(ConfigError, match="'tokenize'"):
        check_variables({"tokenize": False})

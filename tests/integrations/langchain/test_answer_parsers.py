"""An answer that was cut short is an error, and never a shorter answer."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration
from pydantic import BaseModel

from paged_backend.integrations.langchain.answer_parsers import JsonAnswer, JsonCall, PydanticAnswer, PydanticCall


class Point(BaseModel):
    x: int


def answer(text: str, reason: str | None = "stop", **fields: Any) -> list[ChatGeneration]:
    metadata = {"finish_reason": reason} if reason else {}
    return [ChatGeneration(message=AIMessage(text, response_metadata=metadata, **fields))]


def call(reason: str | None = "stop") -> list[ChatGeneration]:
    return answer("", reason, tool_calls=[{"name": "Point", "args": {"x": 3}, "id": "1"}])


def test_a_whole_answer_is_parsed():
    assert JsonAnswer().parse_result(answer('{"x": 3}')) == {"x": 3}
    assert PydanticAnswer(pydantic_object=Point).parse_result(answer('{"x": 3}')) == Point(x=3)


def test_a_whole_call_is_parsed():
    assert JsonCall(key_name="Point", first_tool_only=True).parse_result(call()) == {"x": 3}
    assert PydanticCall(tools=[Point], first_tool_only=True).parse_result(call()) == Point(x=3)


@pytest.mark.parametrize(
    ("reason", "fix"), [("length", "allow more max_tokens"), ("stop", "use stop texts that no answer can hold")]
)
def test_an_answer_that_was_cut_short_names_the_reason_and_the_fix(reason: str, fix: str):
    with pytest.raises(OutputParserException, match=f"finish_reason='{reason}'; {fix}") as caught:
        JsonAnswer().parse_result(answer('{"x": 3', reason))
    assert caught.value.llm_output == '{"x": 3'


def test_a_number_cut_by_the_length_might_have_had_more_digits():
    with pytest.raises(OutputParserException, match="not complete"):
        JsonAnswer().parse_result(answer("12", "length"))
    assert JsonAnswer().parse_result(answer("12", "stop")) == 12
    assert JsonAnswer().parse_result(answer("true", "length")) is True


def test_a_stream_gives_beginnings_until_its_last_chunk():
    assert JsonAnswer().parse_result(answer('{"x": 3', None), partial=True) == {"x": 3}
    with pytest.raises(OutputParserException, match="not complete"):
        JsonAnswer().parse_result(answer('{"x": 3', "length"), partial=True)


def test_a_forced_call_that_is_not_there_is_an_error():
    invalid = [{"name": "Point", "args": '{"x": ', "id": "1", "error": None, "type": "invalid_tool_call"}]
    with pytest.raises(OutputParserException, match="not complete") as caught:
        JsonCall(key_name="Point").parse_result(answer("", "length", invalid_tool_calls=invalid))
    assert caught.value.llm_output == '{"x": '

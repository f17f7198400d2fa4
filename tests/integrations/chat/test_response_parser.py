"""However an output is cut into pieces, the parser finds the same in it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_backend.integrations.chat.response_parser import ResponseParser
from paged_backend.integrations.chat.tool_formats import FORMATS, read_json_calls, read_mistral_calls

PARTS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<", " ", "\n", "words ",
    '{"name": "f", "arguments": {"a": 1}}', '{"name": "f"', "[", "{", "```json\n", "```",
    '<tool_call>{"name": "f"}</tool_call>', '```json\n{"name": "f"}\n```',
]  # fmt: skip


def found(cuts: list[str], name: str | None, *, is_reasoning: bool) -> tuple[str, str, list, list]:
    tools = FORMATS[name] if name else None
    parser = ResponseParser(("<think>", "</think>"), is_reasoning, tools, tool_names=["f", "g"])
    pieces = [piece for cut in cuts for piece in parser.feed(cut)] + parser.finish()
    return (
        "".join(piece.content for piece in pieces),
        "".join(piece.reasoning for piece in pieces),
        [piece.call for piece in pieces if piece.call is not None],
        [piece.malformed for piece in pieces if piece.malformed],
    )


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PARTS), max_size=6), st.sampled_from([None, *FORMATS]), st.booleans(), st.data())
def test_the_pieces_do_not_depend_on_the_cuts(parts: list[str], name: str | None, open_: bool, data) -> None:
    text = "".join(parts)
    places = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    cuts = [text[i:j] for i, j in zip([0, *places], [*places, len(text)], strict=True)]
    whole = found([text], name, is_reasoning=open_)
    assert found(cuts, name, is_reasoning=open_) == whole
    assert found(list(text), name, is_reasoning=open_) == whole


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "f", "arguments": {}}', [("f", {})]),
        ('{"name": "f", "parameters": {"a": 1}}; {"name": "g"}', [("f", {"a": 1}), ("g", {})]),
        ('[{"name": "f", "arguments": "{\\"a\\": 1}"}]', [("f", {"a": 1})]),
        ('{"type": "function", "function": {"name": "f", "arguments": {}}}', [("f", {})]),
    ],
)
def test_json_calls_are_read(text: str, calls: list) -> None:
    assert read_json_calls(text) == calls


@pytest.mark.parametrize("text", ["", "[]", "7", '{"name": 5}', '{"name": "f", "arguments": 5}', '{"name": "f"} words'])
def test_what_is_no_call_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_json_calls(text)


def test_newer_mistral_calls_are_read() -> None:
    assert read_mistral_calls('f{"a": 1}[TOOL_CALLS]g[ARGS]{}') == [("f", {"a": 1}), ("g", {})]
    with pytest.raises(ValueError, match="no call"):
        read_mistral_calls("some words")


def marked(argument: object) -> str:
    return f"<tool_call>{json.dumps({'name': 'f', 'arguments': {'x': argument}})}</tool_call>"


WITH_MARK, WITH_QUOTE = "a </tool_call> b", 'a "</tool_call>'
UNPAIRED = '<tool_call>a "b</tool_call>'


@pytest.mark.parametrize(
    ("text", "arguments", "malformed", "content"),
    [
        (f"{marked(WITH_MARK)} on", [WITH_MARK], [], "on"),
        (f"{marked(WITH_QUOTE)} on {marked(1)}", [WITH_QUOTE, 1], [], "on "),
        (marked("</tool_call>").removesuffix("</tool_call>"), ["</tool_call>"], [], ""),
        # Quotation marks that do not pair tell nothing.
        (f"{UNPAIRED} on {marked(1)}", [1], [UNPAIRED], "on "),
        (f"{UNPAIRED} on", [], [UNPAIRED], "on"),
    ],
)
def test_a_mark_within_an_argument_ends_no_call(text: str, arguments: list, malformed: list, content: str) -> None:
    expected = (content, "", [("f", {"x": argument}) for argument in arguments], malformed)
    assert found([text], "hermes", is_reasoning=False) == expected
    assert found(list(text), "hermes", is_reasoning=False) == expected


@pytest.mark.parametrize("name", ["llama3", "mistral", "json"])
@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Anna", "age": 30}',
        '{"name": "f"}',
        '{"name": "Anna", "arguments": {}}',
        '[{"name": "f", "arguments": {}}, {"name": "Anna", "age": 30}]',
        '{"name": "f", "arguments": 5}',
    ],
)
def test_an_answer_in_json_is_no_call_unless_it_names_a_tool_with_arguments(name: str, text: str) -> None:
    assert found([text], name, is_reasoning=False) == (text, "", [], [])


def test_a_marked_call_may_leave_out_empty_arguments_but_not_misplace_them() -> None:
    assert read_json_calls('{"name": "f"}') == [("f", {})]
    with pytest.raises(ValueError, match="needs arguments"):
        read_json_calls('{"name": "f", "a": 1}')


def test_a_forced_call_that_is_none_was_cut_short() -> None:
    parser = ResponseParser(tools=FORMATS["json"], tool_names=["f"], is_forced=True)
    (piece,) = [*parser.feed('{"name": "f", "arg'), *parser.finish()]
    # What begins as JSON would be read as a call with fewer arguments.
    assert piece.malformed == '<tool_call>{"name": "f", "arg'

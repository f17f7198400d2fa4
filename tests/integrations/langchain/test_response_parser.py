"""However an output is cut into pieces, the parser finds the same in it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_backend.integrations.langchain.response_parser import ResponseParser
from paged_backend.integrations.langchain.tool_formats import FORMATS, read_json_calls, read_mistral_calls

PARTS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<", " ", "\n", "words ",
    '{"name": "f", "arguments": {"a": 1}}', '{"name": "f"', "[", "{", "```json\n", "```",
    '<tool_call>{"name": "f"}</tool_call>', '```json\n{"name": "f"}\n```',
]  # fmt: skip


def found(cuts: list[str], name: str | None, is_reasoning: bool) -> tuple[str, str, list, list]:
    tools = FORMATS[name] if name else None
    parser = ResponseParser(("<think>", "</think>"), is_reasoning, tools)
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
    whole = found([text], name, open_)
    assert found(cuts, name, open_) == whole
    assert found(list(text), name, open_) == whole


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

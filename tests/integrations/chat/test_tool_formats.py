"""Calls of tools, read from what models write."""

from __future__ import annotations

import pytest

from paged_backend.integrations.chat.tool_formats import (
    FORMATS,
    format_of_template,
    read_answer_calls,
    read_json_calls,
    read_mistral_calls,
)

CALL = '{"name": "f", "arguments": {"x": 1}}'


@pytest.mark.parametrize(
    ("text", "count"),
    [(CALL, 1), (f"[{CALL}, {CALL}]", 2), (f"{CALL}; {CALL}\n{CALL}", 3), (f"```json\n{CALL}\n```", 1)],
)
def test_one_call_and_several_are_read(text: str, count: int):
    assert read_json_calls(text) == [("f", {"x": 1})] * count


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "f", "parameters": {"x": 1}}',
        '{"name": "f", "arguments": "{\\"x\\": 1}"}',
        '{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}',
    ],
)
def test_arguments_may_be_called_otherwise_be_a_text_or_stand_in_a_function(text: str):
    assert read_json_calls(text) == [("f", {"x": 1})]


def test_a_name_alone_is_a_call_without_arguments_unless_they_are_needed():
    assert read_json_calls('{"name": "f"}') == [("f", {})]
    with pytest.raises(ValueError, match="needs arguments"):
        read_json_calls('{"name": "f"}', needs_arguments=True)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "there is no call"),
        ("[]", "there is no call"),
        ("3", "needs a name"),
        ('{"name": 3, "arguments": {}}', "needs a name"),
        ('{"name": "f", "arguments": [1]}', "must be an object"),
        ('{"name": "f", "age": 3}', "needs arguments"),
        ('{"name": "f", "arguments": {', "Expecting"),
    ],
)
def test_what_is_no_call_says_why(text: str, why: str):
    with pytest.raises(ValueError, match=why):
        read_json_calls(text)


def test_an_answer_without_a_mark_is_a_call_only_of_a_known_tool():
    assert read_answer_calls(CALL, ["f"]) == [("f", {"x": 1})]
    with pytest.raises(ValueError, match="'f' is no tool"):
        read_answer_calls(CALL, ["g"])


@pytest.mark.parametrize("text", ['f{"x": 1}', 'f[ARGS]{"x": 1}', 'f[CALL_ID]ab9[ARGS]{"x": 1}', f"[{CALL}]"])
def test_mistral_writes_calls_in_several_ways(text: str):
    assert read_mistral_calls(text) == [("f", {"x": 1})]


def test_mistral_writes_calls_one_after_another():
    assert read_mistral_calls('f{"x": 1}[TOOL_CALLS]g.h[ARGS]{}') == [("f", {"x": 1}), ("g.h", {})]
    with pytest.raises(ValueError, match="'and so on' is no call"):
        read_mistral_calls('f{"x": 1}and so on')


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (f"{CALL}</tool_call> more", len(CALL)),
        (CALL, -1),
        # Within a string it is a part of the arguments.
        ('{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>', 49),
        ('{"name": "f", "arguments": {"x": "</tool_call>', -1),
        # A quotation mark that goes astray hides no end.
        ('say "hi</tool_call> and "there</tool_call>', 7),
    ],
)
def test_the_mark_that_ends_a_call_is_found(text: str, place: int):
    assert FORMATS["hermes"].end_of_call(text, final=False) == place


def test_a_string_that_never_ends_ends_with_the_output():
    text = '{"name": "f</tool_call>'
    assert FORMATS["hermes"].end_of_call(text, final=False) == -1
    assert FORMATS["hermes"].end_of_call(text, final=True) == text.index("<")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("... <tool_call> ...", "hermes"),
        ("... [TOOL_CALLS] ...", "mistral"),
        ("... <|python_tag|> ...", "llama3"),
        ("... {'name': f, 'parameters': d} ...", "llama3"),
        ("no tools at all", "hermes"),
    ],
)
def test_a_template_tells_its_format(template: str, name: str):
    assert format_of_template(template) is FORMATS[name]


def test_the_marks_of_a_format_are_all_it_has():
    assert FORMATS["mistral"].marks == ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    assert FORMATS["json"].marks == ()

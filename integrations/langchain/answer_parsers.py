"""The parsers behind with_structured_output: LangChain's, but for answers that were cut short, which they refuse."""

from __future__ import annotations

import json
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.outputs import Generation


class _WholeAnswer:
    """Mixed into a parser of JSON; LangChain's takes the beginning of an object for a shorter one."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        is_over = not partial or _finish_reason(result) is not None
        if is_over:
            text = result[0].text
            try:
                value = json.loads(text)
            except ValueError as error:
                raise _cut_short(result, text) from error
            # A number might have had further digits.
            if type(value) in (int, float) and _finish_reason(result) == "length":
                raise _cut_short(result, text)
        return super().parse_result(result, partial=not is_over)  # type: ignore[misc]


class _WholeCall:
    """Mixed into a parser of a forced tool call; LangChain's gives None where there is none."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        is_over = not partial or _finish_reason(result) is not None
        message = getattr(result[0], "message", None)
        if is_over and isinstance(message, AIMessage) and not message.tool_calls:
            raise _cut_short(result, "".join(call["args"] or "" for call in message.invalid_tool_calls))
        return super().parse_result(result, partial=not is_over)  # type: ignore[misc]


class JsonAnswer(_WholeAnswer, JsonOutputParser):
    """The answer as JSON."""


class PydanticAnswer(_WholeAnswer, PydanticOutputParser[Any]):
    """The answer as an object of a pydantic class."""


class JsonCall(_WholeCall, JsonOutputKeyToolsParser):
    """The arguments of the call as JSON."""


class PydanticCall(_WholeCall, PydanticToolsParser):
    """The arguments of the call as an object of a pydantic class."""


def _finish_reason(result: list[Generation]) -> str | None:
    """Why the message ended; streamed ones tell with their last chunk."""
    message = getattr(result[0], "message", None)
    reason: str | None = message.response_metadata.get("finish_reason") if message is not None else None
    return reason


def _cut_short(result: list[Generation], text: str) -> OutputParserException:
    reason = _finish_reason(result)
    fix = "allow more max_tokens" if reason == "length" else "use stop texts that no answer can hold"
    problem = f"the answer is not complete, it ended with finish_reason={reason!r}; {fix}"
    return OutputParserException(f"{problem}. It is: {text}", llm_output=text)

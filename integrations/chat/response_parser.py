"""ResponseParser: splits what a model writes into content, reasoning and tool calls, piece by piece."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from paged_backend.integrations.chat.tool_formats import Calls, ToolFormat, read_answer_calls

# How an answer in JSON begins.
_JSON_STARTS = ("{", "[", "```")

# A user's own parser: the whole content to what of it is content and its calls.
WholeParser = Callable[[str], tuple[str, Calls]]


@dataclass(frozen=True)
class Piece:
    """One of: some content, some reasoning, a whole call, or the text of what should have been a call."""

    content: str = ""
    reasoning: str = ""
    call: tuple[str, dict[str, Any]] | None = None
    malformed: str = ""
    call_id: str = ""


class ResponseParser:
    """Takes text as it comes; the pieces are the same however it is cut.

    reasoning_tags: what stands around reasoning, if the model reasons. is_reasoning: the prompt ended with the first.
    tools: how calls are written, if there may be any, or a parser of one's own, which sees the whole at the end.
    tool_names: what a call without a mark may name. max_calls: further ones are dropped. is_forced: the output is held
    to being a call, so that what is none was cut short.
    """

    def __init__(
        self,
        reasoning_tags: tuple[str, str] | None = None,
        is_reasoning: bool = False,
        tools: ToolFormat | WholeParser | None = None,
        tool_names: Collection[str] = (),
        max_calls: int | None = None,
        is_forced: bool = False,
    ) -> None:
        self._tags = reasoning_tags
        self._format = tools if isinstance(tools, ToolFormat) else None
        self._parser = tools if not isinstance(tools, ToolFormat) else None
        self._tool_names = tool_names
        self._is_forced = is_forced
        self._handlers = {
            "start": self._in_start,
            "reasoning": self._in_reasoning,
            "text": self._in_text,
            "call": self._in_call,
            "json": self._in_json,
            "whole": self._in_whole,
        }
        # What the output may begin with, and the state that it then is in; anything else is text.
        self._starts = {self._tags[0]: "reasoning"} if self._tags else {}
        if self._format is not None and self._format.begin is not None:
            self._starts[self._format.begin] = "call"
        if self._format is not None and self._format.starts_with_json:
            self._starts |= dict.fromkeys(_JSON_STARTS, "json")
        self._state = "reasoning" if is_reasoning else "start"
        self._left = max_calls
        self._buffer = ""
        # White space after reasoning and calls is the template's, not the answer's.
        self._drops_space = False

    def feed(self, text: str) -> list[Piece]:
        self._buffer += text
        return list(self._take(final=False))

    def finish(self) -> list[Piece]:
        """What is left when the output is over."""
        return list(self._take(final=True))

    def _take(self, final: bool) -> Iterator[Piece]:
        state = ""
        # Each round handles what the state before it left; it ends where more text is needed.
        while self._buffer and state != self._state:
            state = self._state
            yield from self._handlers[state](final)

    def _in_start(self, final: bool) -> Iterable[Piece]:
        text = self._buffer.lstrip()
        if not final and any(start.startswith(text) for start in self._starts):
            return ()
        start = next((start for start in self._starts if text.startswith(start)), None)
        if start is None:
            self._state = "text" if self._parser is None else "whole"
        else:
            self._state = self._starts[start]
            # JSON is read with its beginning, the others without their marks.
            self._buffer = text if self._state == "json" else text.removeprefix(start)
        return ()

    def _in_reasoning(self, final: bool) -> Iterator[Piece]:
        assert self._tags is not None
        before, found = self._split(self._tags[1], final)
        if before:
            yield Piece(reasoning=before)
        if found:
            self._state, self._drops_space = "start", True

    def _in_text(self, final: bool) -> Iterator[Piece]:
        if self._drops_space:
            self._buffer = self._buffer.lstrip()
            if not self._buffer:
                return
            self._drops_space = False
        begin = self._format.begin if self._format is not None else None
        if begin is None:
            yield Piece(content=self._buffer)
            self._buffer = ""
            return
        before, found = self._split(begin, final)
        if before:
            yield Piece(content=before)
        if found:
            self._state = "call"

    def _in_call(self, final: bool) -> Iterator[Piece]:
        assert self._format is not None
        assert self._format.begin is not None
        end = self._format.end or ""
        place = self._format.end_of_call(self._buffer, final)
        if place < 0 and not final:
            return
        if place < 0:
            body, mark, self._buffer = self._buffer, "", ""
        else:
            body, mark, self._buffer = self._buffer[:place], end, self._buffer[place + len(end) :]
        self._state, self._drops_space = "text", True
        yield from self._calls(self._format.read, body, _malformed(f"{self._format.begin}{body}{mark}"))

    def _in_json(self, final: bool) -> Iterator[Piece]:
        """Begins as JSON without a mark: perhaps calls, perhaps an answer that happens to be JSON."""
        if final:
            body, self._buffer = self._buffer, ""
            otherwise = _malformed(f"<tool_call>{body}") if self._is_forced else Piece(content=body)
            yield from self._calls(partial(read_answer_calls, tools=self._tool_names), body, otherwise)

    def _in_whole(self, final: bool) -> Iterator[Piece]:
        if final:
            assert self._parser is not None
            body, self._buffer = self._buffer, ""
            content, calls = self._parser(body)
            if content:
                yield Piece(content=content)
            yield from self._allowed(calls)

    def _calls(self, read: Callable[[str], Calls], body: str, otherwise: Piece) -> Iterator[Piece]:
        try:
            calls = read(body)
        except (ValueError, RecursionError):
            yield otherwise
            return
        yield from self._allowed(calls)

    def _allowed(self, calls: Calls) -> Iterator[Piece]:
        for call in calls:
            if self._left is None or self._left > 0:
                self._left = None if self._left is None else self._left - 1
                yield Piece(call=call, call_id=_call_id())

    def _split(self, mark: str, final: bool) -> tuple[str, bool]:
        """The buffer up to ``mark``, which is taken out too; all but its possible beginning if it is not there."""
        before, found, after = self._buffer.partition(mark)
        if not found and not final:
            kept = next((n for n in range(len(mark) - 1, 0, -1) if before.endswith(mark[:n])), 0)
            before, after = before[: len(before) - kept], before[len(before) - kept :]
        self._buffer = after
        return before, bool(found)


def _malformed(written: str) -> Piece:
    # With its mark, which no reader of half a JSON text takes for a proper call.
    return Piece(malformed=written, call_id=_call_id())


def _call_id() -> str:
    # Nine letters and digits: what Mistral's templates insist on.
    return secrets.token_hex(5)[:9]

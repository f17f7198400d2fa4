"""``/v1/responses``: chats in OpenAI's newer form, of which nothing is kept."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from paged_backend.integrations.chat.chat_request import ChatRequest
from paged_backend.integrations.chat.response_parser import Piece
from paged_backend.integrations.chat.token_counts import num_tokens_of
from paged_backend.integrations.chat.token_logprobs import TokenLogprobs
from paged_backend.integrations.chat.token_usage import token_usage
from paged_backend.integrations.openai_server.api_error import json_response
from paged_backend.integrations.openai_server.backend import Backend, check_end
from paged_backend.integrations.openai_server.bodies import ChatBody
from paged_backend.integrations.openai_server.chat_completions import ChatSettings, prepare_chat, submit_chat
from paged_backend.integrations.openai_server.completions import finite
from paged_backend.integrations.openai_server.disconnect import while_there
from paged_backend.integrations.openai_server.event_stream import EventStream, event
from paged_backend.integrations.openai_server.response_body import ResponseBody, chat_of

if TYPE_CHECKING:
    from paged_backend import Delta, Handle, RequestOutput

Event = dict[str, Any]


async def respond(backend: Backend, settings: ChatSettings, body: ResponseBody, request: Request) -> Response:
    """Answer a request, as a stream if that is wanted."""
    backend.check_model(body.model)
    backend.check()
    chat_body = chat_of(body)
    chat = await asyncio.to_thread(prepare_chat, backend, settings, chat_body)
    handle = await submit_chat(backend, settings, chat_body, request, chat)
    answer = _Answer(backend, body, chat_body, chat, handle)
    if body.stream:
        return await EventStream.begin(request, answer.events())
    return json_response(await while_there(request.receive, answer.whole()))


class _Answer:
    """What a request gets: items, each open until another one begins."""

    def __init__(
        self, backend: Backend, body: ResponseBody, chat_body: ChatBody, chat: ChatRequest, handle: Handle
    ) -> None:
        self._handle = handle
        self._tokenizer = backend.tokenizer
        self._parser = chat.parser()
        self._logprobs = TokenLogprobs(self._tokenizer, body.top_logprobs or 0) if chat_body.logprobs else None
        self._num_tokens = self._num_events = 0
        self._reasoning = ""
        self._response: dict[str, Any] = {**_told_again(body), "status": "in_progress", "output": [], "usage": None}

    async def whole(self) -> dict[str, Any]:
        """All at once."""
        output = await self._handle
        check_end(output)
        for _ in self._of_text(output.text, True, output.token_ids, output):
            pass
        self._finish(output)
        return self._response

    async def events(self) -> AsyncGenerator[bytes, None]:
        """As it comes."""
        has_begun = False
        async for delta in self._handle:
            if delta.finish_reason is not None:
                check_end(self._handle.outputs[0])
            if not has_begun:
                has_begun = True
                for kind in ("created", "in_progress"):
                    yield self._event({"type": f"response.{kind}", "response": self._response})
            for each in self._of_delta(delta):
                yield self._event(each)
        self._finish(self._handle.outputs[0])
        yield self._event({"type": f"response.{self._response['status']}", "response": self._response})

    def _event(self, content: Event) -> bytes:
        numbered = {**content, "sequence_number": self._num_events}
        self._num_events += 1
        return event(numbered, content["type"])

    def _of_delta(self, delta: Delta) -> Iterator[Event]:
        is_over = delta.finish_reason is not None
        yield from self._of_text(delta.text, is_over, delta.token_ids, self._handle.outputs[0])

    def _of_text(self, text: str, is_over: bool, token_ids: list[int], output: RequestOutput) -> Iterator[Event]:
        told = self._told(token_ids, output)
        pieces = self._parser.feed(text)
        if is_over:
            pieces += self._parser.finish()
        for piece in pieces:
            yield from self._of_piece(piece, told)
            told = []
        if told and self._open == "message":
            self._item["content"][0]["logprobs"] += told
        if is_over:
            yield from self._close()
            if not self._response["output"]:
                # An answer of no words is a message too.
                yield from self._begin("message")
                yield from self._close()

    def _of_piece(self, piece: Piece, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        if piece.call is not None:
            yield from self._close()
            yield from self._call(piece)
            return
        kind = "reasoning" if piece.reasoning else "message"
        # What was no proper call is told as it was written.
        text = piece.reasoning or piece.content or piece.malformed
        if self._open != kind:
            yield from self._close()
            yield from self._begin(kind)
        part = self._item["content"][0]
        part["text"] += text
        place = {"item_id": self._item["id"], "output_index": self._index, "content_index": 0, "delta": text}
        if kind == "reasoning":
            self._reasoning += text
            yield {"type": "response.reasoning_text.delta", **place}
        else:
            part["logprobs"] += logprobs
            yield {"type": "response.output_text.delta", **place, "logprobs": logprobs}

    @property
    def _index(self) -> int:
        return len(self._response["output"]) - 1

    @property
    def _item(self) -> dict[str, Any]:
        item: dict[str, Any] = self._response["output"][-1]
        return item

    @property
    def _open(self) -> str | None:
        """The type of the item that goes on, if there is any."""
        items = self._response["output"]
        return items[-1]["type"] if items and items[-1]["status"] == "in_progress" else None

    def _begin(self, kind: str) -> Iterator[Event]:
        item: dict[str, Any] = {"id": _id("msg" if kind == "message" else "rs"), "type": kind, "status": "in_progress"}
        item |= {"role": "assistant", "content": []} if kind == "message" else {"summary": [], "content": []}
        self._response["output"].append(item)
        yield {"type": "response.output_item.added", "output_index": self._index, "item": _copy(item)}
        part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item["content"].append(part)
        place = {"item_id": item["id"], "output_index": self._index, "content_index": 0}
        yield {"type": "response.content_part.added", **place, "part": _copy(part)}

    def _close(self) -> Iterator[Event]:
        kind = self._open
        if kind is None:
            return
        item = self._item
        item["status"] = "completed"
        part = item["content"][0]
        place = {"item_id": item["id"], "output_index": self._index, "content_index": 0}
        done: Event = {**place, "text": part["text"]}
        if kind == "message":
            yield {"type": "response.output_text.done", **done, "logprobs": part["logprobs"]}
        else:
            yield {"type": "response.reasoning_text.done", **done}
        yield {"type": "response.content_part.done", **place, "part": part}
        yield {"type": "response.output_item.done", "output_index": self._index, "item": item}

    def _call(self, piece: Piece) -> Iterator[Event]:
        assert piece.call is not None
        name, given = piece.call
        arguments = json.dumps(given, ensure_ascii=False)
        item = {
            "id": _id("fc"),
            "type": "function_call",
            "status": "completed",
            "call_id": piece.call_id,
            "name": name,
            "arguments": arguments,
        }
        self._response["output"].append(item)
        place = {"item_id": item["id"], "output_index": self._index}
        begun = {**item, "arguments": "", "status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": self._index, "item": begun}
        yield {"type": "response.function_call_arguments.delta", **place, "delta": arguments}
        yield {"type": "response.function_call_arguments.done", **place, "name": name, "arguments": arguments}
        yield {"type": "response.output_item.done", "output_index": self._index, "item": item}

    def _told(self, token_ids: list[int], output: RequestOutput) -> list[dict[str, Any]]:
        if self._logprobs is None or output.logprobs is None:
            return []
        end = self._num_tokens + len(token_ids)
        entries = self._logprobs.entries(token_ids, output.logprobs[self._num_tokens : end])
        self._num_tokens = end
        for entry in entries:
            for told in (entry, *entry["top_logprobs"]):
                told["logprob"] = finite(told["logprob"])
        return entries

    def _finish(self, output: RequestOutput) -> None:
        is_cut = output.finish_reason == "length"
        reason = {"reason": "max_output_tokens"} if is_cut else None
        self._response |= {"status": "incomplete" if is_cut else "completed", "incomplete_details": reason}
        num_reasoning = num_tokens_of(self._reasoning, output, self._tokenizer) if self._reasoning else 0
        usage = token_usage([output])
        self._response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": num_reasoning},
            "total_tokens": usage["total_tokens"],
        }


def _told_again(body: ResponseBody) -> dict[str, Any]:
    """What a response says of its request."""
    given = body.model_dump(by_alias=True)
    choice = "auto" if body.tool_choice is None else given["tool_choice"]
    return {
        "id": _id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "model": body.model,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": {"type": "text"}} if body.text is None or body.text.format is None else given["text"],
        "tool_choice": choice,
        "tools": given["tools"] or [],
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def _copy(content: dict[str, Any]) -> dict[str, Any]:
    """As it is now, for an event that may be looked at when it has gone on."""
    return {name: list(value) if isinstance(value, list) else value for name, value in content.items()}

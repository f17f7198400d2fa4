"""``/v1/chat/completions``: answers to conversations, with tools and structured output."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from paged_backend.integrations.chat.chat_request import ChatRequest, chat_request
from paged_backend.integrations.chat.conversations import tool_response
from paged_backend.integrations.chat.response_parser import Piece, ResponseParser
from paged_backend.integrations.chat.token_counts import num_tokens_of
from paged_backend.integrations.chat.token_logprobs import TokenLogprobs
from paged_backend.integrations.chat.token_usage import token_usage
from paged_backend.integrations.openai_server.api_error import ApiError, json_response
from paged_backend.integrations.openai_server.backend import Backend, check_end
from paged_backend.integrations.openai_server.bodies import ChatBody, Message
from paged_backend.integrations.openai_server.completions import finite
from paged_backend.integrations.openai_server.disconnect import while_there
from paged_backend.integrations.openai_server.event_stream import DONE, EventStream, event

if TYPE_CHECKING:
    from paged_backend import Delta, Handle, RequestOutput

# Output tokens of a request that does not say; a short model or a long prompt leaves fewer.
DEFAULT_MAX_TOKENS = 1024


@dataclass
class ChatSettings:
    """How the chats of a model are written and read; see ``create_app``."""

    model: str
    chat_template: str | None = None
    tool_parser: Any = None
    reasoning_tags: Any = "auto"
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


async def complete_chat(backend: Backend, settings: ChatSettings, body: ChatBody, request: Request) -> Response:
    """Answer a request, as a stream if that is wanted."""
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options goes with stream: true only", param="stream_options")
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs goes with logprobs: true only", param="top_logprobs")
    backend.check_model(body.model)
    backend.check()
    chat = await asyncio.to_thread(prepare_chat, backend, settings, body)
    handle = await submit_chat(backend, settings, body, request, chat)
    completion = _ChatCompletion(backend, body, chat, handle)
    if body.stream:
        return await EventStream.begin(request, completion.events())
    return json_response(await while_there(request.receive, completion.whole()))


def template_message(message: Message) -> dict[str, Any]:
    """A message as ``conversations`` takes it; raises ApiError for arguments of a call that are no JSON object."""
    content = message.content or ""
    if not isinstance(content, str):
        content = "".join(part.text for part in content)
    if message.role == "function":
        return tool_response(content)
    # Templates know the system by one name.
    role = "system" if message.role == "developer" else message.role
    known = {"name": message.name, "reasoning_content": message.reasoning_content, "tool_call_id": message.tool_call_id}
    given = {name: value for name, value in known.items() if value is not None}
    if message.tool_calls:
        given["tool_calls"] = [  # type: ignore[assignment]
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return {"role": role, "content": content, **given}


def _arguments(text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ApiError(400, f"the arguments of a tool call must be a JSON object, got {text!r:.200}", param="messages")
    return arguments


def prepare_chat(backend: Backend, settings: ChatSettings, body: ChatBody) -> ChatRequest:
    """The prompt of a chat, and how its answer is held and read; RequestRefused or ApiError for what cannot be."""
    messages = [template_message(message) for message in body.messages]
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    call: dict[str, Any] = {
        "tools": [tool.model_dump(exclude_none=True) for tool in body.tools or ()],
        "tool_choice": body.tool_choice.model_dump()
        if not isinstance(body.tool_choice, str | None)
        else body.tool_choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "chat_template_kwargs": variables,
    }
    if body.response_format is not None:
        call["response_format"] = body.response_format.model_dump(exclude_none=True)
    chat = chat_request(settings, backend.tokenizer, messages, call)
    backend.check_prompt(chat.prompt)
    return chat


async def submit_chat(
    backend: Backend, settings: ChatSettings, body: ChatBody, request: Request, chat: ChatRequest
) -> Handle:
    """Queue a chat; raises what ``AsyncEngine.submit`` does, and ConfigError for parameters that cannot be followed."""
    from paged_backend import turn_end_ids

    max_tokens = body.max_completion_tokens or body.max_tokens
    stop_token_ids = list(body.stop_token_ids or ())
    if not body.ignore_eos:
        stop_token_ids += turn_end_ids(backend.engine, settings.chat_template)
    params = backend.params(
        body,
        max_tokens=max_tokens or max(backend.room(len(chat.prompt), DEFAULT_MAX_TOKENS), body.min_tokens or 0),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        stop_token_ids=stop_token_ids,
        **chat.sampling,
    )
    return await backend.submit(chat.prompt, params, backend.options(body, request))


class _ChatCompletion:
    """The answer to one request."""

    def __init__(self, backend: Backend, body: ChatBody, chat: ChatRequest, handle: Handle) -> None:
        self._body = body
        self._handle = handle
        self._tokenizer = backend.tokenizer
        self._choices = [
            _Choice(
                index, chat.parser(), TokenLogprobs(self._tokenizer, body.top_logprobs or 0) if body.logprobs else None
            )
            for index in range(body.n or 1)
        ]
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": body.model}

    async def whole(self) -> dict[str, Any]:
        """All at once."""
        await self._handle
        outputs = self._handle.outputs
        for output in outputs:
            check_end(output)
        choices = [choice.whole(output) for choice, output in zip(self._choices, outputs, strict=True)]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": self._usage()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """As it comes."""
        with_usage = bool(self._body.stream_options and self._body.stream_options.include_usage)
        head: dict[str, Any] = {**self._head, "object": "chat.completion.chunk"}
        last = {**head, "choices": []}
        if with_usage:
            head["usage"] = None
        async for delta in self._handle:
            output = self._handle.outputs[delta.index]
            if delta.finish_reason is not None:
                check_end(output)
            for choice in self._choices[delta.index].chunks(delta, output):
                yield event({**head, "choices": [choice]})
        if with_usage:
            yield event({**last, "usage": self._usage()})
        yield DONE

    def _usage(self) -> dict[str, Any]:
        outputs = self._handle.outputs
        num_reasoning = sum(
            num_tokens_of(choice.reasoning, output, self._tokenizer)
            for choice, output in zip(self._choices, outputs, strict=True)
            if choice.reasoning
        )
        return token_usage(outputs, num_reasoning)


class _Choice:
    """One of the answers; ``reasoning`` is what it held of that so far."""

    def __init__(self, index: int, parser: ResponseParser, logprobs: TokenLogprobs | None) -> None:
        self.reasoning = ""
        self._index = index
        self._parser = parser
        self._logprobs = logprobs
        self._num_tokens = self._num_calls = 0
        self._has_begun = False

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """Of an output that is complete."""
        pieces = [*self._parser.feed(output.text), *self._parser.finish()]
        message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
        for piece in pieces:
            for name, value in self._delta(piece).items():
                message[name] = value if message.get(name) is None else message[name] + value
        for call in message.get("tool_calls", ()):
            del call["index"]
        if message["content"] is None and not self._num_calls:
            message["content"] = ""
        return {
            "index": self._index,
            "message": message,
            "logprobs": self._told(output.token_ids, output),
            "finish_reason": self._finish_reason(output.finish_reason),
        }

    def chunks(self, delta: Delta, output: RequestOutput) -> Sequence[dict[str, Any]]:
        """Of what an output got."""
        pieces = self._parser.feed(delta.text)
        if delta.finish_reason is not None:
            pieces += self._parser.finish()
        deltas = [self._delta(piece) for piece in pieces]
        told = self._told(delta.token_ids, output)
        if not self._has_begun:
            self._has_begun = True
            deltas = [{"role": "assistant", "content": "", **(deltas[0] if deltas else {})}, *deltas[1:]]
        elif told is not None and not deltas:
            deltas = [{}]
        chunks: list[dict[str, Any]] = [
            {"index": self._index, "delta": each, "logprobs": None, "finish_reason": None} for each in deltas
        ]
        if told is not None:
            chunks[0]["logprobs"] = told
        if delta.finish_reason is not None:
            reason = self._finish_reason(delta.finish_reason)
            chunks.append({"index": self._index, "delta": {}, "logprobs": None, "finish_reason": reason})
        return chunks

    def _delta(self, piece: Piece) -> dict[str, Any]:
        if piece.reasoning:
            self.reasoning += piece.reasoning
            return {"reasoning_content": piece.reasoning}
        if piece.call is None:
            # What was no proper call is told as it was written.
            return {"content": piece.content or piece.malformed}
        name, arguments = piece.call
        call = {
            "index": self._num_calls,
            "id": piece.call_id,
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
        }
        self._num_calls += 1
        return {"tool_calls": [call]}

    def _told(self, token_ids: Sequence[int], output: RequestOutput) -> Mapping[str, Any] | None:
        if self._logprobs is None or output.logprobs is None or not token_ids:
            return None
        end = self._num_tokens + len(token_ids)
        entries = self._logprobs.entries(token_ids, output.logprobs[self._num_tokens : end])
        self._num_tokens = end
        for entry in entries:
            for told in (entry, *entry["top_logprobs"]):
                told["logprob"] = finite(told["logprob"])
        return {"content": entries, "refusal": None}

    def _finish_reason(self, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self._num_calls else reason

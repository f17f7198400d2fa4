"""``/v1/completions``: texts that go on."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from paged_backend.errors import RequestRefused
from paged_backend.integrations.chat.token_logprobs import TokenLogprobs
from paged_backend.integrations.chat.token_usage import sum_usage, token_usage
from paged_backend.integrations.openai_server.api_error import ApiError, json_response
from paged_backend.integrations.openai_server.backend import Backend, check_end
from paged_backend.integrations.openai_server.bodies import MAX_PROMPTS, CompletionBody
from paged_backend.integrations.openai_server.disconnect import while_there
from paged_backend.integrations.openai_server.event_stream import DONE, EventStream, event

if TYPE_CHECKING:
    from paged_backend import Delta, Handle

# JSON has no infinity, which a token has that could not be drawn; OpenAI's API says this then.
LEAST_LOGPROB = -9999.0


async def complete(backend: Backend, body: CompletionBody, request: Request) -> Response:
    """Answer a request, as a stream if that is wanted."""
    _check(body)
    backend.check_model(body.model)
    backend.check()
    prompts = await asyncio.to_thread(_prompts, backend, body)
    options = backend.options(body, request)
    handles = []
    for prompt in prompts:
        max_tokens = body.max_tokens or backend.room(len(prompt), 16)
        params = backend.params(
            body, max_tokens=max_tokens, logprobs=body.logprobs, stop_token_ids=body.stop_token_ids or ()
        )
        # Dropped by an error, the handles of those before take their requests along.
        handles.append(await backend.submit(prompt, params, options))
    completion = _Completion(backend, body, prompts, handles)
    if body.stream:
        return await EventStream.begin(request, completion.events())
    return json_response(await while_there(request.receive, completion.whole()))


class _Completion:
    """The answer to one request; ``n`` choices for each prompt, one prompt after the other."""

    def __init__(
        self, backend: Backend, body: CompletionBody, prompts: Sequence[Sequence[int]], handles: Sequence[Handle]
    ) -> None:
        self._body = body
        self._handles = handles
        self._tokenizer = backend.tokenizer
        self._n = body.n or 1
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model,
        }
        choices = range(len(handles) * self._n)
        self._echoes = [_decode(self._tokenizer, prompt) if body.echo else "" for prompt in prompts]
        self._logprobs = [_LegacyLogprobs(self._tokenizer, body.logprobs) for _ in choices] if body.logprobs else None
        if body.logprobs == 0:
            self._logprobs = [_LegacyLogprobs(self._tokenizer, 0) for _ in choices]

    async def whole(self) -> dict[str, Any]:
        """All at once."""
        choices = []
        for number, handle in enumerate(self._handles):
            await handle
            for output in handle.outputs:
                check_end(output)
                index = number * self._n + output.index
                choices.append(
                    {
                        "index": index,
                        "text": self._echoes[number] + output.text,
                        "logprobs": self._told(index, output.token_ids, output.logprobs),
                        "finish_reason": output.finish_reason,
                    }
                )
        return {**self._head, "choices": choices, "usage": self._usage()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """As it comes."""
        with_usage = bool(self._body.stream_options and self._body.stream_options.include_usage)
        head = {**self._head, "usage": None} if with_usage else self._head
        echoes = {number * self._n + i: text for number, text in enumerate(self._echoes) for i in range(self._n)}
        taken = [0] * (len(self._handles) * self._n)
        async for number, delta in _merged(self._handles):
            index, output = number * self._n + delta.index, self._handles[number].outputs[delta.index]
            if delta.finish_reason is not None:
                check_end(output)
            told = None
            if self._logprobs is not None and output.logprobs is not None:
                end = taken[index] + len(delta.token_ids)
                told = self._told(index, delta.token_ids, output.logprobs[taken[index] : end])
                taken[index] = end
            text = echoes.pop(index, "") + delta.text
            if text or told or delta.finish_reason is not None:
                choice = {"index": index, "text": text, "logprobs": told, "finish_reason": delta.finish_reason}
                yield event({**head, "choices": [choice]})
        if with_usage:
            yield event({**self._head, "choices": [], "usage": self._usage()})
        yield DONE

    def _told(self, index: int, token_ids: Sequence[int], logprobs: Sequence[Any] | None) -> dict[str, Any] | None:
        return self._logprobs[index].told(token_ids, logprobs or ()) if self._logprobs is not None else None

    def _usage(self) -> dict[str, Any]:
        return sum_usage([token_usage(handle.outputs) for handle in self._handles])


class _LegacyLogprobs:
    """Lists side by side, where chats have an object for each token."""

    def __init__(self, tokenizer: Any, num_top: int) -> None:
        self._entries = TokenLogprobs(tokenizer, num_top)
        self._offset = 0

    def told(self, token_ids: Sequence[int], logprobs: Sequence[Any]) -> dict[str, Any]:
        """Of the next tokens."""
        entries = self._entries.entries(token_ids, logprobs)
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(entry["token"])
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [finite(entry["logprob"]) for entry in entries],
            "top_logprobs": [
                {top["token"]: finite(top["logprob"]) for top in entry["top_logprobs"]} for entry in entries
            ],
            "text_offset": offsets,
        }


def finite(logprob: float) -> float:
    """The log probability as JSON can say it."""
    return max(logprob, LEAST_LOGPROB)


def _check(body: CompletionBody) -> None:
    if body.suffix:
        raise ApiError(400, "suffix is not served: models here go on with a text, and fill no gaps", param="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(400, f"best_of={body.best_of} is not served; leave it out, or set it to n", param="best_of")
    if body.echo and body.logprobs is not None:
        raise ApiError(400, "echo with logprobs is not served: prompts have no logprobs here", param="echo")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options goes with stream: true only", param="stream_options")


def _prompts(backend: Backend, body: CompletionBody) -> list[list[int]]:
    given = body.prompt
    many: list[Any] = [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)
    if len(many) * (body.n or 1) > MAX_PROMPTS:
        raise ApiError(400, f"{len(many)} prompts with n={body.n} are more than {MAX_PROMPTS} choices", param="n")
    prompts = []
    for prompt in many:
        ids = encode(backend.tokenizer, prompt) if isinstance(prompt, str) else prompt
        backend.check_prompt(ids)
        prompts.append(ids)
    return prompts


def encode(tokenizer: Any, text: str) -> list[int]:
    """The token ids of a prompt; RequestRefused for a text that has none."""
    from paged_backend import tokenizer_lock

    with tokenizer_lock(tokenizer):
        ids: list[int] = tokenizer(text)["input_ids"]
    if not ids:
        raise RequestRefused("the prompt is empty; give at least one token")
    return ids


def _decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    from paged_backend import tokenizer_lock

    with tokenizer_lock(tokenizer):
        text: str = tokenizer.decode(token_ids, skip_special_tokens=True)
    return text


async def _merged(handles: Sequence[Handle]) -> AsyncIterator[tuple[int, Delta]]:
    """The deltas of all requests as they come, each with the number of its request."""
    if len(handles) == 1:
        async for delta in handles[0]:
            yield 0, delta
        return
    news: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue()

    async def read(number: int, handle: Handle) -> None:
        try:
            async for delta in handle:
                news.put_nowait((number, delta))
        except Exception as error:
            news.put_nowait(error)
        else:
            news.put_nowait(None)

    tasks = [asyncio.ensure_future(read(number, handle)) for number, handle in enumerate(handles)]
    try:
        num_open = len(tasks)
        while num_open:
            item = await news.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

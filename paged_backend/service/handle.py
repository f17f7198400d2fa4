"""Handle: a submitted request as its caller sees it, to be awaited, waited for, or read while it grows."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from paged_backend.checks import as_number, describe
from paged_backend.errors import ConfigError, RequestFailed
from paged_backend.outputs import FinishReason, RequestOutput
from paged_backend.sampling.detokenizer import IncrementalDetokenizer
from paged_backend.service.ticket import Ticket, await_until, call_at_end, sleep_until


@dataclass(frozen=True, slots=True)
class Delta:
    """What a request got since its last delta; a reader that is slower than the engine finds several tokens in one.

    The texts join to the output's text and the token ids to its tokens, stop string cut off and all. A text is empty
    while its tokens may still become another character or a stop string. index: which of the request's samples.
    finish_reason: set in the last delta of a sample.
    """

    text: str
    token_ids: list[int]
    index: int = 0
    finish_reason: FinishReason | None = None


class Handle:
    """A submitted request: ``await handle``, ``handle.result()``, ``for delta in handle`` or ``async for``.

    All of them work in any thread and any event loop, and as often as one likes; each loop over the deltas begins at
    the first token. Whoever goes away takes the request along, and its memory is free within a step: a loop that is
    left early, a task that is cancelled, a wait that is interrupted, a handle that nobody refers to any more.
    """

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket

    @property
    def request_id(self) -> str:
        return self._ticket.request_id

    @property
    def outputs(self) -> list[RequestOutput]:
        """The outputs, one per sample, which fill up as the request runs."""
        return list(self._ticket.outputs)

    @property
    def done(self) -> bool:
        """Whether the request is over, in whatever way."""
        return self._ticket.is_over

    def cancel(self) -> None:
        """End the request with ``"abort"`` within a step; does nothing when it is over."""
        self._ticket.cancel()

    def add_done_callback(self, callback: Callable[[Handle], object]) -> None:
        """Have ``callback(handle)`` called when the request is over, or at once if it is.

        The engine's thread calls it, and every request waits meanwhile. Nothing else need refer to the handle.
        """
        call_at_end(self._ticket, lambda: callback(self))

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end; returns the output, of the first sample if there are several (see ``outputs``).

        timeout: seconds after which DeadlineExceeded is raised; the request goes on, and may be waited for again.
        Raises RequestFailed when it ended with ``"error"``, RequestRefused when a plugin refused it after it was
        submitted, EngineFailed when the engine's thread died. A request that was cancelled, or not done within its
        ``timeout_s``, is a result: its ``finish_reason`` says so. ConfigError for a ``timeout`` that is no number.
        """
        if timeout is not None:
            seconds = as_number(timeout)
            if math.isnan(seconds):
                raise ConfigError(f"timeout must be a number of seconds or None, got {describe(timeout)}")
            timeout = min(seconds, threading.TIMEOUT_MAX)
        ticket = self._ticket
        if not ticket.is_over:
            sleep_until(ticket, ticket.waiting_for_end, lambda: ticket.is_over, timeout)
        return self._outcome()

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        ticket = self._ticket
        if not ticket.is_over:
            yield from await_until(ticket, ticket.waiting_for_end, lambda: ticket.is_over).__await__()
        return self._outcome()

    def __iter__(self) -> DeltaStream:
        return DeltaStream(self)

    def __aiter__(self) -> DeltaStream:
        return DeltaStream(self)

    def __del__(self) -> None:
        self._ticket.cancel()

    def __repr__(self) -> str:
        outputs = ", ".join(f"{output.finish_reason or 'unfinished'}" for output in self._ticket.outputs)
        return f"Handle({self.request_id!r}, {outputs})"

    def _outcome(self) -> RequestOutput:
        if self._ticket.error is not None:
            raise self._ticket.error.with_traceback(None)
        output = self._ticket.outputs[0]
        if output.finish_reason == "error":
            raise _failure(output, output.error)
        return output


class DeltaStream:
    """The deltas of a request, as an iterator and an asynchronous iterator.

    Dropped, closed or cancelled before the end, it cancels the request. It raises what ``Handle.result`` would raise,
    after the deltas that came before; and RequestFailed, of this request alone, if its tokens cannot be decoded.
    """

    def __init__(self, handle: Handle) -> None:
        # A stream without its handle would be one without its request.
        self._handle = handle
        self._ticket = ticket = handle._ticket
        count = len(ticket.outputs)
        self._num_taken = [0] * count
        self._detokenizers: list[IncrementalDetokenizer | None] = [None] * count
        # The samples whose last delta is still to come, in the order of their turns.
        self._open = list(range(count))

    def __iter__(self) -> DeltaStream:
        return self

    def __next__(self) -> Delta:
        while (delta := self._take(StopIteration)) is None:
            sleep_until(self._ticket, self._ticket.waiting_for_news, self._has_news)
        return delta

    def __aiter__(self) -> DeltaStream:
        return self

    async def __anext__(self) -> Delta:
        while (delta := self._take(StopAsyncIteration)) is None:
            await await_until(self._ticket, self._ticket.waiting_for_news, self._has_news)
        return delta

    def close(self) -> None:
        """Cancel the request, unless it is over."""
        self._ticket.cancel()

    async def aclose(self) -> None:
        """Cancel the request, unless it is over."""
        self._ticket.cancel()

    def __del__(self) -> None:
        self._ticket.cancel()

    def _has_news(self) -> bool:
        ticket = self._ticket
        for index in self._open:
            if ticket.num_tokens[index] > self._num_taken[index] or ticket.ended[index]:
                return True
        return ticket.is_over

    def _take(self, end: type[Exception]) -> Delta | None:
        """A delta, None if none is there yet; after the last one it raises what went wrong, or ``end``."""
        ticket = self._ticket
        # Looked at first, for the thread that writes leaves the tokens before the error.
        error = ticket.error
        for index in self._open:
            # In this order: that thread sets the end last.
            ended, num_tokens = ticket.ended[index], ticket.num_tokens[index]
            if ended or num_tokens > self._num_taken[index]:
                self._open.remove(index)
                if not ended:
                    self._open.append(index)
                return self._delta(index, num_tokens, ended)
        if error is not None:
            raise error.with_traceback(None)
        if self._open:
            return None
        for output in ticket.outputs:
            if output.finish_reason == "error":
                raise _failure(output, output.error)
        raise end

    def _delta(self, index: int, num_tokens: int, ended: bool) -> Delta:
        ticket, output = self._ticket, self._ticket.outputs[index]
        token_ids = output.token_ids[self._num_taken[index] : num_tokens]
        self._num_taken[index] = num_tokens
        try:
            text = self._text(index, token_ids, ended) if ticket.tokenizer is not None else ""
        except Exception as error:
            ticket.cancel()
            raise _failure(output, error) from error
        return Delta(text, token_ids, index, output.finish_reason if ended else None)

    def _text(self, index: int, token_ids: list[int], ended: bool) -> str:
        detokenizer = self._detokenizers[index]
        if detokenizer is None:
            ticket = self._ticket
            detokenizer = IncrementalDetokenizer(ticket.tokenizer, ticket.stop, ticket.shown_special_tokens)
            self._detokenizers[index] = detokenizer
        if ended:
            self._detokenizers[index] = None
            return detokenizer.finish(self._ticket.outputs[index].text)
        return detokenizer.add(token_ids)


def _failure(output: RequestOutput, cause: Exception | None) -> RequestFailed:
    failure = RequestFailed(f"request {output.request_id} failed: {cause!r}")
    failure.output = output
    failure.__cause__ = cause
    return failure

"""BatchStreamer: the text of every row of a batch as it is generated."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from queue import Queue
from typing import Any, NamedTuple

from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from paged_backend import IncrementalDetokenizer


class RowText(NamedTuple):
    """A piece of one row's text; the pieces of a row join to its decoded tokens, special ones left out."""

    row: int
    text: str


class BatchStreamer(BaseStreamer):
    """A streamer for any number of rows, where transformers' own take one.

    Give it to ``generate`` and iterate over it in another thread, or override ``on_text``. Pieces never hold a part of
    a character.

    skip_prompt: leave the prompts out. eos_token_id: a row's text ends at one of these (default: the tokenizer's).
    With ``cache_impl="paged"`` it ends where the row does, whatever ended it. timeout: seconds that iterating waits for
    the next piece before it raises ``queue.Empty``; None waits until the stream ends.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        skip_prompt: bool = True,
        eos_token_id: int | Collection[int] | None = None,
        timeout: float | None = None,
    ) -> None:
        eos = tokenizer.eos_token_id if eos_token_id is None else eos_token_id
        self._eos_token_ids = {eos} if isinstance(eos, int) else set(eos or ())
        self._tokenizer = tokenizer
        self._skip_prompt = skip_prompt
        self._timeout = timeout
        self._rows: list[IncrementalDetokenizer | None] | None = None
        self._pieces: Queue[RowText | None] = Queue()

    def put(self, value: Tensor) -> None:
        """Take the prompts ([B, L]) first and then a token of each row ([B]), as ``generate`` calls it."""
        if self._rows is None:
            prompts = value.reshape(-1, value.shape[-1]).tolist()
            self._rows = [IncrementalDetokenizer(self._tokenizer) for _ in prompts]
            if not self._skip_prompt:
                for row, prompt in enumerate(prompts):
                    self._add(row, prompt)
            return
        for row, token in enumerate(value.tolist()):
            self._add(row, [token])
            if token in self._eos_token_ids:
                self.end_row(row)

    def _add(self, row: int, token_ids: list[int]) -> None:
        assert self._rows is not None
        detokenizer = self._rows[row]
        if detokenizer is not None:
            self._hand_out(row, detokenizer.add(token_ids))

    def end_row(self, row: int) -> None:
        """The row is finished: what comes after it is padding."""
        if self._rows is not None:
            detokenizer, self._rows[row] = self._rows[row], None
            if detokenizer is not None:
                self._hand_out(row, detokenizer.finish())

    def end(self) -> None:
        """End all rows and the iteration; the streamer is as new for the next call."""
        for row in range(len(self._rows or ())):
            self.end_row(row)
        self._rows = None
        self._pieces.put(None)

    def _hand_out(self, row: int, text: str) -> None:
        if text:
            self.on_text(row, text)

    def on_text(self, row: int, text: str) -> None:
        """Called with each piece; queues it for whoever iterates."""
        self._pieces.put(RowText(row, text))

    def __iter__(self) -> Iterator[RowText]:
        """The pieces of all rows in the order in which they come, until the stream ends."""
        while (piece := self._pieces.get(timeout=self._timeout)) is not None:
            yield piece

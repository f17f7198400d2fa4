"""When a row ends: stock's list of stopping criteria, told apart into what the engine knows and what is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from paged_backend.integrations.rows import Row


class Stops:
    """The stopping criteria of one call, and its streamer, both of which act after every token.

    eos_token_ids: those of the list's EosTokenCriteria.
    """

    def __init__(self, rows: Sequence[Row], criteria: StoppingCriteriaList, streamer: Any) -> None:
        self._rows = rows
        self._max_length = min(c.max_length for c in criteria if type(c) is MaxLengthCriteria)
        ends = [c for c in criteria if type(c) is EosTokenCriteria]
        self.eos_token_ids = sorted({token for c in ends for token in c.eos_token_id.reshape(-1).tolist()})
        self._called = StoppingCriteriaList(c for c in criteria if type(c) not in (MaxLengthCriteria, EosTokenCriteria))
        self._streamer = streamer
        self._num_streamed = 0
        # Without an end-of-sequence token stock has nothing to pad with: a finished row goes on until all are finished.
        self._ends_together = len(rows) > 1 and not any(hasattr(c, "eos_token_id") for c in criteria)
        self._ended: dict[int, int] = {}

    def max_new_tokens(self, num_prompt_tokens: int) -> int:
        """How many tokens follow a (padded) prompt at most; stock looks at the length after the first of them."""
        return max(1, self._max_length - num_prompt_tokens)

    def condition(self, row: Row) -> Callable[[Any], bool] | None:
        """What the engine calls after each token of ``row``, or None."""
        if not self._called and self._streamer is None:
            return None

        def ends(request: Any) -> bool:
            if self._streamer is not None:
                self._stream(request.output.token_ids)
            return bool(self._called) and self._ends(row, request)

        return ends

    def _ends(self, row: Row, request: Any) -> bool:
        shown = row.input_ids(torch.tensor([request.token_ids]))
        length = request.num_output_tokens
        if row.index not in self._ended and bool(self._called(shown, None)):
            self._ended[row.index] = length
        if not self._ends_together:
            return row.index in self._ended
        return len(self._ended) == len(self._rows) and length >= max(self._ended.values())

    def cut(self, tokens: list[list[int]]) -> list[list[int]]:
        """The tokens of all rows without what a row has drawn after the last one was finished."""
        if self._ends_together and len(self._ended) == len(self._rows):
            return [row[: max(self._ended.values())] for row in tokens]
        return tokens

    def _stream(self, token_ids: Sequence[int]) -> None:
        for token in token_ids[self._num_streamed :]:
            self._num_streamed += 1
            self._streamer.put(torch.tensor([token]))

    def finish_streaming(self, token_ids: Sequence[int]) -> None:
        """Hand on the last token, for which nothing was called when it is an end-of-sequence token."""
        self._stream(token_ids)
        self._streamer.end()

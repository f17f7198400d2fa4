"""Answer: what a row gets, in the columns that are put beside its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from paged_backend.integrations.ray.cells import objects
from paged_backend.outputs import RequestOutput


@dataclass(frozen=True)
class Answer:
    """One row's result. A column has one type whatever its rows hold, so that the blocks of a dataset fit together.

    text, token_ids: the output; empty where there is none.
    finish_reason: ``"stop"`` or ``"length"``, and ``"error"`` or ``"abort"`` where ``error`` says why.
    num_prompt_tokens: 0 for a row that was refused.
    time_to_first_token_s: seconds from when the row came to the engine, those it waited for others included; NaN where
        there is no token.
    error: the exception's name and message; empty where nothing went wrong.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = "error"
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    time_to_first_token_s: float = math.nan
    error: str = ""

    @classmethod
    def from_output(cls, output: RequestOutput, error: BaseException | None = None) -> Answer:
        """What a request that is over came to, and what ended it before its end."""
        reason = output.finish_reason or "abort"
        said = _said(error) if error is not None else ""
        if not said and reason not in ("stop", "length"):
            said = f"the request ended with {reason!r}: the engine was closed meanwhile"
        first = output.metrics.first_token_time
        return cls(
            text=output.text,
            token_ids=list(output.token_ids),
            finish_reason=reason,
            num_prompt_tokens=len(output.prompt_token_ids),
            num_output_tokens=len(output.token_ids),
            time_to_first_token_s=math.nan if first is None else first - output.metrics.arrival_time,
            error=said,
        )

    @classmethod
    def failed(cls, error: BaseException) -> Answer:
        """A row that has no output, and why."""
        return cls(error=_said(error))


COLUMNS = tuple(column.name for column in fields(Answer))
_TYPES: dict[str, type] = {
    "num_prompt_tokens": np.int64,
    "num_output_tokens": np.int64,
    "time_to_first_token_s": np.float64,
}


def columns(answers: Sequence[Answer]) -> dict[str, np.ndarray[Any, Any]]:
    """The answers as columns, [len(answers)] each: int64 and float64 for numbers, objects for the others."""
    found: dict[str, np.ndarray[Any, Any]] = {}
    for name in COLUMNS:
        values = [getattr(answer, name) for answer in answers]
        found[name] = np.array(values, dtype=_TYPES[name]) if name in _TYPES else objects(values)
    return found


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"

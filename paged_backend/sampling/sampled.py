"""Sampled: the tokens that a step chose."""

from __future__ import annotations

from typing import NamedTuple


class Sampled(NamedTuple):
    """One entry per request: its token or why it has none, and its logprobs by token id (None unless asked for).

    Logprobs hold the token itself first, then the likeliest tokens, likeliest first, without those that cannot come up.
    """

    tokens: list[int | Exception]
    logprobs: list[dict[int, float] | None]

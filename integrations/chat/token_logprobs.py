"""TokenLogprobs: the log probabilities of an output's tokens, in OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paged_backend.integrations.chat.token_bytes import TokenBytes


class TokenLogprobs:
    """Takes the tokens of one output as they come.

    num_top: how many of the likeliest tokens an entry tells; by default all that were asked for, and the token itself.
    """

    def __init__(self, tokenizer: Any, num_top: int | None = None) -> None:
        from paged_backend import tokenizer_lock

        self._lock = tokenizer_lock(tokenizer)
        self._num_top = num_top
        self._is_first = True
        with self._lock:
            self._spell = TokenBytes(tokenizer)

    def entries(self, token_ids: Sequence[int], logprobs: Sequence[Mapping[int, float]]) -> list[dict[str, Any]]:
        """One for each of the next tokens: the token, and the likeliest ones in its place.

        logprobs: of these tokens, as a RequestOutput holds them.
        """
        entries = []
        with self._lock:
            for token_id, top in zip(token_ids, logprobs, strict=True):
                likeliest = sorted(top.items(), key=lambda item: -item[1])[: self._num_top]
                told = [self._entry(*other) for other in likeliest]
                entries.append({**self._entry(token_id, top[token_id]), "top_logprobs": told})
                self._is_first = self._is_first and token_id in self._spell.special_ids
        return entries

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        spelt = self._spell(token_id, is_first=self._is_first)
        return {"token": spelt.decode(errors="replace"), "bytes": list(spelt), "logprob": logprob}

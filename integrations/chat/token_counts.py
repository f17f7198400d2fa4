"""How many of an output's tokens a part of its text has."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paged_backend import RequestOutput


def num_tokens_of(part: str, output: RequestOutput, tokenizer: Any) -> int:
    """How many of an output's tokens spell this part of its text."""
    from paged_backend import tokenizer_lock

    token_ids, decode = output.token_ids, output.decode
    assert decode is not None, "an output with a text has tokens that were decoded"

    def length(count: int) -> int:
        # A part of a character is none yet.
        return len(decode(token_ids[:count]).rstrip("\ufffd"))

    with tokenizer_lock(tokenizer):
        start = decode(token_ids).find(part)
        if start < 0:
            # Put together from several places.
            return min(len(token_ids), len(tokenizer.encode(part, add_special_tokens=False)))
        counts = range(len(token_ids) + 1)
        first, last = (bisect_left(counts, place, key=length) for place in (start, start + len(part)))
        # Special tokens in front are no part of the text.
        while token_ids[first] in tokenizer.all_special_ids:
            first += 1
        return min(last, len(token_ids)) - first

"""StopStrings: finds texts in a growing output, wherever tokens split them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"


class StopStrings:
    """Looks for texts in a growing output, wherever tokens split them; only its last tokens are decoded each time.

    What begins within the text of the first ``min_tokens`` tokens is passed over, so that this text is never cut.
    """

    def __init__(self, stop: Sequence[str], decode: Callable[[Sequence[int]], str], min_tokens: int = 0) -> None:
        self._stop = stop
        self._decode = decode
        self._min_tokens = min_tokens
        self._longest = max(map(len, stop))
        self._kept_tokens = self._longest + 8
        self._max_tokens = 2 * self._kept_tokens
        # The window: the tokens from a place on, and their text when there were so many tokens.
        self._start = 0
        self._num_tokens = 0
        self._text = ""

    def find(self, token_ids: Sequence[int]) -> tuple[str, int, int] | None:
        """The text of ``token_ids``, and where in it the stop string that the last token completed begins and ends.

        None if it completed none; the one that begins first if several.
        """
        before = self._text
        if self._num_tokens != len(token_ids) - 1:
            before = self._decode(token_ids[self._start : -1])
        text = self._decode(token_ids[self._start :])
        self._num_tokens, self._text = len(token_ids), text
        found = self._search(before, text)
        if found is not None and (self._start > 0 or self._min_tokens):
            text = self._decode(token_ids)
            found = self._search(self._decode(token_ids[:-1]), text, self._end_of_least(token_ids, text))
        if found is not None:
            return text, *found
        if len(token_ids) - self._start > self._max_tokens:
            self._cut_window(token_ids)
        return None

    def _end_of_least(self, token_ids: Sequence[int], text: str) -> int:
        """Where in ``text`` what the first ``min_tokens`` tokens spelt ends, the character that they began included."""
        if not self._min_tokens:
            return 0
        least = self._decode(token_ids[: self._min_tokens])
        end = _unchanged(least, text)
        return end + least[end:].startswith(_REPLACEMENT)

    def _search(self, before: str, text: str, first: int = 0) -> tuple[int, int] | None:
        # The last token may also have changed the end of what was there: half a character, a space before a comma.
        unchanged = _unchanged(before, text)
        starts = [(text.find(stop, max(first, unchanged - len(stop) + 1)), stop) for stop in self._stop]
        return min(((start, start + len(stop)) for start, stop in starts if start >= 0), default=None)

    def _cut_window(self, token_ids: Sequence[int]) -> None:
        # A window that begins within a character may garble others too, hence the four places.
        for start in range(len(token_ids) - self._kept_tokens, len(token_ids) - self._kept_tokens - 4, -1):
            text = self._decode(token_ids[start:])
            # Long enough that whatever begins before it was complete, and so found, by now. Replacements do not count,
            # for several may yet become one character.
            is_long = len(text) - text.count(_REPLACEMENT) >= self._longest
            if is_long and not text.startswith(_REPLACEMENT) and self._text.endswith(text):
                self._start, self._text, self._max_tokens = start, text, 2 * self._kept_tokens
                return
        self._max_tokens = 2 * (len(token_ids) - self._start)


def _unchanged(before: str, after: str) -> int:
    """How many characters both texts begin with."""
    count = len(before)
    while not after.startswith(before[:count]):
        count -= 1
    return count

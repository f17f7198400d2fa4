"""Whether a request ends with the token that it just got."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from paged_backend.errors import RequestRefused
from paged_backend.sampling.detokenizer import special_tokens
from paged_backend.sampling.sampling_state import SamplingState

if TYPE_CHECKING:
    from paged_backend.request.request import FinishReason, Request
    from paged_backend.sampling_params import SamplingParams

_REPLACEMENT = "\ufffd"


def check_stop(params: SamplingParams, tokenizer: Any) -> None:
    """Raise RequestRefused if texts in ``params`` could not be found: special tokens, or any without a tokenizer."""
    if params.shown_special_tokens and tokenizer is None:
        raise RequestRefused(
            f"shown_special_tokens={params.shown_special_tokens!r} needs a tokenizer; give the engine one"
        )
    for text in params.stop:
        if tokenizer is None:
            raise RequestRefused(f"stop={text!r} needs a tokenizer; give the engine one, or use stop_token_ids")
        for token, special in special_tokens(tokenizer).items():
            if special in text and special not in params.shown_special_tokens:
                raise RequestRefused(
                    f"stop={text!r} can never come up: special tokens are no part of the text; "
                    f"put the id of {special!r}, {token}, into stop_token_ids"
                )
    for word in params.bad_words:
        if isinstance(word, str) and tokenizer is None:
            raise RequestRefused(f"bad_words={word!r} needs a tokenizer; give the engine one, or give token ids")


def eos_token_ids_of(model: Any) -> frozenset[int]:
    """The tokens that end a text, from the model's generation config or its config."""
    for holder in (getattr(model, "generation_config", None), getattr(model, "config", None)):
        value = getattr(holder, "eos_token_id", None)
        if value is not None:
            return frozenset(value if isinstance(value, (list, tuple)) else [value])
    return frozenset()


def finish_reason(request: Request, token: int, eos_token_ids: Collection[int]) -> FinishReason | None:
    """Why ``request`` ends with ``token``, its last one, or None if it goes on.

    ``"stop"``: an end-of-sequence token (unless ignore_eos) or a stop token, neither before min_tokens, a stop string
    that lies in the text behind min_tokens, or the request's own ``stop_condition``, whose exceptions are raised to the
    caller. ``"length"``: max_tokens. All tokens stay in ``output.token_ids``, as in vLLM; ``output.final_text`` is the
    text before a stop string or a stop token, or with it if include_stop_str_in_output.
    """
    params = request.params
    num_output_tokens = request.num_output_tokens
    if num_output_tokens >= params.min_tokens:
        is_eos = token in eos_token_ids and not params.ignore_eos
        if is_eos or token in params.stop_token_ids:
            decode = request.output.decode
            # An end-of-sequence token is in no text anyway, unless it is among those that are shown.
            is_cut = bool(params.shown_special_tokens) if is_eos else not params.include_stop_str_in_output
            if decode is not None and is_cut:
                request.output.final_text = decode(request.output.token_ids[:-1])
            return "stop"
        if params.stop and num_output_tokens > params.min_tokens and _found_stop_string(request):
            return "stop"
    if request.stop_condition is not None and request.stop_condition(request):
        return "stop"
    return "length" if num_output_tokens >= params.max_tokens else None


def _found_stop_string(request: Request) -> bool:
    state = SamplingState.of(request)
    if state.stop_strings is None:
        assert request.output.decode is not None, "stop strings were not checked for a tokenizer"
        state.stop_strings = StopStrings(request.params.stop, request.output.decode, request.params.min_tokens)
    found = state.stop_strings.find(request.output.token_ids)
    if found is not None:
        text, start, end = found
        request.output.final_text = text[: end if request.params.include_stop_str_in_output else start]
    return found is not None


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

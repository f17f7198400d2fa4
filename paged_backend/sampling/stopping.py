"""Whether a request ends with the token that it just got."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from paged_backend.errors import RequestRefused
from paged_backend.outputs import FinishReason
from paged_backend.request.request import Request
from paged_backend.sampling.detokenizer import special_tokens
from paged_backend.sampling.sampling_state import SamplingState
from paged_backend.sampling.stop_strings import StopStrings
from paged_backend.sampling_params import SamplingParams


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
    text before a stop string or a stop token, or with it if include_stop_str_in_output, and ``output.stop_reason`` says
    which of them it was.
    """
    params = request.params
    num_output_tokens = request.num_output_tokens
    if num_output_tokens >= params.min_tokens:
        is_eos = token in eos_token_ids and not params.ignore_eos
        if is_eos or token in params.stop_token_ids:
            request.output.stop_reason = None if is_eos else token
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
        request.output.stop_reason = text[start:end]
        request.output.final_text = text[: end if request.params.include_stop_str_in_output else start]
    return found is not None

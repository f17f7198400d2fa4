"""Constraint: which tokens may come next in an output that must match a JSON schema, a regex or a grammar."""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paged_backend.errors import RequestRefused, SamplingFailed
from paged_backend.sampling.detokenizer import tokenizer_lock
from paged_backend.sampling_params import SamplingParams

# As json.dumps writes it, which is how chat templates show JSON to a model. Free white space would let a model that has
# nothing to say write it for ever.
_THEIR_ADVICE = "Enable 'coerce_one_of' option to approximate oneOf with anyOf"
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def check_constraint(params: SamplingParams, tokenizer: Any) -> None:
    """Raise RequestRefused if what ``params`` ask the output to match cannot be followed, and say why."""
    if not params.is_constrained:
        return
    if tokenizer is None:
        raise RequestRefused("json_schema, regex and grammar need a tokenizer; give the engine one")
    llguidance = _library()
    problem = llguidance.LLMatcher.validate_grammar(_grammar(params), _library_tokenizer(tokenizer, (), 0))
    if problem:
        # It names an option of its own; what the caller can change is the schema.
        problem = problem.replace(_THEIR_ADVICE, "Write anyOf instead, if more than one of them may hold")
        raise RequestRefused(f"{_named(params)} cannot be followed: {problem.strip()}")


class Constraint:
    """Follows one output, token by token, through llguidance (https://github.com/guidance-ai/llguidance).

    Until the output matches, the tokens that can still lead to a match are allowed; an end-of-sequence token is once it
    does, and is the only one when nothing could follow.
    """

    def __init__(self, params: SamplingParams, tokenizer: Any, eos_token_ids: Collection[int], vocab_size: int) -> None:
        if not eos_token_ids:
            raise SamplingFailed(f"{_named(params)} needs a model with an end-of-sequence token, to end the output")
        eos = tuple(sorted(eos_token_ids))
        wrapped = _library_tokenizer(tokenizer, eos, vocab_size)
        self._eos = list(eos)
        self._matcher = _library().LLMatcher(wrapped, _grammar(params), log_level=0)
        self._num_tokens = 0

    def apply(self, scores: Tensor, output_token_ids: Sequence[int]) -> None:
        """Set the ``scores`` ([V]) of tokens that must not come next to -inf, in place.

        Raises SamplingFailed when the tokens so far do not fit, or when following them takes too much.
        """
        new, self._num_tokens = list(output_token_ids[self._num_tokens :]), len(output_token_ids)
        if new and not self._matcher.consume_tokens(new):
            raise SamplingFailed(f"the output cannot be made to match: {_first_line(self._matcher.get_error())}")
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise SamplingFailed(f"the output cannot be made to match: {_first_line(self._matcher.get_error())}")
        allowed = torch.from_numpy(np.unpackbits(bits, bitorder="little", count=len(scores)).view(np.bool_))
        scores.masked_fill_(~allowed.to(scores.device), -torch.inf)


def _grammar(params: SamplingParams) -> str:
    matcher = _library().LLMatcher
    if params.json_schema is not None:
        try:
            grammar: str = matcher.grammar_from_json_schema(json.dumps(params.json_schema), _JSON_STYLE)
        except ValueError as error:
            raise RequestRefused(f"json_schema cannot be followed: {error}") from error
    elif params.regex is not None:
        grammar = matcher.grammar_from_regex(params.regex)
    else:
        grammar = matcher.grammar_from_lark(params.grammar)
    return grammar


def _named(params: SamplingParams) -> str:
    names = ("json_schema", "regex", "grammar")
    return next(f"{name}={getattr(params, name)!r:.200}" for name in names if getattr(params, name) is not None)


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "no reason given"


def _library() -> Any:
    try:
        import llguidance.hf
    except ImportError as error:
        raise RequestRefused(
            "json_schema, regex and grammar need llguidance; install paged-backend[structured]"
        ) from error
    return llguidance


_tokenizers: weakref.WeakKeyDictionary[Any, dict[tuple[tuple[int, ...], int], Any]] = weakref.WeakKeyDictionary()
_tokenizers_lock = threading.Lock()


def _after_fork() -> None:
    # A thread that the child does not have may have held it.
    global _tokenizers_lock
    _tokenizers_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _library_tokenizer(tokenizer: Any, eos_token_ids: tuple[int, ...], vocab_size: int) -> Any:
    """What llguidance makes of a tokenizer, which takes it up to a second, so it is kept.

    No end-of-sequence tokens stand for any: grammars are checked before a model is asked.
    """
    with _tokenizers_lock:
        known = _tokenizers.setdefault(tokenizer, {})
        if not eos_token_ids and known:
            return next(iter(known.values()))
        key = (eos_token_ids, vocab_size)
        if key not in known:
            with tokenizer_lock(tokenizer):
                try:
                    known[key] = _library().hf.from_tokenizer(
                        tokenizer, n_vocab=max(vocab_size, len(tokenizer)), eos_token=list(eos_token_ids) or None
                    )
                except ValueError as error:
                    raise RequestRefused(
                        f"json_schema, regex and grammar cannot be used with {type(tokenizer).__name__}: {error}"
                    ) from error
        return known[key]

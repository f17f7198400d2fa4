"""SamplingParams: how the tokens of one request are chosen and when it ends, checked once."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from paged_backend.checks import checked_flag, checked_int, checked_number, describe
from paged_backend.errors import ConfigError, RequestRefused

# Of tensors, but torch takes seconds to import, which nothing else here needs.
LogitsProcessor = Callable[[Any, Any], Any]

LOGPROBS_MODES = ("raw", "processed")
MAX_COUNT = 2**31 - 1
MAX_N = 16384
# Factors outside this range would turn ordinary float32 logits into infinities or zeros.
MIN_FACTOR, MAX_FACTOR = 1e-5, 1e5

_INTS = {
    "max_tokens": (1, MAX_COUNT),
    "min_tokens": (0, MAX_COUNT),
    "top_k": (-1, MAX_COUNT),
    "seed": (-(2**63), 2**64 - 1),
    "n": (1, MAX_N),
    "logprobs": (0, MAX_COUNT),
}
_OPTIONAL = ("seed", "logprobs")
_FLOATS = {
    "temperature": (0.0, MAX_FACTOR),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (MIN_FACTOR, MAX_FACTOR),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen. Names and meanings follow vLLM; ``SamplingParams()`` is greedy.

    A value that cannot be used raises ConfigError here, naming the field, the value and what is allowed.

    max_tokens: output tokens after which the request ends with ``"length"``; finite by default. A request that could
        never have so many is refused, whereas ``params=None`` asks for as many as fit, up to the default.
    min_tokens: output tokens before which no end-of-sequence token, stop token or stop string ends the request. The
        tokens cannot be drawn until then; a stop string counts only where the text behind these tokens holds the whole
        of it, so one that begins before, even if it is completed after, is passed over and stays in the text.
    temperature: 0 is greedy (the default, as stock ``generate``; vLLM's default is 1), else 1e-5 to 1e5. The same
        request at 0 needs no random numbers, and ``top_p``, ``top_k`` and ``min_p`` have no effect on it.
    top_p: keep the likeliest tokens whose probabilities come to at least this much; above 0, 1 is off.
    top_k: keep this many of the likeliest tokens; 0 or -1 is off.
    min_p: keep tokens at least this times as likely as the likeliest; 0 is off.
    repetition_penalty: logits of tokens that the prompt or the output holds are divided by it where positive and
        multiplied where negative (CTRL, arXiv:1909.05858; as in transformers); 1 is off.
    presence_penalty, frequency_penalty: subtracted from the logits of tokens that the output holds, once or as often as
        it holds them (as OpenAI defines them); -2 to 2, 0 is off.
    logit_bias: added to the logits of these token ids; ``-math.inf`` bans one.
    bad_words: texts, or sequences of token ids, that must not come up. A text needs a tokenizer, and is banned in the
        spellings it has at the start of a text and after a space.
    stop: texts that end the request, wherever tokens split them; needs a tokenizer. They are cut off the text unless
        ``include_stop_str_in_output``; the token ids keep the tokens that spelt them.
    stop_token_ids: further tokens that end the request as the end-of-sequence token does.
    shown_special_tokens: special tokens, by their texts, that are part of the output's text; the others are left out of
        it, and so is an end-of-sequence token that ends it. Such are the marks of tool calls in many models. Needs a
        tokenizer; texts that are no special tokens of it change nothing.
    ignore_eos: go on after the end-of-sequence token.
    seed: start of the request's own random stream, -2**63 to 2**64 - 1: the same stream whatever runs beside it. None
        derives one from the engine's seed and the order of arrival.
    n: how many outputs to draw for the prompt; they differ only when ``temperature`` is above 0.
    logprobs: for each output token, natural logarithms of the probabilities of this many likeliest tokens and of the
        token itself; 0 is the token alone, None is none.
    logprobs_mode: ``"raw"`` takes them from the model's logits, ``"processed"`` from what the token was drawn from.
    json_schema, regex, grammar: what the output's text must match, at most one of them: a JSON schema (a mapping, its
        JSON text, or a pydantic class), a regular expression, or a grammar in llguidance's Lark dialect. Tokens that
        could not lead there cannot be drawn. JSON is written on one line, as json.dumps does. Cut off by ``max_tokens``
        the output matches the beginning. Needs a tokenizer, an end-of-sequence token, and the extra ``structured``.
    logits_processors: callables ``(input_ids [1, L] int64, scores [1, V] float32) -> scores [1, V]``, called in order
        for this request alone after the penalties and before temperature. An exception fails this request alone.
        With ``n`` above 1 its samples share them, so they must keep no state of one sequence.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str | Sequence[int]] = ()
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    shown_special_tokens: Sequence[str] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    logprobs_mode: Literal["raw", "processed"] = "raw"
    json_schema: Mapping[str, Any] | str | type | None = None
    regex: str | None = None
    grammar: str | None = None
    logits_processors: Sequence[LogitsProcessor] = ()

    def __post_init__(self) -> None:
        for name, (low, high) in _INTS.items():
            if getattr(self, name) is not None or name not in _OPTIONAL:
                self._replace(name, checked_int(name, getattr(self, name), low, high))
        for name, (least, most) in _FLOATS.items():
            self._replace(name, checked_number(name, getattr(self, name), least, most))
        if 0 < self.temperature < MIN_FACTOR:
            raise ConfigError(f"temperature must be 0 for greedy or at least {MIN_FACTOR}, got {self.temperature}")
        if self.top_p == 0:
            raise ConfigError("top_p must be above 0, got 0; temperature=0 is greedy")
        if self.min_tokens > self.max_tokens:
            raise ConfigError(f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}; lower it")
        for name in ("ignore_eos", "include_stop_str_in_output"):
            checked_flag(name, getattr(self, name))
        if self.logprobs_mode not in LOGPROBS_MODES:
            raise ConfigError(
                f"logprobs_mode={self.logprobs_mode!r} is unknown; choose from {', '.join(LOGPROBS_MODES)}"
            )
        # Collections are copied, so that a list changed by its owner changes no request that runs.
        self._replace("logit_bias", None if self.logit_bias is None else _checked_bias(self.logit_bias))
        self._replace("bad_words", _checked_bad_words(self.bad_words))
        self._replace("stop", _checked_texts("stop", self.stop))
        self._replace("stop_token_ids", _checked_token_ids("stop_token_ids", self.stop_token_ids))
        self._replace("shown_special_tokens", _checked_texts("shown_special_tokens", self.shown_special_tokens))
        if self.json_schema is not None:
            self._replace("json_schema", _checked_schema(self.json_schema))
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None and not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name} must be a text or None, got {describe(getattr(self, name))}")
        if sum(value is not None for value in (self.json_schema, self.regex, self.grammar)) > 1:
            raise ConfigError("json_schema, regex and grammar exclude each other; give one of them")
        if self.is_constrained and self.ignore_eos:
            raise ConfigError("ignore_eos=True cannot go with json_schema, regex or grammar, which end the output")
        processors = _as_tuple("logits_processors", self.logits_processors, "callables")
        for processor in processors:
            if not callable(processor):
                raise ConfigError(
                    f"logits_processors must hold callables (input_ids, scores) -> scores, got {processor!r}"
                )
        self._replace("logits_processors", processors)

    def _replace(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @cached_property
    def is_greedy(self) -> bool:
        """The likeliest token is taken, without random numbers."""
        return self.temperature == 0

    @cached_property
    def has_penalties(self) -> bool:
        """Tokens seen so far change the scores."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @cached_property
    def is_constrained(self) -> bool:
        """The output has to match something."""
        return self.json_schema is not None or self.regex is not None or self.grammar is not None

    @cached_property
    def changes_logits(self) -> bool:
        """Something other than temperature, top_k, top_p and min_p stands between the logits and the choice."""
        return bool(
            self.has_penalties
            or self.min_tokens
            or self.logit_bias
            or self.bad_words
            or self.logits_processors
            or self.is_constrained
        )

    @cached_property
    def is_plain_greedy(self) -> bool:
        """The token is the argmax of the model's logits, and nothing else is asked for."""
        return self.is_greedy and not self.changes_logits and self.logprobs is None

    def validate_for(self, vocab_size: int) -> None:
        """Raise RequestRefused if a token id or a count does not exist in a vocabulary of ``vocab_size`` tokens."""
        token_ids = [("logit_bias", token) for token in self.logit_bias or ()]
        token_ids += [("stop_token_ids", token) for token in self.stop_token_ids]
        token_ids += [("bad_words", token) for word in self.bad_words if not isinstance(word, str) for token in word]
        for name, token in token_ids:
            if token >= vocab_size:
                raise RequestRefused(f"{name} names token {token}; the model has token ids 0 to {vocab_size - 1}")
        if self.logprobs is not None and self.logprobs > vocab_size:
            raise RequestRefused(f"logprobs={self.logprobs} is more than the vocabulary's {vocab_size} tokens")


def _as_tuple(name: str, value: Any, of: str) -> tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping)):
        raise ConfigError(f"{name} must be a sequence of {of}, got {describe(value)}")
    return tuple(value)


def _checked_token_ids(name: str, value: Any) -> tuple[int, ...]:
    return tuple(
        checked_int(f"a token id of {name}", token, 0, MAX_COUNT) for token in _as_tuple(name, value, "token ids")
    )


def _checked_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"logit_bias must map token ids to numbers, got {describe(value)}")
    return {
        token: -math.inf if bias == -math.inf else checked_number(f"logit_bias[{token}]", bias, -MAX_FACTOR, MAX_FACTOR)
        for token, bias in zip(_checked_token_ids("logit_bias", value.keys()), value.values(), strict=True)
    }


def _checked_schema(value: Any) -> dict[str, Any]:
    if isinstance(value, type) and hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    try:
        # A copy that shares nothing with its owner's.
        schema = json.loads(value if isinstance(value, str) else json.dumps(value))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"json_schema must be a JSON schema, got {describe(value)}: {error}") from error
    if not isinstance(schema, dict):
        raise ConfigError(f"json_schema must be a mapping, its JSON text or a pydantic class, got {describe(value)}")
    return schema


def _checked_bad_words(value: Any) -> tuple[str | tuple[int, ...], ...]:
    words: list[str | tuple[int, ...]] = []
    for word in _as_tuple("bad_words", value, "texts or sequences of token ids"):
        checked = word if isinstance(word, str) else _checked_token_ids("bad_words", word)
        if not (checked.strip() if isinstance(checked, str) else checked):
            raise ConfigError(f"bad_words must not hold an empty one, got {describe(word)}")
        words.append(checked)
    return tuple(words)


def _checked_texts(name: str, value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else _as_tuple(name, value, "texts")
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ConfigError(f"{name} must be a text or a sequence of texts, none of them empty, got {describe(text)}")
    return texts

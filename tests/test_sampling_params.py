"""SamplingParams: defaults, and every value that it refuses."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from paged_backend.errors import ConfigError, PagedBackendError, RequestRefused
from paged_backend.sampling_params import SamplingParams

NAN, INF = math.nan, math.inf

REFUSED = {
    "max_tokens": [0, -1, 1.0, True, None, "5", NAN, 2**31],
    "min_tokens": [-1, 1.5, False, None, 2**40],
    "temperature": [-0.1, 1e-9, 1e6, NAN, INF, True, "1", None, [1.0]],
    "top_p": [0, 0.0, -0.5, 1.0001, NAN, True, None, "0.9"],
    "top_k": [-2, 2.0, True, None, 2**31, NAN],
    "min_p": [-0.01, 1.01, NAN, None, True],
    "repetition_penalty": [0, -1.0, NAN, INF, 1e-6, 1e6, None, True],
    "presence_penalty": [-2.1, 2.1, NAN, INF, None, True],
    "frequency_penalty": [-2.1, 2.1, NAN, -INF, None, False],
    "logit_bias": [[1], {-1: 0.0}, {1.5: 0.0}, {True: 1.0}, {1: NAN}, {1: INF}, {1: 1e6}, {1: "1"}, {1: True}, "1"],
    "bad_words": ["word", [""], ["  "], [[]], [[-1]], [[1.0]], [3], {"a": 1}],
    "stop": ["", [""], [1], 5, {"a": 1}, b"x", ["a", None]],
    "stop_token_ids": [[-1], [1.0], [True], 5, "1", [None]],
    "shown_special_tokens": ["", [""], [1], 5, {"a": 1}],
    "ignore_eos": [1, None, "yes"],
    "include_stop_str_in_output": [0, None],
    "seed": [1.0, True, "1", 2**64, -(2**63) - 1],
    "n": [0, -1, 1.0, True, None, 10**9],
    "logprobs": [-1, 1.0, True, "5"],
    "logprobs_mode": ["both", None, [], True],
    "json_schema": [5, [1], "{", "[]", {"a": object()}, int],
    "regex": [5, b"a", ["a"]],
    "grammar": [5, b"a", ["a"]],
    "logits_processors": [[1], 3, "x", [None]],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in REFUSED for value in REFUSED[name]])
def test_a_value_that_cannot_be_used_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        SamplingParams(**{name: value})


def test_every_field_has_values_that_are_refused() -> None:
    assert set(REFUSED) == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize("name", ["max_tokens", "top_p", "seed", "logprobs_mode", "ignore_eos", "repetition_penalty"])
def test_a_refusal_names_the_value_and_what_is_allowed(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**{name: "sideways"})
    assert "'sideways'" in str(caught.value)
    assert any(word in str(caught.value) for word in ("from", "choose", "True or False"))


def test_more_min_tokens_than_max_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match="min_tokens=5 is above max_tokens=4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_a_refusal_is_a_value_error_and_one_of_the_package() -> None:
    with pytest.raises(ValueError, match="n must be") as caught:
        SamplingParams(n=0)
    assert isinstance(caught.value, PagedBackendError)


def test_defaults_are_greedy_and_finite() -> None:
    params = SamplingParams()
    assert params.is_greedy
    assert params.is_plain_greedy
    assert params.max_tokens == 256


@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"logit_bias": {3: 0.0}},
        {"bad_words": ["x"]},
        {"min_tokens": 1},
        {"logprobs": 0},
        {"logits_processors": [lambda input_ids, scores: scores]},
        {"temperature": 0.5},
    ],
)
def test_whatever_needs_more_than_an_argmax_is_not_plain_greedy(changes: dict) -> None:
    assert not SamplingParams(**changes).is_plain_greedy


def test_numbers_of_numpy_become_plain_numbers() -> None:
    params = SamplingParams(
        max_tokens=np.int64(7), seed=np.int32(-3), temperature=np.float32(0.5), stop_token_ids=np.array([1, 2])
    )
    assert type(params.max_tokens) is int
    assert type(params.seed) is int
    assert type(params.temperature) is float
    assert params.stop_token_ids == (1, 2)
    assert type(params.stop_token_ids[0]) is int


def test_one_stop_text_may_stand_alone() -> None:
    assert SamplingParams(stop="\n").stop == ("\n",)
    assert SamplingParams(stop=None).stop == ()


def test_collections_are_copied() -> None:
    stop, bias = ["a"], {1: 2.0}
    params = SamplingParams(stop=stop, logit_bias=bias)
    stop.append("b")
    bias[2] = 3.0
    assert params.stop == ("a",)
    assert params.logit_bias == {1: 2.0}


def test_a_token_may_be_banned_by_an_infinite_bias() -> None:
    assert SamplingParams(logit_bias={4: -INF}).logit_bias == {4: -INF}


@pytest.mark.parametrize(
    ("name", "value"),
    [("logit_bias", {10: 1.0}), ("stop_token_ids", [3, 10]), ("bad_words", [[1, 10]]), ("logprobs", 11)],
)
def test_what_a_vocabulary_lacks_is_refused(name: str, value: object) -> None:
    params = SamplingParams(**{name: value})
    params.validate_for(vocab_size=11)
    with pytest.raises(RequestRefused, match=name):
        params.validate_for(vocab_size=10)


def test_replace_checks_again() -> None:
    with pytest.raises(ConfigError, match="top_k"):
        dataclasses.replace(SamplingParams(), top_k=-5)

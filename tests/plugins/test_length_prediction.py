"""Predicting output lengths."""

from __future__ import annotations

import pytest

from paged_backend.errors import ConfigError
from paged_backend.plugins import length_prediction
from paged_backend.plugins.length_prediction import RemainingTokens, RunningQuantile, max_tokens, predictor
from paged_backend.request.request import Request
from paged_backend.sampling_params import SamplingParams


def finished(client: str | None, num_tokens: int, reason: str = "stop", prompt: int = 2):
    request = Request("r", [1] * prompt, SamplingParams(max_tokens=100), 0.0, 0, client_id=client)
    for _ in range(num_tokens):
        request.append_token(1)
    request.output.finish_reason = reason
    return request.view


def waiting(client: str | None, limit: int = 100, prompt: int = 2, generated: int = 0):
    request = Request("w", [1] * prompt, SamplingParams(max_tokens=limit), 0.0, 1, client_id=client)
    for _ in range(generated):
        request.append_token(1)
    return request.view


def test_running_quantile_learns_per_client():
    predict = RunningQuantile(quantile=0.5, window=5)
    assert predict(waiting("a")) == 100
    for length in (1, 1, 1, 10, 20, 30, 40, 50):
        predict.observe(finished("a", length))
    predict.observe(finished("b", 3))
    assert predict(waiting("a")) == 30
    assert predict(waiting("a", limit=7)) == 7
    assert predict(waiting("b")) == 3


def test_prompts_of_like_length_count_once_there_are_enough():
    predict = RunningQuantile()
    for prompt, length in ((10, 5), (500, 60)):
        for _ in range(3):
            predict.observe(finished("a", length, prompt=prompt))
    assert predict(waiting("a", prompt=500)) == predict(waiting("a", prompt=10))
    for prompt, length in ((10, 5), (500, 60)):
        predict.observe(finished("a", length, prompt=prompt))
    assert predict(waiting("a", prompt=11)) == 5
    assert predict(waiting("a", prompt=480)) == 60
    assert predict(waiting("b", prompt=500)) == 100


def test_where_most_run_into_max_tokens_that_is_the_answer():
    predict = RunningQuantile()
    for length, reason in ((10, "length"), (10, "length"), (4, "stop")):
        predict.observe(finished("a", length, reason))
    assert predict(waiting("a", limit=80)) == 80
    for _ in range(3):
        predict.observe(finished("a", 4))
    assert predict(waiting("a", limit=80)) == 4


def test_what_has_generated_tokens_is_compared_with_longer_ones_alone():
    predict = RunningQuantile()
    for length in (2, 3, 4, 30):
        predict.observe(finished("a", length))
    assert predict(waiting("a", generated=5)) == 30
    assert predict(waiting("a", generated=40)) == 80
    assert predict(waiting("a", generated=70)) == 100


def test_what_was_cut_off_teaches_nothing():
    predict = RunningQuantile()
    for reason in ("abort", "timeout", "error"):
        predict.observe(finished("a", 1, reason))
    assert predict(waiting("a")) == 100


def test_clients_beyond_the_limit_are_forgotten(monkeypatch):
    monkeypatch.setattr(length_prediction, "MAX_CLIENTS", 2)
    predict = RunningQuantile()
    for client in "abc":
        predict.observe(finished(client, 5))
    assert [predict(waiting(client)) for client in "abc"] == [100, 5, 5]


def test_remaining_tokens_count_the_prompt_and_never_come_to_nothing():
    remaining = RemainingTokens(lambda request: 4)
    assert remaining(waiting("a")) == 6
    assert remaining.output(finished("a", 50)) == 1


def test_predictors_are_chosen_by_name_or_passed():
    assert predictor("max_tokens") is max_tokens
    assert isinstance(predictor("quantile"), RunningQuantile)
    with pytest.raises(ConfigError, match="quantile"):
        predictor("magic")
    with pytest.raises(ConfigError):
        predictor(5)

"""What the decoding loop asks an engine for, and what it makes of the engine's answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process as processors
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from paged_backend.errors import ContextOverflow, EngineClosed, SamplingFailed, UnsupportedCall
from paged_backend.integrations.huggingface import decoding
from paged_backend.integrations.huggingface.call import GenerateCall
from paged_backend.integrations.huggingface.loop import RowLost
from paged_backend.outputs import RequestMetrics, RequestOutput

IDS = torch.tensor([[0, 0, 5], [6, 7, 8]])
MASK = torch.tensor([[0, 0, 1], [1, 1, 1]])
VOCAB_SIZE = 100

Answer = Callable[[dict[str, Any]], dict[str, Any]]


class Model:
    """Feeds itself the tokens and nothing else."""

    def prepare_inputs_for_generation(self, input_ids: Any, **model_kwargs: Any) -> dict[str, Any]:
        return {"input_ids": input_ids, "position_ids": torch.tensor([[1, 1, 0], [0, 1, 2]])}


class StandIn:
    """An engine that keeps the requests it gets, and finishes each with the fields of an output it is told."""

    vocab_size = VOCAB_SIZE
    masks_padding = True

    def __init__(self, answer: Answer, max_model_len: int | None, seats: int) -> None:
        self.max_model_len = max_model_len
        self.requests: list[dict[str, Any]] = []
        self._answer = answer
        self._seats = seats

    def runs_at_once(self, lengths: Sequence[int]) -> bool:
        return len(lengths) <= self._seats

    def run(self, requests: list[dict[str, Any]]) -> list[RequestOutput]:
        self.requests += requests
        outputs = []
        for request in requests:
            fields = {"token_ids": [1], "finish_reason": "stop", **self._answer(request)}
            outputs.append(RequestOutput("0", 0, request["prompt"], RequestMetrics(0.0), **fields))
        return outputs


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., StandIn]:
    """Stand an engine in for those of models: ``engine(answer, max_model_len=..., seats=...)``."""

    def make(answer: Answer = lambda request: {}, max_model_len: int | None = None, seats: int = 9) -> StandIn:
        stand_in = StandIn(answer, max_model_len, seats)

        @contextmanager
        def engine_for(model: Any, config: Any, plugins: Any) -> Iterator[StandIn]:
            yield stand_in

        monkeypatch.setattr(decoding, "engine_for", engine_for)
        return stand_in

    return make


def decode(*used: Any, max_length: float = 9, eos: Sequence[int] = (), streamer: Any = None, **options: Any) -> Any:
    """Decode two rows with these processors; ``options`` are those of the configuration."""
    config = GenerationConfig(**options)
    config._pad_token_tensor = torch.tensor(77)
    criteria = StoppingCriteriaList([MaxLengthCriteria(max_length), *([EosTokenCriteria(list(eos))] if eos else [])])
    call = GenerateCall(Model(), None)
    chosen = LogitsProcessorList(used)
    return decoding.decode(call, IDS, chosen, criteria, config, streamer=streamer, attention_mask=MASK)


def by_row(*answers: dict[str, Any]) -> Answer:
    return lambda request: answers[request["metadata"]]


def test_each_row_is_a_request_of_its_own_without_its_padding(engine):
    asked = engine()
    decode()
    assert [(request["prompt"], request["metadata"]) for request in asked.requests] == [([5], 0), ([6, 7, 8], 1)]
    (first, second) = (request["params"] for request in asked.requests)
    assert first == second
    assert (first.max_tokens, first.temperature, first.ignore_eos, first.seed) == (6, 0.0, True, None)


def test_the_shortest_length_counts_and_leaves_at_least_one_token(engine):
    for max_length, expected in ((5, 2), (4.5, 2), (3, 1), (0, 1), (torch.tensor(7), 4), (float("inf"), 2**31 - 1)):
        asked = engine()
        decode(max_length=max_length)
        assert asked.requests[0]["params"].max_tokens == expected


def test_a_row_asks_for_no_more_than_the_positions_hold(engine):
    asked = engine(max_model_len=5)
    decode()
    assert [request["params"].max_tokens for request in asked.requests] == [4, 2]


def test_a_minimum_is_never_above_the_maximum(engine):
    asked = engine(max_model_len=5)
    shortest = processors.MinNewTokensLengthLogitsProcessor(3, 3, [9], device="cpu")
    decode(shortest, eos=[9])
    assert [request["params"].min_tokens for request in asked.requests] == [3, 2]


def test_only_tokens_of_the_vocabulary_stop_a_row(engine):
    asked = engine()
    decode(eos=[-1, 9, VOCAB_SIZE - 1, VOCAB_SIZE])
    assert tuple(asked.requests[0]["params"].stop_token_ids) == (9, VOCAB_SIZE - 1)


def test_seeds_of_sampled_rows_come_from_torchs_generator(engine):
    asked = engine()
    for _ in range(2):
        torch.manual_seed(3)
        decode(do_sample=True)
    seeds = [request["params"].seed for request in asked.requests]
    assert seeds[:2] == seeds[2:]
    assert seeds[0] != seeds[1]
    assert {request["params"].temperature for request in asked.requests} == {1.0}


def test_a_greedy_call_draws_nothing(engine):
    engine()
    before = torch.get_rng_state()
    decode()
    assert torch.equal(torch.get_rng_state(), before)


def test_tokens_stand_behind_the_prompts_as_they_came_padded_to_the_longest(engine):
    engine(by_row({"token_ids": [1]}, {"token_ids": [2, 3, 4]}))
    assert decode().tolist() == [[0, 0, 5, 1, 77, 77], [6, 7, 8, 2, 3, 4]]


def test_a_dictionary_is_returned_where_one_is_asked_for(engine):
    engine()
    result = decode(return_dict_in_generate=True)
    assert result.sequences.tolist() == [[0, 0, 5, 1], [6, 7, 8, 1]]
    assert result.scores is None


def test_rows_without_fields_go_in_step_and_end_together(engine):
    asked = engine()
    decode(lambda ids, scores: scores)
    first, second = asked.requests
    assert first["lockstep"] is second["lockstep"]
    assert first["stop_condition"] == first["lockstep"].ends
    assert not first["params"].stop_token_ids


def test_a_streamer_is_told_the_end_and_keeps_rows_in_step(engine):
    asked, ended = engine(), []
    decode(streamer=SimpleNamespace(end=lambda: ended.append(True)))
    assert ended == [True]
    assert "lockstep" in asked.requests[0]


def test_rows_in_step_that_cannot_run_at_once_are_refused_with_the_numbers(engine):
    asked = engine(seats=1)
    with pytest.raises(UnsupportedCall, match=r"here 2 rows, 16 tokens.*raise max_num_seqs or kv_cache_memory"):
        decode(lambda ids, scores: scores)
    assert not asked.requests


def test_ranks_that_step_together_are_refused():
    with pytest.raises(UnsupportedCall, match="synced_gpus"):
        decoding.decode(GenerateCall(Model(), None), IDS, None, None, GenerationConfig(), synced_gpus=True)


def test_a_row_cut_short_by_the_positions_is_an_overflow_that_says_where(engine):
    engine(by_row({}, {"token_ids": [1, 2], "finish_reason": "length"}), max_model_len=5)
    with pytest.raises(ContextOverflow, match=r"a row has come to 5 tokens.*lower max_new_tokens"):
        decode()


def test_a_row_that_reached_the_callers_own_length_is_finished(engine):
    engine(by_row({}, {"token_ids": [1, 2], "finish_reason": "length"}), max_model_len=5)
    assert decode(max_length=5).shape == (2, 5)


def test_the_row_that_failed_is_heard_and_not_those_it_took_along(engine):
    lost, failed = RowLost("another"), ZeroDivisionError("mine")
    engine(by_row({"finish_reason": "error", "error": lost}, {"finish_reason": "error", "error": failed}))
    with pytest.raises(ZeroDivisionError, match="mine"):
        decode()


def test_an_exit_that_the_callers_code_called_for_is_raised_itself(engine):
    failed = SamplingFailed("exit")
    failed.__cause__ = SystemExit(3)
    engine(lambda request: {"finish_reason": "error", "error": failed})
    with pytest.raises(SystemExit):
        decode()


def test_an_error_behind_a_failed_choice_stays_its_cause(engine):
    failed = SamplingFailed("no token")
    failed.__cause__ = ZeroDivisionError("mine")
    engine(lambda request: {"finish_reason": "error", "error": failed})
    with pytest.raises(SamplingFailed, match="no token"):
        decode()


@pytest.mark.parametrize("answer", [{"finish_reason": "abort"}, {"finish_reason": "error", "error": RowLost("other")}])
def test_requests_that_the_engine_dropped_are_no_result(engine, answer: dict[str, Any]):
    engine(by_row({}, answer))
    with pytest.raises(EngineClosed, match="dropped this call's requests"):
        decode()

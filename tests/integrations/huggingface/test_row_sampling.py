"""Processors and criteria of stock as fields of SamplingParams, or none where nothing equals them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process as processors
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

from paged_backend.integrations.huggingface.row_sampling import row_fields
from paged_backend.integrations.huggingface.rows import Row

ROW = Row(0, 1, [5, 6], 3)
TEMPERATURE = processors.TemperatureLogitsWarper(0.5)
TOP_K, TOP_P = processors.TopKLogitsWarper(4), processors.TopPLogitsWarper(0.9)


class Mine(processors.TopKLogitsWarper):
    """One of the caller's own."""


def fields(*used: Any, row: Row = ROW, do_sample: bool = True, eos: list[int] | None = None) -> dict[str, Any] | None:
    criteria = StoppingCriteriaList([MaxLengthCriteria(9), *([EosTokenCriteria(eos)] if eos else [])])
    found = row_fields(LogitsProcessorList(used), criteria, [row], do_sample=do_sample)
    return found and found[0]


def test_nothing_but_lengths_and_ends_are_stop_tokens_alone():
    assert fields() == {"stop_token_ids": []}
    assert fields(eos=[9, 2]) == {"stop_token_ids": [2, 9]}


def test_warpers_in_stocks_order_are_fields():
    expected = {"stop_token_ids": [], "temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1}
    assert fields(TEMPERATURE, TOP_K, TOP_P, processors.MinPLogitsWarper(0.1)) == expected


@pytest.mark.parametrize("used", [(TOP_K, TEMPERATURE), (TOP_K, TOP_K), (Mine(4),)])
def test_another_order_repetitions_and_subclasses_have_no_fields(used: tuple[Any, ...]):
    assert fields(*used) is None


@pytest.mark.parametrize(
    "used",
    [
        processors.TopKLogitsWarper(4, filter_value=-9.0),
        processors.TopPLogitsWarper(0.9, min_tokens_to_keep=2),
        processors.TopKLogitsWarper(2**70),
    ],
)
def test_a_warper_with_settings_that_the_engine_lacks_has_no_field(used: Any):
    assert fields(used) is None


def test_greedy_rows_have_no_field_for_warpers():
    assert fields(TEMPERATURE, do_sample=False) is None


def test_a_minimum_counts_what_is_shown_and_the_larger_one_rules():
    eos = torch.tensor([2])
    longest = processors.MinLengthLogitsProcessor(10, eos)
    new = processors.MinNewTokensLengthLogitsProcessor(3, 4, eos)
    assert fields(new, eos=[2])["min_tokens"] == 4
    assert fields(longest, new, eos=[2])["min_tokens"] == 7
    assert fields(processors.MinLengthLogitsProcessor(1, eos), eos=[2])["min_tokens"] == 0


def test_a_minimum_that_holds_back_other_ends_has_no_field():
    assert fields(processors.MinLengthLogitsProcessor(10, torch.tensor([2])), eos=[2, 9]) is None


def test_a_repetition_penalty_is_a_field_where_it_sees_what_the_engine_sees():
    penalty = processors.RepetitionPenaltyLogitsProcessor(1.3)
    assert fields(penalty, row=Row(0, 0, [5, 6], 2))["repetition_penalty"] == 1.3
    # It would see the padding, or the stand-in of embeddings.
    assert fields(penalty) is None
    assert fields(penalty, row=Row(0, 0, [0, 0], 2, torch.zeros(2, 4))) is None


def test_a_criterion_of_another_kind_has_no_fields():
    criteria = StoppingCriteriaList([MaxTimeCriteria(1.0)])
    assert row_fields(LogitsProcessorList(), criteria, [ROW], do_sample=False) is None

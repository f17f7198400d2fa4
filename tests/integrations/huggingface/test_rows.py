"""The prompts of a padded batch, and what a model may be fed besides them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paged_backend.errors import UnsupportedCall
from paged_backend.integrations.huggingface.rows import Row, check_inputs, keeps_states, split_rows, states_alone

IDS = torch.tensor([[0, 0, 5], [6, 7, 8]])
MASK = torch.tensor([[0, 0, 1], [1, 1, 1]])
POSITIONS = torch.tensor([[1, 1, 0], [0, 1, 2]])


class Model:
    """Feeds itself what it is told."""

    def __init__(self, **inputs: Any) -> None:
        self.inputs = {"input_ids": IDS, "position_ids": POSITIONS, **inputs}

    def prepare_inputs_for_generation(self, input_ids: Any, **model_kwargs: Any) -> dict[str, Any]:
        return self.inputs


def check(model: Model, *, masks_padding: bool = True) -> None:
    check_inputs(model, IDS, split_rows(IDS, MASK), {}, masks_padding=masks_padding)


def test_padding_on_the_left_is_taken_off():
    assert split_rows(IDS, MASK) == [Row(0, 2, [5], 3), Row(1, 0, [6, 7, 8], 3)]


def test_without_a_mask_all_is_prompt():
    assert [row.prompt for row in split_rows(IDS, None)] == [[0, 0, 5], [6, 7, 8]]


def test_a_mask_of_one_row_goes_for_all():
    assert [row.num_padding for row in split_rows(IDS, torch.tensor([[0, 1, 1]]))] == [1, 1]


def test_embeddings_stand_in_for_prompts_and_ids_are_only_shown():
    embeds = torch.arange(12.0).reshape(2, 3, 2)
    first, second = split_rows(torch.zeros(2, 0, dtype=torch.long), MASK, embeds)
    assert (first.prompt, first.num_padding, first.num_shown) == ([0], 2, 0)
    assert torch.equal(first.embeds, embeds[0, 2:])
    assert torch.equal(second.embeds, embeds[1])


@pytest.mark.parametrize(
    ("mask", "why"),
    [([1, 1, 0], r"padding on the right \(row 1\)"), ([1, 0, 1], r"holes \(row 1\)"), ([0, 0, 0], "row 1, which")],
)
def test_a_mask_that_hides_anything_else_is_refused_by_its_row(mask: list[int], why: str):
    with pytest.raises(UnsupportedCall, match=why):
        split_rows(IDS, torch.tensor([[1, 1, 1], mask]))


@pytest.mark.parametrize("input_ids", [IDS[0], IDS.float()])
def test_ids_of_another_shape_or_type_are_refused(input_ids: torch.Tensor):
    with pytest.raises(UnsupportedCall, match=r"give \[rows, tokens\] integers"):
        split_rows(input_ids, None)


@pytest.mark.parametrize("inputs", [{}, {"use_cache": True, "vision": None}, {"encoded": {}, "flag": False}])
def test_inputs_that_change_nothing_pass(inputs: dict[str, Any]):
    check(Model(**inputs))


@pytest.mark.parametrize(
    ("inputs", "why"),
    [
        ({"token_type_ids": IDS}, "the model input token_type_ids"),
        ({"input_ids": IDS + 1}, "what Model makes of input_ids"),
        ({"position_ids": POSITIONS + 1}, "position_ids other than"),
        ({"position_ids": None}, "counts padding as tokens"),
        ({"cache": SimpleNamespace(get_seq_length=lambda: 4)}, "cache with 4 tokens in it"),
        ({"cache_params": SimpleNamespace(is_linear=[True], has_previous_state=lambda: True)}, "with states in it"),
    ],
)
def test_what_would_change_the_next_token_is_refused_by_name(inputs: dict[str, Any], why: str):
    with pytest.raises(UnsupportedCall, match=why):
        check(Model(**inputs))


def test_padding_that_stock_takes_into_states_is_refused_by_its_row():
    with pytest.raises(UnsupportedCall, match=r"padding \(row 0\) for Model"):
        check(Model(), masks_padding=False)


def test_a_cache_of_states_alone_has_no_layer_of_keys():
    mixed, pure = SimpleNamespace(is_linear=[True, False]), SimpleNamespace(is_linear=[True, True])
    assert (states_alone(mixed), states_alone(pure), states_alone(object())) == (False, True, False)
    assert keeps_states(mixed) == [True, False]

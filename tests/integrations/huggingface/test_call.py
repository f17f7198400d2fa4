"""What a call of generate asks for, read from wherever it may stand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paged_backend import EngineConfig
from paged_backend.errors import ConfigError, RequestRefused, UnsupportedCall
from paged_backend.integrations.huggingface.call import GenerateCall, refuse

MODEL = SimpleNamespace(generation_config=None)


def read(model: Any = MODEL, **arguments: Any) -> GenerateCall | None:
    return GenerateCall.read(model, arguments)


def test_a_call_that_says_nothing_runs_stock():
    assert read(max_new_tokens=3, num_beams=4) is None


def test_an_argument_goes_before_the_configurations():
    paged = SimpleNamespace(cache_impl="paged")
    model = SimpleNamespace(generation_config=paged)
    assert read(model) is not None
    assert read(generation_config=paged) is not None
    assert read(model, generation_config=paged, cache_impl=None) is None


def test_options_of_the_engine_make_its_configuration():
    call = read(cache_impl="paged", paged_config={"block_size": 32, "seed": 3, "plugins": [MODEL]})
    assert (call.config.block_size, call.config.seed, call.plugins) == (32, None, (MODEL,))


@pytest.mark.parametrize(
    ("paged_config", "why"),
    [
        (3, "must be a mapping of engine options or an EngineConfig, got 3"),
        ({"plugins": "mine"}, "must be a list of modules or objects, got 'mine'"),
    ],
)
def test_options_of_another_kind_are_refused(paged_config: Any, why: str):
    with pytest.raises(ConfigError, match=why):
        read(cache_impl="paged", paged_config=paged_config)


def test_many_rows_get_as_many_seats_rounded_up_to_a_power_of_two():
    call = read(cache_impl="paged")
    assert call.config_for(1) is call.config
    assert call.config_for(call.config.max_num_seqs + 1).max_num_seqs == 2 * call.config.max_num_seqs


@pytest.mark.parametrize("paged_config", [{"max_num_seqs": 2}, EngineConfig(max_num_seqs=2)])
def test_seats_that_the_caller_limits_stay_as_they_are(paged_config: Any):
    assert read(cache_impl="paged", paged_config=paged_config).config_for(9).max_num_seqs == 2


@pytest.mark.parametrize(
    "arguments",
    [
        {"penalty_alpha": 0.6, "top_k": 1},
        {"penalty_alpha": 0.6, "do_sample": True},
        {"num_beams": 1},
        {"use_cache": False},
        {"dola_layers": None},
        {"custom_generate": False},
    ],
)
def test_values_that_change_nothing_are_served(arguments: dict[str, Any]):
    assert read(cache_impl="paged", **arguments) is not None


def test_inputs_without_a_row_and_masks_of_another_shape_tell_the_shapes():
    with pytest.raises(RequestRefused, match=r"inputs of shape \(0, 3\) hold no prompt"):
        read(cache_impl="paged", input_ids=torch.zeros(0, 3, dtype=torch.long))
    with pytest.raises(UnsupportedCall, match=r"shape \(2, 4\) for inputs of \(2, 3\)"):
        read(cache_impl="paged", input_ids=torch.ones(2, 3, dtype=torch.long), attention_mask=torch.ones(2, 4))


def test_a_refusal_names_what_and_both_ways_out():
    text = "beams is not served by cache_impl='paged'; use one, or leave cache_impl out to run stock generate"
    assert str(refuse("beams", "use one")) == text

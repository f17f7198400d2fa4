"""Swaps change speed and nothing else: same tokens, same refusals, the user's model untouched."""

from __future__ import annotations

import functools
import importlib

import pytest
import torch
from swap_checks import PARTLY, PROMPTS, WHOLE, stock_tokens, tokens
from tiny_models import make_tiny

from paged_backend import Engine, EngineConfig
from paged_backend.config import SWAPS
from paged_backend.errors import ConfigError
from paged_backend.model.proof import prove
from paged_backend.model.twin import Twin
from paged_backend.swaps.fused import Fused
from paged_backend.swaps.kind import SwapKind
from paged_backend.swaps.swaps import swap_modules

pytestmark = pytest.mark.filterwarnings("ignore::paged_backend.model.twin.ExpandedCacheWarning")


@functools.cache
def model_and_tokens(family):
    model = make_tiny(family)
    return model, stock_tokens(model)


# Whole layers where there are any, and every part of them by itself.
@pytest.mark.parametrize("optimize", ["auto", ["mlp", "linear", "norm"]], ids=str)
@pytest.mark.parametrize("family", WHOLE + PARTLY)
def test_every_family_gets_stocks_greedy_tokens(family, optimize):
    model, expected = model_and_tokens(family)
    engine = Engine(model, optimize=optimize, attention_backend="cpu", max_num_batched_tokens=16)
    assert tokens(engine) == expected


@pytest.mark.parametrize("optimize", ["memory", ["linear"], ["mlp"], ["layer", "norm"]], ids=str)
def test_every_setting_gives_stocks_greedy_tokens(optimize):
    model, expected = model_and_tokens("gemma2")
    engine = Engine(model, optimize=optimize, attention_backend="cpu", max_num_batched_tokens=16)
    assert tokens(engine) == expected


def test_no_optimisation_leaves_every_module():
    engine = Engine(make_tiny("llama"), optimize="none")
    assert not any(isinstance(module, Fused) for module in engine.twin.module.modules())
    assert engine.stats().swaps_made == {}


def test_saving_memory_copies_no_weight(tiny_model):
    stats = Engine(tiny_model("llama"), optimize="memory").stats()
    assert stats.packed_bytes == 0
    assert stats.swaps_made == {"norm": 7}


@pytest.mark.parametrize("name", SWAPS)
def test_every_kind_has_a_file_of_its_name(name):
    file = importlib.import_module(f"paged_backend.swaps.{name}")
    # States are updated in the modules that stay.
    assert name == "state" or issubclass(file.KIND, SwapKind)


@pytest.mark.parametrize(
    ("kinds", "made"),
    [
        (["layer"], {"layer": 3}),
        (["norm", "mlp"], {"mlp": 3, "norm": 7}),
        (("linear",), {"linear": 22}),
        ({"norm"}, {"norm": 7}),
    ],
    ids=str,
)
def test_each_kind_is_replaced_by_itself(tiny_model, kinds, made):
    assert Engine(tiny_model("llama"), optimize=kinds).stats().swaps_made == made


@pytest.mark.parametrize(("optimize", "quantize"), [("auto", None), ("memory", None), ("auto", "int8")])
def test_the_users_model_is_untouched(tiny_model, optimize, quantize):
    model = tiny_model("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    places = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    kinds = [type(module) for module in model.modules()]
    ids = torch.tensor(PROMPTS[:1])
    expected = model(ids).logits

    def check():
        assert [type(module) for module in model.modules()] == kinds
        assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == places
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
        assert torch.equal(model(ids).logits, expected)

    with Engine(model, optimize=optimize, quantize=quantize) as engine:
        check()
        engine.add_request(PROMPTS[0])
        engine.step()
        check()
        first = tokens(engine)
        engine.weights_changed()
        check()
        assert tokens(engine) == first
        check()
    check()


def test_changed_weights_are_packed_again(tiny_model):
    model = tiny_model("llama")
    engine = Engine(model)
    first = tokens(engine)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(-1.5)
    changed = stock_tokens(model)
    assert changed != first
    assert tokens(engine) == changed
    assert engine.stats().swaps_made["layer"] == 3


def test_swaps_that_fail_the_proof_are_undone(tiny_model, monkeypatch):
    model = tiny_model("llama")
    twin = Twin(model)
    swaps = swap_modules(twin)
    assert swaps.made["layer"] == 3
    swaps.undo("a reason")
    assert not any(isinstance(module, Fused) for module in twin.module.modules())
    assert swaps.made == {}
    assert swaps.packed_bytes == 0
    assert swaps.refused == {"the model": "a reason"}
    prove(model, twin)


def test_int8_weights_take_a_byte_each_and_stay_close(tiny_model):
    model = tiny_model("llama")
    whole, rounded = Engine(model).stats(), Engine(model, quantize="int8")
    assert rounded.stats().swaps_made == whole.swaps_made
    assert rounded.stats().packed_bytes < 0.35 * whole.packed_bytes
    matching = sum(a[0] == b[0] for a, b in zip(tokens(rounded), stock_tokens(model), strict=True))
    assert matching >= len(PROMPTS) - 1


def test_int8_without_the_cpp_operations_is_refused(tiny_model):
    with pytest.raises(ConfigError, match="quantize='int8' cannot be had here"):
        Engine(tiny_model("llama"), quantize="int8", attention_backend="reference")


def test_int8_without_replaced_modules_is_refused_with_the_way_out():
    with pytest.raises(ConfigError, match=r"quantize='int8' replaces modules.*use optimize='auto', or quantize=None"):
        EngineConfig(quantize="int8", optimize="none")


def test_int8_off_a_cpu_is_refused_with_the_device(tiny_model):
    twin = Twin(tiny_model("llama"))
    twin.device = torch.device("meta")
    assert swap_modules(twin, quantize="int8").refused == {
        "the model": "it is on meta, and weights are rounded on a CPU only"
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("optimize", "fast"),
        ("optimize", None),
        ("optimize", []),
        ("optimize", ["layer", "fast"]),
        ("optimize", {"layer": 1}),
        ("quantize", "int3"),
    ],
)
def test_unknown_settings_are_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=field):
        EngineConfig(**{field: value})


def test_a_shortage_of_memory_leaves_weights_where_they_are(tiny_model, monkeypatch):
    monkeypatch.setattr("paged_backend.swaps.swaps._available_memory", lambda: 1000)
    stats = Engine(tiny_model("llama")).stats()
    assert stats.packed_bytes == 0
    assert stats.swaps_made == {"norm": 7}
    assert "more than half" in stats.swaps_refused["the model"]

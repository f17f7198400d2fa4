"""Hooks and patches of the user's own are followed as stock follows them, and known ones are not taken for such."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from oracle import assert_greedy, draw_prompts, stock_greedy
from peft import LoraConfig, get_peft_model
from tiny_models import FAMILIES, make_tiny
from torch import nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama

from paged_backend import Engine, SamplingParams
from paged_backend.errors import ConfigError, UnsupportedModel
from paged_backend.model.foreign_code import code_identities, hooked, patched

NUM_TOKENS = 8
PROMPT = draw_prompts([40])[0]
STEER = torch.linspace(-3, 3, 64)


@pytest.fixture
def model() -> PreTrainedModel:
    return make_tiny("llama")


# Each is set up on a model and yields a function that changes what the model computes and nothing of its weights.


@contextmanager
def a_tensor_attribute(model: Any) -> Iterator[Callable[[], None]]:
    layer = model.model.layers[0]
    layer.steer = torch.zeros(64)
    layer.register_forward_hook(lambda module, arguments, output: output + module.steer)
    yield lambda: setattr(layer, "steer", STEER)


@contextmanager
def a_tensor_attribute_in_place(model: Any) -> Iterator[Callable[[], None]]:
    layer = model.model.layers[0]
    layer.steer = torch.zeros(64)
    layer.register_forward_hook(lambda module, arguments, output: output + module.steer)
    yield lambda: layer.steer.copy_(STEER)


@contextmanager
def a_tensor_in_a_dict(model: Any) -> Iterator[Callable[[], None]]:
    layer = model.model.layers[0]
    layer.steering = {"vector": torch.zeros(64)}
    layer.register_forward_hook(lambda module, arguments, output: output + module.steering["vector"])
    yield lambda: layer.steering.update(vector=STEER)


@contextmanager
def an_object(model: Any) -> Iterator[Callable[[], None]]:
    layer = model.model.layers[0]
    layer.options = SimpleNamespace(factor=0.0)
    layer.register_forward_hook(lambda module, arguments, output: output + module.options.factor * STEER)
    yield lambda: setattr(layer.options, "factor", 1.0)


@contextmanager
def another_object(model: Any) -> Iterator[Callable[[], None]]:
    layer = model.model.layers[0]
    layer.options = SimpleNamespace(factor=0.0)
    layer.register_forward_hook(lambda module, arguments, output: output + module.options.factor * STEER)
    yield lambda: setattr(layer, "options", SimpleNamespace(factor=1.0))


@contextmanager
def a_closure(model: Any) -> Iterator[Callable[[], None]]:
    state = {"factor": 0.0}
    model.model.layers[0].register_forward_hook(lambda module, arguments, output: output + state["factor"] * STEER)
    yield lambda: state.update(factor=1.0)


@contextmanager
def a_replaced_forward(model: Any) -> Iterator[Callable[[], None]]:
    mlp = model.model.layers[0].mlp
    state, forward = {"factor": 1.0}, mlp.forward
    mlp.forward = lambda x: forward(x) * state["factor"]
    yield lambda: state.update(factor=-1.0)


@contextmanager
def a_class(model: Any) -> Iterator[Callable[[], None]]:
    with pytest.MonkeyPatch.context() as patch:
        forward = modeling_llama.LlamaMLP.forward
        yield lambda: patch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: -forward(self, x))


@contextmanager
def a_class_that_changes_its_mind(model: Any) -> Iterator[Callable[[], None]]:
    state, forward = {"factor": 1.0}, modeling_llama.LlamaMLP.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: forward(self, x) * state["factor"])
        yield lambda: state.update(factor=-1.0)


@contextmanager
def a_hook_on_all_modules(model: Any) -> Iterator[Callable[[], None]]:
    handles: list[Any] = []

    def negate(module: nn.Module, arguments: Any, output: Any) -> Any:
        return -output if type(module).__name__ == "LlamaMLP" else None

    try:
        yield lambda: handles.append(register_module_forward_hook(negate))
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def a_function_of_torch(model: Any) -> Iterator[Callable[[], None]]:
    with pytest.MonkeyPatch.context() as patch:
        yield lambda: patch.setattr(functional, "silu", lambda x, inplace=False: torch.relu(x))


@contextmanager
def a_function_of_torch_that_calls_what_was_there(model: Any) -> Iterator[Callable[[], None]]:
    silu = functional.silu
    with pytest.MonkeyPatch.context() as patch:
        yield lambda: patch.setattr(functional, "silu", lambda x, inplace=False: -silu(x))


@contextmanager
def a_function_of_torch_in_c(model: Any) -> Iterator[Callable[[], None]]:
    rsqrt = torch.rsqrt
    with pytest.MonkeyPatch.context() as patch:
        yield lambda: patch.setattr(torch, "rsqrt", lambda x: rsqrt(x) * 0.5)


@contextmanager
def a_method_of_tensors(model: Any) -> Iterator[Callable[[], None]]:
    mean = torch.Tensor.mean
    with pytest.MonkeyPatch.context() as patch:
        yield lambda: patch.setattr(
            torch.Tensor, "mean", lambda *args, **kwargs: mean(*args, **kwargs) * 9, raising=False
        )


@contextmanager
def a_call_of_a_class(model: Any) -> Iterator[Callable[[], None]]:
    with pytest.MonkeyPatch.context() as patch:
        yield lambda: patch.setattr(
            modeling_llama.LlamaMLP, "__call__", lambda self, x: -nn.Module.__call__(self, x), raising=False
        )


@contextmanager
def a_function_of_the_models_file(model: Any) -> Iterator[Callable[[], None]]:
    with pytest.MonkeyPatch.context() as patch:
        yield lambda: patch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin, **_: (q, k))


CHANGES = [
    a_tensor_attribute,
    a_tensor_attribute_in_place,
    a_tensor_in_a_dict,
    an_object,
    another_object,
    a_closure,
    a_replaced_forward,
    a_class,
    a_class_that_changes_its_mind,
    a_hook_on_all_modules,
    a_function_of_torch,
    a_function_of_torch_that_calls_what_was_there,
    a_function_of_torch_in_c,
    a_method_of_tensors,
    a_call_of_a_class,
    a_function_of_the_models_file,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_that_is_no_weight_is_followed_as_stock_follows_it(model: PreTrainedModel, change: Any) -> None:
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    with change(model) as apply, Engine(model, kv_cache_memory="1MiB") as engine:
        before = stock_greedy(model, PROMPT, NUM_TOKENS)
        assert_greedy(model, PROMPT, engine.generate(PROMPT, params)[0].token_ids, before)
        apply()
        after = stock_greedy(model, PROMPT, NUM_TOKENS)
        assert after != before
        assert_greedy(model, PROMPT, engine.generate(PROMPT, params)[0].token_ids, after)


def test_what_a_hook_reads_is_the_users_own_and_its_modules_are_not(model: PreTrainedModel) -> None:
    layer: Any = model.model.layers[0]
    layer.options, layer.parts = SimpleNamespace(factor=0.0), [layer.mlp]
    layer.register_forward_hook(lambda *_: None)
    with Engine(model, kv_cache_memory="1MiB") as engine:
        twin: Any = engine.twin.module.model.layers[0]
        assert twin.options is layer.options
        assert twin.parts[0] is not layer.mlp
        assert twin.self_attn.config is not layer.self_attn.config


def test_no_prefix_is_kept_where_code_of_the_users_own_runs(model: PreTrainedModel) -> None:
    handle = model.model.layers[0].register_forward_hook(lambda *_: None)
    with Engine(model, kv_cache_memory="1MiB") as engine:
        for _ in range(2):
            engine.generate(PROMPT, SamplingParams(max_tokens=2))
        assert engine.stats().num_cached_tokens == 0
        with pytest.raises(ConfigError, match=r"a hook on model\.layers\.0 may change"):
            engine.pin_prefix(PROMPT)
        handle.remove()
        for _ in range(2):
            engine.generate(PROMPT, SamplingParams(max_tokens=2))
        assert engine.stats().num_cached_tokens > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_as_it_comes_has_no_foreign_code(family: str) -> None:
    model = make_tiny(family)
    assert patched(model) is None
    assert not any(map(hooked, model.modules()))


def adapted(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(target_modules=["q_proj"]))


def offloaded(model: Any) -> Any:
    return cpu_offload(model, execution_device=torch.device("cpu"))


def compiled(model: Any) -> Any:
    model.model.layers[0].compile(backend="eager")
    model.forward = torch.compile(model.forward, backend="eager")
    return model


def recording(model: Any) -> Any:
    model(torch.arange(4)[None], output_hidden_states=True)
    return model


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("change", [adapted, offloaded, compiled, recording])
def test_what_known_libraries_add_is_no_foreign_code(model: PreTrainedModel, change: Any) -> None:
    changed = change(model)
    assert patched(changed) is None
    assert not any(map(hooked, changed.modules()))


def test_a_function_that_is_gone_is_not_taken_for_one_at_its_place(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def patch(sign: int) -> None:
        monkeypatch.setattr(functional, "silu", lambda x, inplace=False: sign * x)

    patch(1)
    before = code_identities(model)
    patch(-1)
    assert code_identities(model) != before


def first_row(output: torch.Tensor) -> torch.Tensor:
    return torch.cat([output[:1] + STEER, output[1:]])


@pytest.mark.parametrize(
    "act",
    [
        first_row,
        lambda output: output + output.mean(0, keepdim=True),
        lambda output: output * len(output),
        lambda output: output + output.mean(1, keepdim=True),
        lambda output: output * (output.shape[1] > 1),
    ],
    ids=["first row", "mean of rows", "number of rows", "mean of tokens", "prefill alone"],
)
def test_a_hook_that_sees_more_than_a_token_is_refused_by_name(model: PreTrainedModel, act: Any) -> None:
    model.model.layers[1].register_forward_hook(lambda module, arguments, output: act(output))
    with pytest.raises(UnsupportedModel, match=r"a hook on model\.layers\.1 takes part, which sees packed tokens"):
        Engine(model, kv_cache_memory="1MiB")

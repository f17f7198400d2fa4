"""The structural copy: what it shares, what it must not call into, and what it survives."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from paged_forward import prefill_logits
from torch import nn
from transformers import PreTrainedModel

from paged_backend.model.model_copy import copy_model
from paged_backend.model.proof import prove
from paged_backend.model.twin import Twin

TinyModel = Callable[..., PreTrainedModel]
PROMPT = [17, 3, 250, 41, 99, 100, 7, 63]


@pytest.fixture
def model(tiny_model: TinyModel) -> PreTrainedModel:
    return tiny_model("llama")


def lone_logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([PROMPT]), use_cache=False).logits[0]


def storages(value: Any, found: set[int], seen: set[int]) -> None:
    """The addresses of all weights of 1000 bytes and more that can be reached from `value`."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        if value.device.type != "meta" and value.untyped_storage().nbytes() >= 1000:
            found.add(value.untyped_storage().data_ptr())
    elif isinstance(value, dict):
        for item in value.values():
            storages(item, found, seen)
    elif isinstance(value, list | tuple):
        for item in value:
            storages(item, found, seen)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        storages(vars(value), found, seen)


def assert_no_weight_is_duplicated(model: nn.Module, copy: nn.Module) -> None:
    theirs: set[int] = set()
    ours: set[int] = set()
    storages(model, theirs, set())
    storages(copy, ours, set())
    assert theirs
    assert ours == theirs


def assert_calls_no_module_of(model: nn.Module, twin: Twin) -> None:
    """Run the twin while every module of `model` fails when it is called."""

    def fail(module: nn.Module, arguments: Any) -> None:
        raise AssertionError("the twin ran a module of the user's model")

    handles = [module.register_forward_pre_hook(fail) for module in model.modules()]
    prefill_logits(twin, [PROMPT])
    for handle in handles:
        handle.remove()


def test_tied_weights_stay_tied(tiny_model: TinyModel) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    copy = copy_model(model)
    assert copy.lm_head.weight is copy.model.embed_tokens.weight is model.lm_head.weight
    assert_no_weight_is_duplicated(model, copy)


def test_an_attribute_over_the_memory_of_a_weight_is_no_second_copy_of_it(model: PreTrainedModel) -> None:
    model.lm_head.transposed = model.lm_head.weight.detach().t()
    copy = copy_model(model)
    assert_no_weight_is_duplicated(model, copy)
    assert torch.equal(copy.lm_head.transposed, model.lm_head.transposed)


def test_persistent_buffers_are_shared_and_others_are_copied(model: PreTrainedModel) -> None:
    model.lm_head.register_buffer("scales", torch.ones(4))
    model.lm_head.register_buffer("scratch", torch.ones(4), persistent=False)
    copy = copy_model(model)
    assert copy.lm_head.scales is model.lm_head.scales
    copy.lm_head.scratch.zero_()
    assert torch.equal(model.lm_head.scratch, torch.ones(4))


def test_packed_weights_in_buffers_that_are_not_saved_are_shared(model: PreTrainedModel) -> None:
    model.lm_head.register_buffer("packed", torch.zeros(64, 64, dtype=torch.uint8), persistent=False)
    model.lm_head.register_buffer("calls", torch.zeros(1, dtype=torch.int64), persistent=False)
    copy = copy_model(model)
    assert copy.lm_head.packed is model.lm_head.packed
    assert copy.lm_head.calls is not model.lm_head.calls


def test_the_copy_is_in_eval_mode_and_has_its_own_config(model: PreTrainedModel) -> None:
    copy = copy_model(model.train())
    assert not any(module.training for module in copy.modules())
    assert all(module.training for module in model.modules())
    assert copy.config is copy.model.config is copy.model.layers[0].self_attn.config
    assert copy.config is not model.config


def test_what_refuses_to_be_copied_is_shared(model: PreTrainedModel) -> None:
    model.lock = threading.Lock()
    model.stream = {"numbers": (n for n in range(3)), "layer": model.model.layers[0]}
    model.lm_head.stream = model.stream
    model.activation = torch.ones(2, requires_grad=True) * 2
    copy = copy_model(model)
    assert copy.lock is model.lock
    assert copy.stream is model.stream
    assert copy.activation is model.activation
    # What was copied on the way to the failure is not left half made.
    assert copy.lm_head.stream is model.stream
    prove(model, Twin(model))


def test_attributes_that_lead_to_modules_lead_to_their_copies(model: PreTrainedModel) -> None:
    layers = model.model.layers
    model.extra = {
        "first": layers[0],
        "run": layers[1].forward,
        "bound": functools.partial(nn.Module.named_children, layers[2]),
    }
    copy = copy_model(model)
    assert copy.extra["first"] is copy.model.layers[0]
    assert copy.extra["run"].__self__ is copy.model.layers[1]
    assert copy.extra["bound"].args[0] is copy.model.layers[2]


def test_a_forward_bound_to_a_module_runs_on_its_copy(model: PreTrainedModel) -> None:
    def doubled(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return type(self).forward(self, hidden) * 2

    model.lm_head.forward = doubled.__get__(model.lm_head)
    twin = Twin(model)
    assert_calls_no_module_of(model, twin)
    prove(model, twin)


def test_hooks_run_on_the_twin_with_packed_shapes(model: PreTrainedModel) -> None:
    shapes: list[torch.Size] = []
    model.model.norm.register_forward_hook(lambda module, arguments, output: shapes.append(output.shape))
    twin = Twin(model)
    shapes.clear()
    prefill_logits(twin, [PROMPT, PROMPT[:3]])
    assert shapes == [torch.Size([1, 11, 64])]


def test_a_hook_that_changes_the_output_changes_the_twins_too(model: PreTrainedModel) -> None:
    before = lone_logits(model)
    model.model.layers[1].register_forward_pre_hook(lambda module, arguments: (arguments[0] * 2, *arguments[1:]))
    assert not torch.allclose(lone_logits(model), before, atol=0.1)
    prove(model, Twin(model))


def test_a_hook_that_is_a_method_of_a_module_moves_to_its_copy(model: PreTrainedModel) -> None:
    def remember(self: Any, module: nn.Module, arguments: Any, output: torch.Tensor) -> None:
        self.seen = output.shape[1]

    model.seen = None
    model.model.norm.register_forward_hook(remember.__get__(model))
    model.lm_head.register_forward_hook(functools.partial(remember, model))
    twin = Twin(model)
    prefill_logits(twin, [PROMPT])
    assert twin.module.seen == len(PROMPT)
    assert model.seen is None


def test_an_object_used_as_a_hook_stays_the_users_own(model: PreTrainedModel) -> None:
    class Recorder:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, module: nn.Module, arguments: Any, output: Any) -> None:
            self.calls += 1

    recorder = Recorder()
    model.model.norm.register_forward_hook(recorder)
    twin = Twin(model)
    recorder.calls = 0
    prefill_logits(twin, [PROMPT])
    assert recorder.calls == 1


compilations: list[Any] = []


def backend(graph: Any, inputs: Any) -> Any:
    compilations.append(graph)
    return graph.forward


def eager_compile(function: Any) -> Any:
    return torch.compile(function, backend=backend)


def compiled_model(model: Any) -> Any:
    return eager_compile(model)


def compiled_in_place(model: Any) -> Any:
    model.compile(backend=backend)
    return model


def compiled_forward(model: Any) -> Any:
    model.forward = eager_compile(model.forward)
    return model


def compiled_layer(model: Any) -> Any:
    model.model.layers[1] = eager_compile(model.model.layers[1])
    return model


@pytest.mark.parametrize("wrap", [compiled_model, compiled_in_place, compiled_forward, compiled_layer])
def test_a_compiled_model_has_a_plain_twin(model: PreTrainedModel, wrap: Callable[[Any], Any]) -> None:
    expected = lone_logits(model)
    wrapped = wrap(model)
    twin = Twin(wrapped)
    assert not any("_orig_mod" in module._modules for module in twin.module.modules())
    assert all(module._compiled_call_impl is None for module in twin.module.modules())
    prove(wrapped, twin)
    assert compilations == []
    assert twin.stale_reason() is None
    torch.testing.assert_close(prefill_logits(twin, [PROMPT])[0], expected, atol=1e-4, rtol=1e-4)
    assert_calls_no_module_of(model, twin)


def offloaded_to_memory(model: PreTrainedModel, folder: Path) -> Any:
    return cpu_offload(model)


def offloaded_to_disk(model: PreTrainedModel, folder: Path) -> Any:
    return disk_offload(model, folder)


def dispatched(model: PreTrainedModel, folder: Path) -> Any:
    device_map = {
        "model.embed_tokens": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.layers.2": "disk",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
    }
    return dispatch_model(model, device_map, main_device="cpu", offload_dir=folder)


@pytest.mark.parametrize("offload", [offloaded_to_memory, offloaded_to_disk, dispatched])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_offloaded_weights_are_shared_and_proven(
    tiny_model: TinyModel, tmp_path: Path, offload: Callable[[PreTrainedModel, Path], Any], tied: bool
) -> None:
    model = offload(tiny_model("llama", tie_word_embeddings=tied), tmp_path)
    expected = lone_logits(model)
    twin = Twin(model)
    assert twin.device == torch.device("cpu")
    prove(model, twin)
    if offload is not offloaded_to_disk:
        assert_no_weight_is_duplicated(model, copy_model(model))
    assert_calls_no_module_of(model, twin)
    assert twin.stale_reason() is None
    assert torch.equal(lone_logits(model), expected)

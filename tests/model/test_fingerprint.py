"""Staleness: every change of the user's model is seen, and nothing else is taken for one."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.two_tensor import TwoTensor
from transformers import PreTrainedModel

from paged_backend.model.fingerprint import Fingerprint
from paged_backend.model.proof import prove
from paged_backend.model.twin import Twin

TinyModel = Callable[..., PreTrainedModel]


@pytest.fixture
def model(tiny_model: TinyModel) -> PreTrainedModel:
    return tiny_model("llama")


def step(model: Any) -> None:
    model(torch.arange(3, 9)[None], labels=torch.arange(3, 9)[None]).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def add_through_data(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight.data.add_(0.01)


def edit_a_row(model: Any) -> None:
    with torch.no_grad():
        model.model.embed_tokens.weight[17] += 1


def replace_a_module(model: Any) -> None:
    model.lm_head = nn.Linear(64, 256, bias=False)


def replace_a_parameter(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


def replace_data(model: Any) -> None:
    model.lm_head.weight.data = model.lm_head.weight.data.clone()


def remove_a_layer(model: Any) -> None:
    del model.model.layers[2]


def load_weights(model: Any) -> None:
    model.load_state_dict({name: tensor + 0.1 for name, tensor in model.state_dict().items()})


def write_a_rotary_buffer(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(2)


def change_an_attribute(model: Any) -> None:
    model.model.layers[0].self_attn.scaling *= 2


def change_the_config(model: Any) -> None:
    model.config.rms_norm_eps = 0.1


def add_a_hook(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda module, arguments, output: output * 2)


def replace_a_forward(model: Any) -> None:
    model.model.norm.forward = lambda hidden: hidden


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (step, "model.embed_tokens.weight changed"),
        (add_through_data, "weights were modified in place"),
        (edit_a_row, "model.embed_tokens.weight changed"),
        (replace_a_module, "changed"),
        (replace_a_parameter, "lm_head.weight changed"),
        (replace_data, "lm_head.weight changed"),
        (remove_a_layer, "changed"),
        (load_weights, "changed"),
        (lambda model: model.half(), "changed"),
        (lambda model: model.to(torch.bfloat16), "changed"),
        (write_a_rotary_buffer, "a buffer was modified in place"),
        (change_an_attribute, "model.layers.0.self_attn changed"),
        (change_the_config, "the configuration changed"),
        (add_a_hook, "model.layers.0 changed"),
        (replace_a_forward, "model.norm changed"),
        (cpu_offload, "changed"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_changed_model_is_stale(model: PreTrainedModel, change: Callable[[Any], None], told: str) -> None:
    twin = Twin(model)
    change(model)
    reason = twin.stale_reason()
    assert reason is not None
    assert told in reason
    assert Twin(model).stale_reason() is None


@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "gpt2", "opt", "llama4", "gpt_oss", "phimoe", "phi3_longrope", "mistral"]
)
def test_running_the_model_does_not_make_it_stale(tiny_model: TinyModel, family: str) -> None:
    model = tiny_model(family)
    twin = Twin(model)
    assert twin.stale_reason() is None
    model.generate(torch.arange(3, 15)[None], max_new_tokens=4, do_sample=False)
    model.generate(torch.arange(3, 15)[None], max_new_tokens=4, do_sample=True)
    assert twin.stale_reason() is None
    prove(model, twin)
    assert twin.stale_reason() is None


def test_the_training_flag_does_not_matter(model: PreTrainedModel) -> None:
    twin = Twin(model)
    model.train()
    assert twin.stale_reason() is None
    model.eval()
    assert twin.stale_reason() is None


def test_another_attention_implementation_does_not_matter(model: PreTrainedModel) -> None:
    twin = Twin(model)
    model.set_attn_implementation("eager")
    assert twin.stale_reason() is None


def test_gradients_do_not_matter(model: PreTrainedModel) -> None:
    twin = Twin(model)
    model(torch.arange(3, 9)[None], labels=torch.arange(3, 9)[None]).loss.backward()
    model.requires_grad_(False)
    assert twin.stale_reason() is None


def test_weights_that_are_not_numbers_do_not_make_a_model_stale(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    fingerprint = Fingerprint(model)
    assert fingerprint.difference(model) is None


def test_a_change_through_data_shows_in_every_layout_and_dtype() -> None:
    class Weights(nn.Module):
        def __init__(self, weight: torch.Tensor) -> None:
            super().__init__()
            self.weight = nn.Parameter(weight, requires_grad=False)

    for weight in (
        torch.zeros(200, 300).t(),
        torch.zeros(40, 60, 5)[:, ::2, 1],
        torch.zeros(()),
        torch.zeros(3, dtype=torch.float64),
        torch.zeros(3, 50, dtype=torch.int8),
        torch.zeros(3, 50, dtype=torch.complex64),
        torch.zeros(3, 50).to(torch.float8_e4m3fn),
        torch.zeros(3, 50, dtype=torch.bool),
    ):
        module: Any = Weights(weight)
        fingerprint = Fingerprint(module)
        assert fingerprint.difference(module) is None
        module.weight.data.copy_(torch.ones(()).to(weight.dtype))
        assert fingerprint.difference(module) == "weights were modified in place"


def test_a_change_beside_a_weight_in_its_storage_is_none() -> None:
    fused = torch.zeros(10, 100)
    module: Any = nn.Module()
    module.weight = nn.Parameter(fused[:, :50], requires_grad=False)
    fingerprint = Fingerprint(module)
    fused.data[:, 50:] = 1
    assert fingerprint.difference(module) is None
    fused.data[0, 0] = 1
    assert fingerprint.difference(module) == "weights were modified in place"


def test_a_change_inside_a_tensor_subclass_shows() -> None:
    module: Any = nn.Module()
    module.weight = nn.Parameter(TwoTensor(torch.zeros(3, 50), torch.zeros(3, 50)), requires_grad=False)
    fingerprint = Fingerprint(module)
    assert fingerprint.difference(module) is None
    module.weight.b.add_(1)
    assert fingerprint.difference(module) == "weights were modified in place"


def test_a_dead_model_is_not_stale(tiny_model: TinyModel) -> None:
    twin = Twin(tiny_model("llama"))
    gc.collect()
    assert twin._model() is None
    assert twin.stale_reason() is None


def test_a_twin_does_not_keep_its_model_alive(tiny_model: TinyModel) -> None:
    model = tiny_model("gemma2")
    twin = Twin(model)
    prove(model, twin)
    reference = twin._model
    del model
    gc.collect()
    assert reference() is None


def lora(model: PreTrainedModel) -> Any:
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    with warnings.catch_warnings():
        # PEFT asks transformers for a property that transformers renamed.
        warnings.simplefilter("ignore", FutureWarning)
        adapted = get_peft_model(model, config, adapter_name="first")
    adapted.add_adapter("second", config)
    return adapted.eval()


def test_adapters_are_served_and_each_switch_of_them_is_seen(model: PreTrainedModel) -> None:
    adapted = lora(model)

    def fresh() -> Twin:
        twin = Twin(adapted)
        prove(adapted, twin)
        assert twin.stale_reason() is None
        return twin

    twin = fresh()
    adapted.set_adapter("second")
    assert twin.stale_reason() is not None
    twin = fresh()
    with adapted.disable_adapter():
        assert twin.stale_reason() is not None
        disabled = fresh()
    assert disabled.stale_reason() is not None
    assert twin.stale_reason() is None
    adapted.base_model.model.model.layers[0].self_attn.q_proj.set_scale("second", 3.0)
    assert twin.stale_reason() is not None
    twin = fresh()
    adapted.merge_adapter()
    assert twin.stale_reason() is not None
    twin = fresh()
    adapted.unmerge_adapter()
    assert twin.stale_reason() is not None
    twin = fresh()
    adapted.base_model.model.model.layers[0].self_attn.q_proj.lora_B["second"].weight.data.add_(0.1)
    assert twin.stale_reason() == "weights were modified in place"


def test_offloaded_weights_are_watched_where_they_lie(model: PreTrainedModel) -> None:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    cpu_offload(model, state_dict=state)
    twin = Twin(model)
    model(torch.arange(3, 9)[None])
    assert twin.stale_reason() is None
    state["model.layers.1.mlp.up_proj.weight"].data.add_(0.1)
    assert twin.stale_reason() == "weights were modified in place"
    state["model.layers.1.mlp.up_proj.weight"] = torch.zeros(96, 64)
    assert twin.stale_reason() == "model.layers.1.mlp.up_proj.weight changed"


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_a_tensor_parallel_model_is_proven_and_watched(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "model.layers.*.self_attn.q_proj": ColwiseParallel(),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    }
    model = parallelize_module(model, mesh, plan)
    weight = model.model.layers[0].self_attn.q_proj.weight
    assert isinstance(weight, DTensor)
    twin = Twin(model)
    prove(model, twin)
    assert twin.stale_reason() is None
    weight.data.add_(0.1)
    assert twin.stale_reason() == "weights were modified in place"

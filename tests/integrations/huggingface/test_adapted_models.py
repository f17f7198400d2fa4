"""Quantised, adapted, compiled, offloaded and half-precision models get stock's tokens, both ways."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import gguf
import peft
import pytest
import torch
from oracle import assert_greedy, draw_prompts, stock_greedy
from stock_equality import assert_equals_stock, left_padded
from tiny_models import make_tiny
from transformers import AutoModelForCausalLM, PreTrainedModel, TorchAoConfig
from transformers.integrations.gguf import kernels
from transformers.integrations.gguf.dequant import dequantize
from transformers.integrations.gguf.utils import replace_with_gguf_modules

from paged_backend import Engine, SamplingParams
from paged_backend.errors import UnsupportedModel
from paged_backend.model.model_copy import copy_model

LENGTHS = (5, 23, 9)
NUM_TOKENS = 8
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
# In half precision, stock's choice counts where its best logit leads by this share of the largest.
LEADS = {torch.float16: 0.02, torch.bfloat16: 0.1}
# PEFT asks transformers for a property that transformers renamed.
ADAPTING = pytest.mark.filterwarnings("ignore::FutureWarning")


def assert_served(model: Any) -> None:
    """The engine gives what stock gives each prompt alone; ``generate`` what stock gives the padded batch."""
    prompts = draw_prompts(LENGTHS)
    expected = [stock_greedy(model, prompt, NUM_TOKENS) for prompt in prompts]
    with Engine(model, max_num_batched_tokens=16) as engine:
        outputs = engine.generate(prompts, GREEDY)
        assert engine.twin.stale_reason() is None
    for prompt, output, tokens in zip(prompts, outputs, expected, strict=True):
        assert_greedy(model, prompt, output.token_ids, tokens)
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert_equals_stock(model, left_padded(list(LENGTHS)), **options)


def memory(model: torch.nn.Module) -> set[tuple[int, int]]:
    """The addresses and sizes of the parameters' and buffers' memory, inside tensor subclasses too."""

    def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
        if not hasattr(tensor, "__tensor_flatten__"):
            return [tensor]
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return [part for value in inner if isinstance(value, torch.Tensor) for part in parts(value)]

    tensors = [part for tensor in [*model.parameters(), *model.buffers()] for part in parts(tensor)]
    return {(part.untyped_storage().data_ptr(), part.untyped_storage().nbytes()) for part in tensors}


def assert_no_weight_is_duplicated(model: PreTrainedModel) -> None:
    added = memory(copy_model(model)) - memory(model)
    # The frequencies of RoPE are the copy's own.
    assert sum(size for _, size in added) < 1000


@pytest.fixture
def packed_gguf(monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    """A tiny Llama whose matrices lie in GGUF blocks, in transformers' own modules for them.

    transformers packs few architectures of its own accord, and only where ggml's kernel, a download, can run; a plain
    stand-in takes its place here.
    """
    kind = gguf.GGMLQuantizationType.Q8_0

    def mul_mat_vec(weight: torch.Tensor, x: torch.Tensor, ggml_type: int, out_features: int) -> torch.Tensor:
        return x.float() @ dequantize(weight, ggml_type).reshape(out_features, -1).T

    names = dict.fromkeys(["dequantize", "get_rows", "mul_mat_id"])
    kernel = kernels.GgufKernel(SimpleNamespace(mul_mat_vec=mul_mat_vec, GEMV_TYPES={int(kind)}, **names))
    monkeypatch.setattr(kernels, "_gguf_kernel", kernel)
    model = make_tiny("llama")
    dense = {name: parameter.detach().numpy() for name, parameter in model.named_parameters() if parameter.dim() == 2}
    packed = replace_with_gguf_modules(model, dict.fromkeys(dense, int(kind)), kernel, torch.float32)
    assert packed.keys() == dense.keys()
    for name, module in packed.items():
        module.weight.copy_(torch.from_numpy(gguf.quants.quantize(dense[name], kind)))
    return model


def test_weights_packed_in_gguf_blocks_are_served_and_not_duplicated(packed_gguf: PreTrainedModel) -> None:
    assert packed_gguf.model.layers[0].mlp.up_proj.weight.dtype == torch.uint8
    assert_served(packed_gguf)
    assert_no_weight_is_duplicated(packed_gguf)


@pytest.mark.filterwarnings("ignore")
def test_int8_weights_of_torchao_are_served_and_not_duplicated(tmp_path: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig

    make_tiny("llama").save_pretrained(tmp_path)
    config = TorchAoConfig(quant_type=Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, dtype=torch.float32)
    assert type(model.model.layers[0].mlp.up_proj.weight).__name__ == "Int8Tensor"
    assert_served(model)
    assert_no_weight_is_duplicated(model)


def lora(model: PreTrainedModel) -> Any:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config, adapter_name="one")
    adapted.add_adapter("two", config)
    return adapted


@ADAPTING
def test_one_adapter_at_a_time_is_served() -> None:
    adapted = lora(make_tiny("llama"))
    tokens = []
    for name in ("one", "two"):
        adapted.set_adapter(name)
        assert_served(adapted)
        tokens.append(stock_greedy(adapted, [5, 6, 7], NUM_TOKENS))
    with adapted.disable_adapter():
        assert_served(adapted)
    assert tokens[0] != tokens[1]


@ADAPTING
def test_an_adapter_for_each_row_is_refused_by_name() -> None:
    adapted = lora(make_tiny("llama")).eval()
    inputs = left_padded([5, 9])
    with pytest.raises(UnsupportedModel, match="adapter_names"):
        adapted.generate(**inputs, adapter_names=["one", "two"], max_new_tokens=4, cache_impl="paged", do_sample=False)


def compiled(model: PreTrainedModel, folder: Path) -> Any:
    return torch.compile(model, backend="eager")


def offloaded_to_memory(model: PreTrainedModel, folder: Path) -> Any:
    return accelerate.cpu_offload(model, execution_device="cpu")


def offloaded_to_disk(model: PreTrainedModel, folder: Path) -> Any:
    return accelerate.disk_offload(model, folder, execution_device="cpu")


def dispatched(model: PreTrainedModel, folder: Path) -> Any:
    places = dict.fromkeys(["model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"], "cpu")
    places |= {"model.layers.1": "disk", "model.layers.2": "disk"}
    return accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=folder)


@pytest.mark.parametrize("change", [compiled, offloaded_to_memory, offloaded_to_disk, dispatched])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.filterwarnings("ignore:You are calling .generate")
def test_a_model_that_was_wrapped_or_moved_is_served(
    family: str, change: Callable[[PreTrainedModel, Path], Any], tmp_path: Path
) -> None:
    assert_served(change(make_tiny(family), tmp_path))


@pytest.mark.parametrize("dtype", LEADS, ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_half_precision_gives_the_tokens_that_stock_is_sure_of(family: str, dtype: torch.dtype) -> None:
    model = make_tiny(family).to(dtype)
    inputs = left_padded(list(range(1, 41, 2)))
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    stock = model.generate(**inputs, **options, return_dict_in_generate=True, output_scores=True)
    width = inputs["input_ids"].shape[1]
    prompts = [row[mask.bool()].tolist() for row, mask in zip(*inputs.values(), strict=True)]
    with Engine(model) as engine:
        outputs = [output.token_ids for output in engine.generate(prompts, GREEDY)]
    paged = model.generate(**inputs, **options, cache_impl="paged")[:, width:].tolist()
    compared = 0
    for row, expected in enumerate(stock.sequences[:, width:].tolist()):
        for step, scores in enumerate(stock.scores):
            best = scores[row].float().topk(2).values
            if best[0] - best[1] < LEADS[dtype] * scores[row].float().abs().max():
                break
            assert outputs[row][step] == paged[row][step] == expected[step]
            compared += 1
    assert compared >= 8

"""The twin: what it reads off a model, what it shares with it, what it leaves alone, and whom it refuses."""

from __future__ import annotations

import copy
import filecmp
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_forward import prefill_logits
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    LlamaForCausalLM,
    PreTrainedModel,
)

from paged_backend.errors import UnsupportedModel
from paged_backend.kernels import FULL, MaskRule
from paged_backend.model.twin import ExpandedCacheWarning, Twin

TinyModel = Callable[..., PreTrainedModel]
WINDOW, CHUNK = MaskRule("window", 8), MaskRule("chunk", 8)
PROMPT = [17, 3, 250, 41, 99, 100, 7, 63, 201, 5, 88, 144]


def small(model_type: str, auto: Any = AutoModelForCausalLM, **arguments: Any) -> PreTrainedModel:
    """A tiny model of a family that the shared fixture does not build."""
    torch.manual_seed(0)
    return auto.from_config(AutoConfig.for_model(model_type, vocab_size=256, **arguments)).eval()


SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    ("family", "rules"),
    [
        ("llama", [FULL, FULL, FULL]),
        ("mistral", [WINDOW, WINDOW, WINDOW]),
        ("qwen3", [FULL, FULL, FULL]),
        ("gemma2", [WINDOW, FULL, WINDOW]),
        ("gemma3", [WINDOW, FULL, WINDOW]),
        ("gpt_oss", [WINDOW, FULL, WINDOW]),
        # These say their window or chunk only in the mask.
        ("phimoe", [WINDOW, WINDOW, WINDOW]),
        ("llama4", [CHUNK, FULL, CHUNK]),
    ],
)
def test_each_layer_has_the_mask_rule_that_stock_attention_gets(
    tiny_model: TinyModel, family: str, rules: list[MaskRule]
) -> None:
    assert [layer.rule for layer in Twin(tiny_model(family)).layers] == rules


def test_qwen2_moe_has_its_window_from_the_mask() -> None:
    model = small(
        "qwen2_moe",
        **SHAPE,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        use_sliding_window=True,
        sliding_window=8,
        layer_types=["full_attention", "sliding_attention"],
    )
    assert [layer.rule for layer in Twin(model).layers] == [FULL, WINDOW]


def test_a_window_longer_than_the_probe_is_read_off_the_mask(tiny_model: TinyModel) -> None:
    assert Twin(tiny_model("mistral", sliding_window=4096)).layers[0].rule == MaskRule("window", 4096)


def test_layers_are_described_in_the_order_in_which_they_run(tiny_model: TinyModel) -> None:
    twin = Twin(tiny_model("llama"))
    assert [layer.name for layer in twin.layers] == [f"model.layers.{index}.self_attn" for index in range(3)]
    first = twin.layers[0]
    assert (first.num_heads, first.num_kv_heads, first.key_dim, first.value_dim) == (4, 2, 16, 16)
    assert (first.dtype, first.device) == (torch.float32, torch.device("cpu"))
    assert (twin.dtype, twin.device, twin.vocab_size) == (torch.float32, torch.device("cpu"), 256)


def test_latent_attention_is_served_expanded_with_a_warning(tiny_model: TinyModel) -> None:
    # 3 layers of 4 heads of 24 + 16 elements of 4 bytes.
    with pytest.warns(ExpandedCacheWarning, match="1920 bytes a token"):
        layer = Twin(tiny_model("deepseek_v2")).layers[0]
    assert (layer.num_kv_heads, layer.key_dim, layer.value_dim) == (4, 24, 16)


@pytest.mark.parametrize(
    ("family", "overrides", "limit"),
    [
        ("gpt2", {}, 256),
        # OPT's table has two more rows, below position 0.
        ("opt", {}, 256),
        ("phi3_longrope", {}, 32),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}, 256),
        ("llama", {}, None),
    ],
    ids=str,
)
def test_positions_are_limited_where_the_model_limits_them(
    tiny_model: TinyModel, family: str, overrides: dict[str, Any], limit: int | None
) -> None:
    twin = Twin(tiny_model(family, **overrides))
    assert twin.max_positions == limit
    assert twin.advertised_positions == 256


def test_a_gathered_table_of_rotations_limits_positions() -> None:
    assert Twin(small("gptj", n_embd=64, n_layer=2, n_head=4, rotary_dim=8, n_positions=96)).max_positions == 96


def test_rope_that_reads_the_longest_position_of_a_batch_is_refused_when_it_has_no_known_limit(
    tiny_model: TinyModel,
) -> None:
    model = tiny_model("llama")
    rope = model.model.rotary_emb

    def scaled(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return type(self).forward(self, x, position_ids * (1 + position_ids.max() // 256))

    rope.forward = scaled.__get__(rope)
    with pytest.raises(
        UnsupportedModel, match=r"LlamaForCausalLM .* change when another request is at position 1048575"
    ):
        Twin(model)


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization", "ignore:.*quantized tensor creation functions")
def test_layers_that_round_activations_by_the_whole_pass_are_refused_by_name(tiny_model: TinyModel) -> None:
    model = torch.ao.quantization.quantize_dynamic(tiny_model("llama"), {torch.nn.Linear}, dtype=torch.qint8)
    with pytest.raises(UnsupportedModel, match=r"quantize_dynamic, .*quantize='int8'"):
        Twin(model)


def test_a_head_without_weights_computes_where_the_model_does(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    model.lm_head = torch.nn.Identity()
    assert Twin(model).layers


def test_the_twin_shares_weights_and_copies_what_a_forward_pass_writes(tiny_model: TinyModel) -> None:
    model = tiny_model("phi3_longrope")
    twin = Twin(model)
    theirs, ours = dict(model.named_parameters()), dict(twin.module.named_parameters())
    assert theirs.keys() == ours.keys()
    assert all(ours[name] is parameter for name, parameter in theirs.items())
    assert twin.module.model.rotary_emb.inv_freq is not model.model.rotary_emb.inv_freq


def test_positions_past_the_original_length_leave_the_users_long_rope_alone(tiny_model: TinyModel) -> None:
    model = tiny_model("phi3_longrope")
    twin = Twin(model)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    prefill_logits(twin, [PROMPT * 4])
    assert not torch.equal(twin.module.model.rotary_emb.inv_freq, before["model.rotary_emb.inv_freq"])
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_the_users_model_is_untouched(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = tiny_model("gemma2").train()
    attention = model.config._attn_implementation
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attributes = {name: dict(module.__dict__) for name, module in model.named_modules()}
    model.save_pretrained(tmp_path / "before")
    prefill_logits(Twin(model), [PROMPT])
    model.save_pretrained(tmp_path / "after")
    assert model.config._attn_implementation == attention
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == attributes
    names = sorted(path.name for path in (tmp_path / "before").iterdir())
    assert filecmp.cmpfiles(tmp_path / "before", tmp_path / "after", names, shallow=False)[0] == names


def test_stock_generate_gives_the_same_tokens_while_a_twin_runs(tiny_model: TinyModel) -> None:
    model = tiny_model("mistral")
    prompt = torch.tensor([PROMPT])
    before = model.generate(prompt, max_new_tokens=8, do_sample=False)
    prefill_logits(Twin(model), [PROMPT])
    assert torch.equal(model.generate(prompt, max_new_tokens=8, do_sample=False), before)


def test_packed_logits_are_those_of_the_lone_forward(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    prompts = [PROMPT, PROMPT[3:8], PROMPT[:1]]
    for prompt, logits in zip(prompts, prefill_logits(Twin(model), prompts), strict=True):
        with torch.no_grad():
            torch.testing.assert_close(logits, model(torch.tensor([prompt])).logits[0], atol=1e-4, rtol=1e-4)


def test_rows_are_taken_from_all_logits_where_the_model_cannot_choose_them(tiny_model: TinyModel) -> None:
    class Plain(LlamaForCausalLM):
        def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, use_cache: bool) -> tuple[Any, ...]:
            return super().forward(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache).to_tuple()

    model = tiny_model("llama")
    expected = prefill_logits(Twin(model), [PROMPT])[0]
    model.__class__ = Plain
    torch.testing.assert_close(prefill_logits(Twin(model), [PROMPT])[0], expected)


@pytest.mark.parametrize(
    ("model_type", "arguments", "reason"),
    [
        (
            "bert",
            {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64},
            "BertLMHeadModel .* neither causal",
        ),
        ("bloom", {"hidden_size": 64, "n_layer": 2, "n_head": 4}, "BloomForCausalLM .* never goes through"),
        (
            "falcon",
            {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True},
            "FalconForCausalLM .* never goes through",
        ),
        ("doge", {**SHAPE, "head_dim": 16}, "DogeForCausalLM .* mask of its own making"),
        (
            "deepseek_v32",
            {**SHAPE, "num_key_value_heads": 4, "n_routed_experts": 2, "n_group": 1, "topk_group": 1},
            "DeepseekV32ForCausalLM .* indexed_attention",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_a_model_that_blocks_cannot_serve_is_refused_by_name(
    model_type: str, arguments: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        Twin(small(model_type, **arguments))


def test_an_encoder_decoder_is_refused() -> None:
    model = small("bart", AutoModelForSeq2SeqLM, d_model=32, encoder_layers=1, decoder_layers=1)
    with pytest.raises(UnsupportedModel, match=r"BartForConditionalGeneration .* encoder-decoder"):
        Twin(model)


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"LlamaModel .* no language-model head"):
        Twin(small("llama", AutoModel, **SHAPE))


@pytest.mark.parametrize("model", ["gpt2", torch.nn.Linear(2, 2)], ids=["text", "module"])
def test_what_is_no_transformers_model_is_refused(model: Any) -> None:
    with pytest.raises(UnsupportedModel, match=rf"{type(model).__name__} .* not a transformers model"):
        Twin(model)


def test_a_model_without_weights_is_refused() -> None:
    with torch.device("meta"):
        model = small("llama", **SHAPE)
    with pytest.raises(UnsupportedModel, match="meta device"):
        Twin(model)


def test_a_model_made_in_inference_mode_has_a_twin(tiny_model: TinyModel) -> None:
    with torch.inference_mode():
        model = tiny_model("phi3_longrope").to(torch.bfloat16)
    twin = Twin(model)
    assert twin.stale_reason() is None
    assert prefill_logits(twin, [PROMPT])[0].isfinite().all()


def test_layers_with_one_index_are_refused(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    model.model.layers[2].self_attn.layer_idx = 0
    with pytest.raises(UnsupportedModel, match=r"layer index 0 is shared by model.layers.0.self_attn and model.layers"):
        Twin(model)


def test_layers_without_an_index_are_told_apart(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn.layer_idx = None
    assert len(Twin(model).layers) == 3


def test_a_module_that_runs_twice_with_one_place_in_stocks_cache_is_refused(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    model.model.layers[1] = model.model.layers[0]
    with pytest.raises(UnsupportedModel, match="as where layers share a place in it"):
        Twin(model)


def test_sharded_parameters_are_refused(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    model.lm_head.weight.ds_id = 0
    with pytest.raises(UnsupportedModel, match="ZeRO-3"):
        Twin(model)


def test_fully_sharded_modules_are_refused(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    layer = model.model.layers[0]
    layer.__class__ = type("Sharded", (type(layer), type("FSDPModule", (), {})), {})
    with pytest.raises(UnsupportedModel, match="FSDP"):
        Twin(model)


def test_a_forward_that_fails_is_a_refusal_with_its_error(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    model.model.norm.weight = torch.nn.Parameter(torch.ones(7))
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM .* RuntimeError"):
        Twin(model)


def test_probe_tokens_are_ordinary_and_leave_the_global_generators_alone(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    model.config.eos_token_id = list(range(2, 100))
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    ids = Twin(model).sample_token_ids(150)
    assert torch.equal(torch.rand(2), expected)
    assert len(set(ids)) == 150
    assert min(ids) >= 100
    assert max(ids) < 256


def test_copying_a_model_that_holds_its_twin_does_not_copy_the_twin(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    twin = Twin(model)
    assert copy.deepcopy(twin) is twin


def test_two_threads_can_make_twins_of_one_model(tiny_model: TinyModel) -> None:
    model = tiny_model("gemma2")
    twins: list[Twin] = []
    threads = [threading.Thread(target=lambda: twins.append(Twin(model))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, second = (prefill_logits(twin, [PROMPT])[0] for twin in twins)
    assert torch.equal(first, second)

"""The proof at load: every family comes out right, each mutant is caught, and the model is left as it was."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from recurrent_models import make_recurrent
from tiny_models import FAMILIES
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, MoshiForCausalLM, PreTrainedModel

from paged_backend.errors import UnsupportedModel
from paged_backend.kernels import FULL, AttentionVariant, Backend, MaskRule
from paged_backend.model.attention import PagedLayer
from paged_backend.model.proof import prove
from paged_backend.model.twin import ExpandedCacheWarning, Twin

TinyModel = Callable[..., PreTrainedModel]


def make_twin(model: PreTrainedModel) -> Twin:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExpandedCacheWarning)
        return Twin(model)


# Half precisions take turns.
PRECISIONS = [(family, torch.float32) for family in FAMILIES] + list(
    zip(FAMILIES, itertools.cycle([torch.bfloat16, torch.float16]), strict=False)
)


@pytest.mark.parametrize(("family", "dtype"), PRECISIONS, ids=str)
def test_a_supported_family_is_proven(tiny_model: TinyModel, family: str, dtype: torch.dtype) -> None:
    model = tiny_model(family).to(dtype)
    prove(model, make_twin(model))


@pytest.mark.parametrize(
    ("model_type", "arguments"),
    [
        # These drop the extra keyword arguments of forward on the way to attention.
        ("stablelm", {}),
        ("nemotron", {}),
        ("cohere2", {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}),
        (
            "qwen2_moe",
            {
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "shared_expert_intermediate_size": 32,
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["full_attention", "sliding_attention"],
            },
        ),
        # The last two layers attend to the keys and values of the first two.
        (
            "gemma4_text",
            {
                "head_dim": 16,
                "num_hidden_layers": 4,
                "num_kv_shared_layers": 2,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "sliding_window": 8,
                "hidden_size_per_layer_input": 8,
                "vocab_size_per_layer_input": 256,
            },
        ),
        ("gpt_neox", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_families_with_habits_of_their_own_are_proven(model_type: str, arguments: dict[str, Any]) -> None:
    shape: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**shape, **arguments})).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    prove(model, Twin(model))


@pytest.mark.parametrize(("family", "mode"), [("mamba", "stepped"), ("falcon_mamba", "stepped"), ("mamba2", "native")])
def test_a_state_that_a_chunk_ignores_is_noticed_though_half_precision_rounds_as_much(family: str, mode: str) -> None:
    model = make_recurrent(family).to(torch.bfloat16)
    twin = Twin(model)
    prove(model, twin)
    assert twin.state_mode == mode


def change_rules(twin: Twin, change: Callable[[MaskRule], MaskRule]) -> None:
    twin.layers = [dataclasses.replace(layer, rule=change(layer.rule)) for layer in twin.layers]
    # Leave it to the numbers alone.
    twin.layer_indices = [None] * len(twin.layers)


def change_attention(monkeypatch: pytest.MonkeyPatch, **changes: Callable[[Any], Any]) -> None:
    attend = PagedLayer.attend

    def changed(self: PagedLayer, query: Any, key: Any, value: Any, variant: AttentionVariant) -> torch.Tensor:
        changed = {name: change(getattr(variant, name)) for name, change in changes.items()}
        return attend(self, query, key, value, variant._replace(**changed))

    monkeypatch.setattr(PagedLayer, "attend", changed)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3", "phimoe", "gpt_oss", "llama4"])
@pytest.mark.parametrize("off_by", [-1, 1])
def test_a_window_or_chunk_off_by_one_is_caught(tiny_model: TinyModel, family: str, off_by: int) -> None:
    model = tiny_model(family)
    twin = Twin(model)
    change_rules(twin, lambda rule: rule if rule == FULL else MaskRule(rule.kind, rule.size + off_by))
    with pytest.raises(UnsupportedModel, match="gives other logits"):
        prove(model, twin)


@pytest.mark.parametrize("family", ["mistral", "llama4"])
def test_an_ignored_window_or_chunk_is_caught(tiny_model: TinyModel, family: str) -> None:
    model = tiny_model(family)
    twin = Twin(model)
    change_rules(twin, lambda rule: FULL)
    with pytest.raises(UnsupportedModel, match="gives other logits"):
        prove(model, twin)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "deepseek_v2", "phi3_longrope", "qwen3"])
def test_a_scale_five_percent_off_is_caught(
    tiny_model: TinyModel, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family)
    change_attention(monkeypatch, scale=lambda scale: 1.05 * scale)
    with pytest.raises(UnsupportedModel, match="gives other logits"):
        prove(model, make_twin(model))


@pytest.mark.parametrize(("family", "feature"), [("gemma2", "softcap"), ("gpt_oss", "sinks")])
def test_a_dropped_feature_is_caught(
    tiny_model: TinyModel, family: str, feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family)
    change_attention(monkeypatch, **{feature: lambda _: None})
    with pytest.raises(UnsupportedModel, match="gives other logits"):
        prove(model, Twin(model))


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.parametrize("norm", ["q_norm", "k_norm"])
def test_a_skipped_norm_of_queries_or_keys_is_caught(tiny_model: TinyModel, family: str, norm: str) -> None:
    model = tiny_model(family)
    twin = Twin(model)
    setattr(twin.module.model.layers[1].self_attn, norm, torch.nn.Identity())
    with pytest.raises(UnsupportedModel, match="gives other logits"):
        prove(model, twin)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_heads_grouped_in_another_order_are_caught(
    tiny_model: TinyModel, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = PagedLayer.attend

    def interleaved(self: PagedLayer, query: Any, key: Any, *rest: Any) -> torch.Tensor:
        # Query head h meets key head h modulo their number, where neighbours should share one.
        order = torch.arange(query.shape[1]).view(-1, key.shape[1]).T.flatten()
        out = torch.empty_like(query)
        out[:, order] = attend(self, query[:, order], key, *rest)
        return out

    model = tiny_model(family)
    monkeypatch.setattr(PagedLayer, "attend", interleaved)
    with pytest.raises(UnsupportedModel, match="gives other logits"):
        prove(model, Twin(model))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_position_off_by_one_after_the_first_chunk_is_caught(
    tiny_model: TinyModel, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family)
    twin = Twin(model)
    logits = twin.logits

    def shifted(ids: torch.Tensor, positions: torch.Tensor, *rest: object) -> torch.Tensor:
        return logits(ids, positions + (positions > 9), *rest)

    monkeypatch.setattr(twin, "logits", shifted)
    with pytest.raises(UnsupportedModel, match="gives other logits"):
        prove(model, twin)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3_longrope"])
def test_rope_of_keys_off_by_one_from_that_of_queries_is_caught(
    tiny_model: TinyModel, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # RoPE alone cannot tell a shift of queries and keys together, nor need it.
    model = tiny_model(family)
    twin = Twin(model)
    rope = twin.module.model.rotary_emb
    forward = rope.forward

    def shifted(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        # Later chunks alone: tokens of earlier ones keep their places.
        return forward(x, position_ids + (position_ids[:, :1] > 0))

    monkeypatch.setattr(rope, "forward", shifted)
    with pytest.raises(UnsupportedModel, match="gives other logits"):
        prove(model, twin)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_wrong_window_is_caught_in_half_precision(tiny_model: TinyModel, dtype: torch.dtype) -> None:
    model = tiny_model("mistral").to(dtype)
    twin = Twin(model)
    change_rules(twin, lambda rule: MaskRule("window", 4))
    with pytest.raises(UnsupportedModel, match="gives other logits"):
        prove(model, twin)


def test_logits_that_are_not_numbers_are_caught(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    logits = Twin.logits
    monkeypatch.setattr(Twin, "logits", lambda self, *batch: logits(self, *batch) * torch.nan)
    with pytest.raises(UnsupportedModel, match="gives other logits"):
        prove(model, Twin(model))


def test_tokens_that_the_model_rules_out_do_not_blind_the_proof(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")

    def rule_out(module: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        output[..., 7] = float("-inf")
        output[..., 8] = torch.finfo(output.dtype).min
        return output

    model.lm_head.register_forward_hook(rule_out)
    prove(model, Twin(model))
    change_attention(monkeypatch, scale=lambda scale: 1.05 * scale)
    with pytest.raises(UnsupportedModel, match="gives other logits"):
        prove(model, Twin(model))


def test_a_decoder_that_counts_positions_itself_is_refused_with_the_reason() -> None:
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("bart", vocab_size=256, d_model=32, decoder_layers=1, decoder_attention_heads=2)
    ).eval()
    torch.nn.init.normal_(model.model.decoder.embed_positions.weight)
    with pytest.raises(UnsupportedModel, match=r"BartForCausalLM .* takes no position_ids"):
        prove(model, Twin(model))


def test_a_model_whose_cache_forgets_what_its_mask_shows_is_refused() -> None:
    # Moshi masks nothing but keeps a window; no proof of a few tokens could notice one of 3000.
    config = AutoConfig.for_model(
        "moshi",
        vocab_size=256,
        hidden_size=64,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        audio_vocab_size=16,
        sliding_window=3000,
    )
    model = MoshiForCausalLM(config).eval()
    with pytest.raises(UnsupportedModel, match=r"MoshiForCausalLM .* is full, but the model's own cache keeps 3000"):
        prove(model, Twin(model))


def test_a_model_without_a_cache_is_proven(tiny_model: TinyModel) -> None:
    class Plain(LlamaForCausalLM):
        def forward(self, input_ids: torch.Tensor, position_ids: Any = None, use_cache: Any = None) -> tuple[Any, ...]:
            return super().forward(input_ids=input_ids, position_ids=position_ids, use_cache=False).to_tuple()

    model = tiny_model("llama")
    model.__class__ = Plain
    prove(model, Twin(model))


def test_a_model_that_decodes_otherwise_than_it_prefills_is_refused(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")

    def skip(module: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        return output * 0 if output.shape[1] == 1 else output

    model.model.layers[1].mlp.register_forward_hook(skip)
    with pytest.raises(UnsupportedModel, match="gives other logits"):
        prove(model, Twin(model))


def test_positions_too_few_for_a_proof_are_refused(tiny_model: TinyModel) -> None:
    model = tiny_model("gpt2", n_positions=6)
    with pytest.raises(UnsupportedModel, match=r"GPT2LMHeadModel .* positions end at 6, too few"):
        prove(model, Twin(model))


def test_an_error_in_the_proof_is_a_refusal_that_names_it(tiny_model: TinyModel) -> None:
    def calculate(*_: Any) -> None:
        raise ValueError("no abacus")

    model = tiny_model("llama")
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM .* ValueError.*no abacus"):
        prove(model, Twin(model), Backend("abacus", {"store_kv": calculate}))


@pytest.mark.parametrize("family", ["gemma2", "phi3_longrope"])
def test_the_proof_leaves_no_trace_on_the_model(tiny_model: TinyModel, family: str) -> None:
    model = tiny_model(family)
    model(torch.arange(3, 43)[None])
    model.model.layers[1].train()
    twin = Twin(model)
    attributes = {name: dict(module.__dict__) for name, module in model.named_modules()}
    tensors = {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    prove(model, twin)
    assert torch.equal(torch.rand(3), expected)
    assert [name for name, module in model.named_modules() if module.__dict__ != attributes[name]] == []
    assert all(
        torch.equal(tensor, tensors[name]) for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    )
    assert twin.stale_reason() is None


def test_a_proof_that_fails_leaves_no_trace_either(tiny_model: TinyModel) -> None:
    model = tiny_model("llama").train()
    twin = Twin(model)
    model.lm_head.forward = lambda hidden: hidden / 0 if model.training else 1 / 0
    with pytest.raises(UnsupportedModel, match="it does not run with its own cache: division by zero"):
        prove(model, twin)
    assert all(module.training for module in model.modules())

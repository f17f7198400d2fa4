"""Tiny random models of real families, with weights drawn large enough that a wrong attention shows in the logits."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tiny_tokenizers import byte_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 256
MAX_POSITIONS = 256

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GPT2_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": MAX_POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_OPT_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_SLIDING_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
_CHUNKED_LAYERS = ["chunked_attention", "full_attention", "chunked_attention"]
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}

# name -> (transformers model_type, config arguments)
FAMILIES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _SHAPE),
    "mistral": ("mistral", {**_SHAPE, "sliding_window": 8}),
    "qwen2": ("qwen2", _SHAPE),
    "qwen3": ("qwen3", _SHAPE),
    "gemma2": (
        "gemma2",
        {
            **_SHAPE,
            "sliding_window": 8,
            "layer_types": _SLIDING_LAYERS,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {**_SHAPE, "sliding_window": 8, "layer_types": _SLIDING_LAYERS, "query_pre_attn_scalar": 16},
    ),
    "gpt2": ("gpt2", _GPT2_SHAPE),
    "opt": ("opt", _OPT_SHAPE),
    "phi3_longrope": ("phi3", {**_SHAPE, "original_max_position_embeddings": 32, "rope_parameters": _LONGROPE}),
    "phimoe": ("phimoe", {**_SHAPE, **_EXPERTS, "sliding_window": 8}),
    "llama4": (
        "llama4_text",
        {
            **_SHAPE,
            **_EXPERTS,
            "intermediate_size_mlp": 96,
            "attention_chunk_size": 8,
            "layer_types": _CHUNKED_LAYERS,
            "no_rope_layers": [1, 0, 1],
        },
    ),
    "deepseek_v2": ("deepseek_v2", {**_SHAPE, **_MLA}),
    "gpt_oss": (
        "gpt_oss",
        {**_SHAPE, **_EXPERTS, "sliding_window": 8, "layer_types": _SLIDING_LAYERS, "rope_parameters": _YARN},
    ),
}


def make_tiny(name: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Build a float32 model of `FAMILIES` in eval mode; keyword overrides go to its config.

    Weights are drawn per parameter name, so two models that differ by an override of no shape have equal weights.
    """
    model_type, arguments = FAMILIES[name]
    config = AutoConfig.for_model(model_type, **{**arguments, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    draw_weights(model, seed)
    return model


@torch.no_grad()
def draw_weights(model: PreTrainedModel, seed: int = 0) -> None:
    """Draw every parameter large enough that each feature shows, from a stream of its own that its name chooses."""
    embeddings = getattr(model.get_input_embeddings(), "weight", None)
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            # Norm weights, biases and attention sinks: spread around their initial value.
            parameter.add_(noise, alpha=0.2)
        else:
            # A large tied embedding would drown attention in the residual stream: the model repeats its input.
            parameter.copy_(noise * (0.05 if parameter is embeddings else 0.2))


def save_tiny(folder: Path, family: str = "llama", max_positions: int = 2048) -> Path:
    """Save a tiny model of `family` and a tokenizer of bytes, as `from_pretrained` reads them; returns the folder."""
    tokenizer = byte_tokenizer()
    make_tiny(family, vocab_size=len(tokenizer), max_position_embeddings=max_positions).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

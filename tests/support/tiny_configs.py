"""Tiny configurations of any causal language model of the installed transformers, made from the class's own default."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

VOCAB_SIZE = 256

# What an attribute of this name becomes wherever a default configuration has it. Windows and chunks are small enough
# to be crossed by a few tokens.
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "unpadded_vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "n_ctx": 128,
    "max_seq_len": 128,
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "dim_model": 64,
    "embedding_size": 64,
    "embed_dim": 64,
    "word_embed_proj_dim": 64,
    "mamba_d_ssm": 64,
    "lru_width": 64,
    "intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "n_inner": 96,
    "ffn_dim": 96,
    "dff": 96,
    "dim_ff": 96,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "ffn_hidden_size": 96,
    "num_hidden_layers": 3,
    "n_layer": 3,
    "n_layers": 3,
    "num_layers": 3,
    "decoder_layers": 3,
    "encoder_layers": 3,
    "num_decoder_layers": 3,
    "depth": 2,
    "num_attention_heads": 4,
    "swa_num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "num_encoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "swa_num_key_value_heads": 2,
    "num_global_key_value_heads": 2,
    "kv_n_heads": 2,
    "head_dim": 16,
    "swa_head_dim": 16,
    "global_head_dim": 16,
    "dim_head": 16,
    "rotary_dim": 8,
    "d_kv": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 8,
    "sliding_window_size": 8,
    "window_size": 8,
    "attention_window_size": 8,
    "attention_chunk_size": 8,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "moe_topk": 2,
    "moe_top_k": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    # The first layer is dense, as in checkpoints that mix both kinds.
    "mlp_only_layers": [0],
    "num_dense_layers": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "mlp_hidden_size": 32,
    "router_hidden_size": 16,
    "hidden_size_per_layer_input": 8,
    "lora_rank": 8,
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "image_size": 32,
    "patch_size": 8,
    "audio_vocab_size": 16,
    # Scans of recurrent layers cross a piece of this length within a few tokens too.
    "chunk_size": 16,
    "mamba_chunk_size": 16,
    "mamba_d_state": 16,
    "state_size": 16,
    "ssm_state_size": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "num_mel_bins": 16,
}
# What the rules above cannot guess, by model type; it wins over them. An ellipsis leaves an attribute to the class.
_SHARED_KV = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}
_THREE_ROPE_LAYERS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
# Defaults of some classes have fewer kinds of layers than their checkpoints.
_STATE_AND_ATTENTION = ["linear_attention", "full_attention", "linear_attention"]
_DENSE_AND_SPARSE = ["dense", "sparse", "sparse"]
_SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "cohere2_moe": {"mlp_layer_types": _DENSE_AND_SPARSE},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _THREE_ROPE_LAYERS}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "falcon_h1": {"mamba_n_heads": 8},
    "gemma3n_text": {**_SHARED_KV, "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0]},
    "gemma4_text": _SHARED_KV,
    "granitemoehybrid": {"layer_types": _STATE_AND_ATTENTION, "mamba_n_heads": 8, "mamba_d_head": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "mlp_layer_types": _DENSE_AND_SPARSE,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1], [["local"], 1]]},
    # Its head_dim is that of the rotary part alone.
    "longcat_flash": {"head_dim": 8},
    "llama4_text": {"moe_layers": [1]},
    "mellum": {"mlp_layer_types": _DENSE_AND_SPARSE},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2},
    "minimax": {"block_size": 8},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16},
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "phi4_multimodal_audio": {"nemo_conv_channels": 64, "num_blocks": 2},
    "qwen4_exp_text": {
        "hc_lowrank": 16,
        "ple_embed_dim": 16,
        "ple_layer_ids": [1],
        "ngram_vocab_size_base": 64,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 1,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "reformer": {"axial_pos_embds": False},
    "roc_bert": {"shape_vocab_size": 64, "pronunciation_vocab_size": 64},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 5, "layers_block_type": ["linear_attention", "hybrid"] * 2 + ["linear_attention"]},
    "zamba2": {
        "mamba_d_state": 16,
        "attention_head_dim": ...,
        "mamba_headdim": ...,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
    },
    "zaya": {"num_experts_per_tok": 1},
}
_OFTEN_UNSET = ("head_dim", "num_key_value_heads", "num_experts_per_tok", "n_routed_experts", "n_shared_experts")
_TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def tiny_config(model_class: type[PreTrainedModel]) -> PreTrainedConfig:
    """A configuration with which ``model_class`` is tiny and still has each kind of layer that its default has."""
    config_class: Any = model_class.config_class
    config = _tiny(config_class)
    # Encoders that can also decode.
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    return config


def _tiny(config_class: Any) -> Any:
    default = config_class()
    names = {name for name in vars(default) if not name.startswith("_")}
    # A property is computed from the rest.
    names -= {name for name in names if isinstance(getattr(config_class, name, None), property)}
    common = {own: name for name, own in config_class.attribute_map.items()}
    num_layers = next((vars(default)[name] for name in _LAYER_COUNTS if name in names), None)
    small: dict[str, Any] = {}
    special_ids = iter(range(VOCAB_SIZE - 1, 0, -1))
    for name in sorted(names):
        value = vars(default)[name]
        known = name if name in _SMALL else common.get(name, name)
        if isinstance(value, PreTrainedConfig):
            small[name] = _tiny(type(value))
        elif name in _TOKEN_IDS:
            small[name] = _TOKEN_IDS[name]
        elif name.endswith(("token_id", "token_index")) and isinstance(value, int):
            small[name] = next(special_ids)
        elif known in _SMALL and (value is not None or known in _OFTEN_UNSET):
            small[name] = _SMALL[known]
        elif isinstance(value, list) and len(value) == num_layers and name not in _DERIVED:
            small[name] = _fewer(value, _SMALL["num_hidden_layers"])
    if "kv_lora_rank" in small:
        # Latent attention has as many heads of keys as of queries, and no one head_dim.
        small["num_key_value_heads"] = small["num_attention_heads"]
        small.pop("head_dim", None)
    small.update(_SPECIAL.get(config_class.model_type, {}))
    return config_class(**{name: value for name, value in small.items() if value is not ...})


_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_DERIVED = ("attention_layers",)


def _fewer(per_layer: list[Any], count: int) -> list[Any]:
    """``count`` entries that begin with each distinct one of ``per_layer`` in the order of their first appearance."""
    kinds: list[Any] = []
    for kind in per_layer:
        if kind not in kinds:
            kinds.append(kind)
    return [kinds[index % len(kinds)] for index in range(count)]

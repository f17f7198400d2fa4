"""Models of the shapes of real checkpoints that keep recurrent state, with few layers and random weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers
from transformers import PreTrainedModel

_MIXING, _CONVOLVING, _ATTENDING = "linear_attention", "conv", "full_attention"


def _qwen() -> PreTrainedModel:
    config = transformers.Qwen3_5TextConfig(
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        layer_types=[_MIXING, _MIXING, _MIXING, _ATTENDING],
    )
    return transformers.Qwen3_5ForCausalLM(config)


def _granite() -> PreTrainedModel:
    config = transformers.GraniteMoeHybridConfig(
        vocab_size=8192,
        hidden_size=2048,
        intermediate_size=8192,
        shared_intermediate_size=8192,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_local_experts=0,
        mamba_n_heads=64,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_n_groups=1,
        mamba_expand=2,
        layer_types=[_MIXING, _MIXING, _MIXING, _ATTENDING],
    )
    return transformers.GraniteMoeHybridForCausalLM(config)


def _lfm2() -> PreTrainedModel:
    config = transformers.Lfm2Config(
        vocab_size=8192,
        hidden_size=2048,
        intermediate_size=12288,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=8,
        conv_L_cache=3,
        layer_types=[_CONVOLVING, _CONVOLVING, _ATTENDING, _CONVOLVING],
    )
    return transformers.Lfm2ForCausalLM(config)


# Four layers of each, in the proportions in which the whole model has them.
SHAPES: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3.5-0.8b": _qwen,
    "granite-4.0-h-micro": _granite,
    "lfm2-1.2b": _lfm2,
}


def make_shape(name: str, dtype: torch.dtype) -> PreTrainedModel:
    """The model of that name, always with the same weights."""
    torch.manual_seed(0)
    return SHAPES[name]().to(dtype).eval()

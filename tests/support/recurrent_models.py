"""Tiny random models of the families that keep recurrent or convolution state."""

from __future__ import annotations

import transformers
from transformers import PreTrainedModel
from walk_models import build

# How many states each of their mixers keeps, in the order in which they run.
FAMILIES = {
    "bailing_hybrid": [2, 2],
    "bamba": [2, 2],
    "falcon_h1": [2, 2, 2],
    "jamba": [2, 2],
    "kimi_linear": [2, 2],
    "lfm2": [1, 1],
    "mamba2": [2, 2, 2],
    "minimax": [1],
    "olmo_hybrid": [2, 2],
    "qwen3_next": [2, 2],
    "recurrent_gemma": [2, 2],
    "zaya": [2, 2, 2],
}
# Of each way to mix: gated delta rules, scans, convolutions, lightning attention, linear recurrences.
STEPPED = ("jamba", "recurrent_gemma")


def make_recurrent(family: str) -> PreTrainedModel:
    """A tiny model of a family, in float32 and eval mode, with large random weights."""
    return build(transformers.AutoConfig.for_model(family).__class__.__name__.replace("Config", "ForCausalLM"))

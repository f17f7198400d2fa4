"""Run sequences through a twin and a private block pool, without an engine."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from paged_backend.batch import build_batch
from paged_backend.kv_cache import KVCache, group_layers
from paged_backend.model_runner import ModelRunner
from paged_backend.twin import Twin


def prefill_logits(twin: Twin, prompts: list[list[int]], block_size: int = 4) -> list[torch.Tensor]:
    """The logits ``[num_tokens, vocab_size]`` of each prompt, all prefilled in one packed forward pass."""
    groups = group_layers(twin.layers)
    width = max(-(-len(prompt) // block_size) for prompt in prompts)
    tables = [np.arange(len(prompts) * width, dtype=np.int32).reshape(len(prompts), width) for _ in groups]
    kv_cache = KVCache(twin.layers, groups, [len(prompts) * width] * len(groups), block_size)
    batch = build_batch([], [], prompts, [0] * len(prompts), [True] * len(prompts), tables, block_size, twin.device)
    every_row = torch.arange(batch.num_tokens, device=twin.device)
    logits = ModelRunner(twin, kv_cache).forward(dataclasses.replace(batch, logits_rows=every_row))
    return list(logits.split([len(prompt) for prompt in prompts]))

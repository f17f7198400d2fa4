"""Run sequences through a twin and a private block pool, without an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from paged_backend.memory.kv_cache import KVCache, group_layers
from paged_backend.model.batch import build_batch
from paged_backend.model.runner import ModelRunner
from paged_backend.model.state_spans import LoneSlots
from paged_backend.model.twin import Twin


def prefill_logits(twin: Twin, prompts: list[list[int]], block_size: int = 4) -> list[torch.Tensor]:
    """The logits ``[num_tokens, vocab_size]`` of each prompt, all prefilled in one packed forward pass."""
    return stepped_logits(twin, prompts, [], block_size)


def stepped_logits(
    twin: Twin, prompts: list[list[int]], chunks: Sequence[int], block_size: int = 4
) -> list[torch.Tensor]:
    """The logits of each prompt, cut into chunks of these sizes and the rest; a later chunk of one token is a decode.

    Prompt i begins with chunk i of the sizes and goes round, so that chunks and decodes share forward passes.
    """
    groups = group_layers(twin.layers)
    width = max(-(-len(prompt) // block_size) for prompt in prompts)
    tables = np.arange(len(prompts) * width, dtype=np.int32).reshape(len(prompts), width)
    kv_cache = KVCache(twin.layers, groups, [tables.size] * len(groups), block_size)
    runner = ModelRunner(twin, kv_cache)
    slots = LoneSlots(len(prompts))
    runner.states.grow(slots.num_slots)
    parts: list[list[torch.Tensor]] = [[] for _ in prompts]
    done = [0] * len(prompts)
    for step in range(len(chunks) + 1):
        taken = {}
        for index, prompt in enumerate(prompts):
            size = chunks[(index + step) % len(chunks)] if step < len(chunks) else len(prompt)
            if size := min(size, len(prompt) - done[index]):
                taken[index] = prompt[done[index] : done[index] + size]
        decodes = [index for index, tokens in taken.items() if done[index] and len(tokens) == 1]
        prefills = [index for index in taken if index not in decodes]
        if not taken:
            break
        batch = build_batch(
            [taken[index][0] for index in decodes],
            [done[index] for index in decodes],
            [taken[index] for index in prefills],
            [done[index] for index in prefills],
            [1] * len(prefills),
            [tables[decodes + prefills]] * len(groups),
            block_size,
            twin.device,
            spans=slots.spans(decodes, prefills, [len(taken[index]) for index in prefills]),
        )
        every_row = torch.arange(batch.num_tokens, device=twin.device)
        logits = runner.forward(dataclasses.replace(batch, logits_rows=every_row))
        order = decodes + prefills
        for index, rows in zip(order, logits.split([len(taken[index]) for index in order]), strict=True):
            parts[index].append(rows)
            done[index] += len(rows)
    return [torch.cat(rows) for rows in parts]

"""Compare what ``generate`` returns with the paged engine and without it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

# Below this gap between stock's two likeliest tokens, float32 rounding may decide.
MARGIN = 1e-3


def left_padded(lengths: list[int], vocab_size: int = 256, pad_token_id: int = 0, seed: int = 0) -> dict[str, Tensor]:
    """Ordinary token ids of these lengths, padded on the left: ``input_ids`` and ``attention_mask`` [B, max]."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    input_ids = torch.full((len(lengths), longest), pad_token_id)
    mask = torch.zeros(len(lengths), longest, dtype=torch.long)
    for row, length in enumerate(lengths):
        input_ids[row, longest - length :] = torch.randint(3, vocab_size, (length,), generator=generator)
        mask[row, longest - length :] = 1
    return {"input_ids": input_ids, "attention_mask": mask}


def assert_equals_stock(model: PreTrainedModel, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    """Generate both ways and compare; ``paged_config`` goes to the paged way only. Returns the paged result.

    A row may leave stock's only where stock's own two best scores lie within MARGIN of each other.
    """
    paged_config = options.pop("paged_config", None)
    stock = model.generate(**inputs, **options, return_dict_in_generate=True, output_scores=True)
    paged = model.generate(**inputs, **options, cache_impl="paged", paged_config=paged_config)
    assert_same_tokens(paged, stock.sequences, stock.scores)
    return paged


def assert_same_tokens(paged: Tensor, stock: Tensor, scores: tuple[Tensor, ...]) -> None:
    """``paged`` and ``stock`` [B, L] agree, but behind a near tie of stock's ``scores`` (one [B, V] per new token)."""
    assert paged.dtype == stock.dtype
    assert paged.device == stock.device
    assert paged.dim() == 2
    num_prompt_tokens = stock.shape[1] - len(scores)
    common = min(paged.shape[1], stock.shape[1])
    tied = False
    for row, differs in enumerate((paged[:, :common] != stock[:, :common]).tolist()):
        if True not in differs:
            continue
        step = differs.index(True) - num_prompt_tokens
        assert step >= 0, f"row {row}: the prompt differs"
        best = scores[step][row].topk(2).values
        assert best[0] - best[1] < MARGIN, (
            f"row {row} differs from stock at new token {step}: {paged[row].tolist()} against {stock[row].tolist()}"
        )
        tied = True
    assert tied or paged.shape == stock.shape

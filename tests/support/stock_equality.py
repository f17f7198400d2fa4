"""Compare what ``generate`` returns with the paged engine and without it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from oracle import MARGIN, draw_prompts, left_pad
from torch import Tensor
from transformers import PreTrainedModel

from paged_backend import Engine
from paged_backend.integrations.huggingface import engines


def left_padded(lengths: list[int], vocab_size: int = 256, pad_token_id: int = 0, seed: int = 0) -> dict[str, Tensor]:
    """Ordinary token ids of these lengths, padded on the left: ``input_ids`` and ``attention_mask`` [B, max]."""
    return left_pad(draw_prompts(lengths, vocab_size, seed), pad_token_id)


# A ragged batch, and how much to make of it.
RAGGED = left_padded([7, 1, 23, 40, 12])
LENGTH = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}


def paged(model: PreTrainedModel, inputs: dict[str, Tensor] = RAGGED, **options: Any) -> Any:
    """Greedy, 16 tokens, from the paged engine, unless ``options`` say otherwise."""
    return model.generate(**inputs, **{**LENGTH, **options}, cache_impl="paged")


def tokens_drawn_early(model: PreTrainedModel, count: int) -> list[int]:
    """Tokens that the first greedy rows of RAGGED come to, at different times, to serve as end-of-sequence tokens."""
    new = model.generate(**RAGGED, **LENGTH)[:, RAGGED["input_ids"].shape[1] :]
    return sorted({int(new[row, 3 + 2 * row]) for row in range(count)})


def engines_of(model: PreTrainedModel) -> list[Engine]:
    """The engines that ``generate`` keeps for ``model``, one for each configuration, least recently used first."""
    known = engines._by_model.get(model)
    return [kept.engine.engine for kept in known.kept] if known is not None else []


def engine_of(model: PreTrainedModel) -> Engine:
    """The first engine that ``generate`` keeps for ``model``."""
    return engines_of(model)[0]


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


def assert_same_scores(paged: Sequence[Tensor] | None, stock: Sequence[Tensor] | None) -> None:
    """One [B, V] float32 per token, equal but for rounding; -inf in the same places."""
    assert (paged is None) == (stock is None)
    if paged is None or stock is None:
        return
    assert len(paged) == len(stock)
    for mine, theirs in zip(paged, stock, strict=True):
        assert mine.dtype == theirs.dtype == torch.float32
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-3)


def assert_same_cache(paged: Any, stock: Any) -> None:
    """Caches equal in kind and in all that they hold, padding included, but for rounding; or both None."""
    assert type(paged) is type(stock)
    if stock is None:
        return
    assert paged.get_seq_length() == stock.get_seq_length()
    for mine, theirs in zip(paged.layers, stock.layers, strict=True):
        assert type(mine) is type(theirs)
        torch.testing.assert_close(mine.keys, theirs.keys, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(mine.values, theirs.values, rtol=1e-4, atol=1e-3)

"""The oracle: stock greedy generate, one prompt alone, and what counts as equal to it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

# Where stock's own two best logits are closer than this, rounding may choose either.
MARGIN = 1e-3


def draw_prompts(lengths: Sequence[int], vocab_size: int = 256, seed: int = 1) -> list[list[int]]:
    """Random token ids without the first few, which configs like to use as special ones."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def left_pad(prompts: Sequence[Sequence[int]], pad_token_id: int = 0) -> dict[str, torch.Tensor]:
    """The prompts as one batch, padded on the left: ``input_ids`` and ``attention_mask``, [B, longest] each."""
    width = max(map(len, prompts))
    padding = [width - len(prompt) for prompt in prompts]
    return {
        "input_ids": torch.tensor([[pad_token_id] * n + list(p) for n, p in zip(padding, prompts, strict=True)]),
        "attention_mask": torch.tensor([[0] * n + [1] * (width - n) for n in padding]),
    }


@torch.no_grad()
def stock_greedy(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The tokens that stock generate adds to ``prompt`` alone, without stopping at an end-of-sequence token."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, **_GREEDY)
    return out[0, len(prompt) :].tolist()


@torch.no_grad()
def stock_greedy_many(model: PreTrainedModel, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """The same for many prompts in one call, padded on the left as stock wants it."""
    tokens = model.generate(**left_pad(prompts), max_new_tokens=num_tokens, **_GREEDY)
    return tokens[:, -num_tokens:].tolist()


# An id beyond any vocabulary would only be warned about; no end-of-sequence token at all is what is meant.
_GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@torch.no_grad()
def assert_greedy(
    model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int], expected: Sequence[int]
) -> None:
    """``tokens`` equal ``expected`` up to the first place where stock's own choice was a matter of rounding."""
    assert len(tokens) == len(expected)
    for index, (got, want) in enumerate(zip(tokens, expected, strict=True)):
        if got == want:
            continue
        logits = model(torch.tensor([[*prompt, *expected[:index]]])).logits[0, -1].float()
        margin = (logits[want] - logits[got]).item()
        assert margin < MARGIN, f"token {index} is {got}, stock says {want} by a margin of {margin:.2e}"
        return

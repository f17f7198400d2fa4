"""What callers hand in, checked: prompts, sampling parameters, seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from paged_backend.detokenizer import tokenizer_lock
from paged_backend.errors import RequestRefused
from paged_backend.sampling_params import SamplingParams

if TYPE_CHECKING:
    from paged_backend.twin import Twin

Prompt = str | Sequence[int] | torch.Tensor


def prompt_token_ids(prompt: Any, tokenizer: Any, vocab_size: int) -> list[int]:
    """The token ids of a text, a sequence of ints or a 1-D tensor; RequestRefused for anything else."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestRefused("a text prompt needs a tokenizer; pass one to the engine, or pass token ids")
        with tokenizer_lock(tokenizer):
            ids = tokenizer(prompt)["input_ids"]
    elif isinstance(prompt, torch.Tensor):
        if prompt.ndim != 1 or prompt.is_floating_point() or prompt.dtype == torch.bool:
            raise RequestRefused(
                f"a prompt tensor must be 1-D with integer token ids, got {tuple(prompt.shape)} {prompt.dtype}"
            )
        ids = prompt.tolist()
    else:
        try:
            ids = [token if type(token) is int else _as_int(token) for token in prompt]
        except TypeError as error:
            raise RequestRefused(f"a prompt is text or token ids, got {prompt!r:.80}") from error
    if not ids:
        raise RequestRefused("the prompt is empty; give at least one token")
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        raise RequestRefused(
            f"token id {low if low < 0 else high} is outside the vocabulary, whose ids are 0 to {vocab_size - 1}"
        )
    return ids


def _as_int(token: Any) -> int:
    if isinstance(token, bool) or not hasattr(token, "__index__"):
        raise TypeError(f"{token!r} is no token id")
    return int(token)


def check_prompt_embeds(embeds: Any, num_tokens: int, twin: Twin) -> None:
    """Raise RequestRefused unless ``embeds`` is None or what the model can be fed in place of ``num_tokens`` tokens."""
    if embeds is None:
        return
    if twin.embedding_dim is None:
        raise RequestRefused("this model takes no embeddings in place of tokens; give token ids alone")
    if not isinstance(embeds, torch.Tensor) or not embeds.is_floating_point():
        raise RequestRefused(f"prompt_embeds must be a tensor of floats, got {type(embeds).__name__}")
    if embeds.shape != (num_tokens, twin.embedding_dim):
        raise RequestRefused(
            f"prompt_embeds of a prompt of {num_tokens} tokens must be of shape {(num_tokens, twin.embedding_dim)}, "
            f"got {tuple(embeds.shape)}"
        )


def sampling_params(params: SamplingParams | Mapping[str, Any]) -> SamplingParams:
    """The params themselves, or made from a mapping of their fields."""
    if isinstance(params, SamplingParams):
        return params
    if isinstance(params, Mapping):
        try:
            return SamplingParams(**params)
        except TypeError as error:
            raise RequestRefused(f"unknown sampling parameter: {error}") from error
    raise RequestRefused(f"sampling parameters are a SamplingParams or a mapping of its fields, got {params!r:.80}")


def moment(now: float, name: str, seconds: float | None) -> float | None:
    """The time ``seconds`` from now, or None; RequestRefused unless it is a positive finite number."""
    if seconds is None:
        return None
    number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not number or not math.isfinite(seconds) or seconds <= 0:
        raise RequestRefused(f"{name} must be a positive number of seconds or None, got {seconds!r}")
    return now + seconds


def as_prompts(prompts: Any) -> list[Any]:
    """One prompt, or a sequence of them, as a list of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, torch.Tensor):
        return [prompts] if prompts.ndim == 1 else list(prompts)
    try:
        many = list(prompts)
    except TypeError as error:
        raise RequestRefused(f"prompts are texts or sequences of token ids, got {prompts!r:.80}") from error
    return [many] if many and all(isinstance(item, int) for item in many) else many

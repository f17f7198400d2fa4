"""What ``generate`` returns when it is asked for more than the tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from paged_backend.integrations.generate_call import refuse

# transformers calls the field ``cache`` since 5.24, and ``past_key_values`` before.
_CACHE_FIELD = next(
    field.name for field in dataclasses.fields(GenerateDecoderOnlyOutput) if field.name in ("cache", "past_key_values")
)


def refuse_outputs(config: GenerationConfig) -> None:
    """Raise UnsupportedCall for outputs that the paged engine does not have."""
    if config.return_dict_in_generate:
        for name in ("output_attentions", "output_hidden_states"):
            if getattr(config, name):
                raise refuse(name)


def generate_output(
    model: Any,
    prompts: Tensor,
    sequences: Tensor,
    scores: tuple[Tensor, ...] | None,
    logits: tuple[Tensor, ...] | None,
    model_kwargs: dict[str, Any],
) -> GenerateDecoderOnlyOutput:
    """The dictionary that stock returns, its cache included.

    prompts: [B, L]. sequences: [B, L + T]. scores, logits: T times [B, V] float32, or None. model_kwargs: what stock
    prepared for its loop, an empty cache of the model's own kind among it.
    """
    cache = model_kwargs.get(_CACHE_FIELD)
    if cache is not None:
        _fill(cache, model, prompts, sequences, model_kwargs)
    fields: dict[str, Any] = {"sequences": sequences, "scores": scores, "logits": logits, _CACHE_FIELD: cache}
    return GenerateDecoderOnlyOutput(**fields)


def _fill(cache: Any, model: Any, prompts: Tensor, sequences: Tensor, model_kwargs: dict[str, Any]) -> None:
    """Put the keys and values of all tokens but the last, which stock has not fed either, into ``cache``.

    One forward pass of the model itself does it, so that stock code can go on from the cache in every respect.
    """
    num_fed = sequences.shape[1] - prompts.shape[1] - 1
    num_prompt_tokens = prompts.shape[1]
    grown = model._update_model_kwargs_for_generation({}, dict(model_kwargs), num_new_tokens=num_fed)
    embeds = grown.get("inputs_embeds")
    if embeds is not None:
        num_prompt_tokens = embeds.shape[1]
        fed = model.get_input_embeddings()(sequences[:, prompts.shape[1] : -1].to(embeds.device))
        grown["inputs_embeds"] = torch.cat([embeds, fed.to(embeds)], dim=1)
    model(**model.prepare_inputs_for_generation(sequences[:, :-1], is_first_iteration=True, **grown), return_dict=True)
    assert cache.get_seq_length() == num_prompt_tokens + num_fed

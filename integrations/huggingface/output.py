"""What ``generate`` returns when it is asked for more than the tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from paged_backend.integrations.huggingface.call import refuse
from paged_backend.integrations.huggingface.rows import keeps_states, states_alone

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
    sequences: Tensor,
    fed: Tensor,
    num_shown: int,
    scores: tuple[Tensor, ...] | None,
    logits: tuple[Tensor, ...] | None,
    model_kwargs: dict[str, Any],
) -> GenerateDecoderOnlyOutput:
    """The dictionary that stock returns, its cache included.

    sequences: [B, L + T], of which ``num_shown`` columns are the prompts. fed: the same as the model was given it,
    which a processor may have written over since. scores, logits: T times [B, V] float32, or None. model_kwargs: what
    stock prepared for its loop, an empty cache of the model's own kind among it.
    """
    cache = None
    if model_kwargs.get(_CACHE_FIELD) is not None or model_kwargs.get("use_cache"):
        cache = _filled(model, fed[:, :num_shown], fed[:, num_shown:-1], model_kwargs)
    fields: dict[str, Any] = {"sequences": sequences, "scores": scores, "logits": logits, _CACHE_FIELD: cache}
    return GenerateDecoderOnlyOutput(**fields)


def _filled(model: Any, prompts: Tensor, fed: Tensor, model_kwargs: dict[str, Any]) -> Any:
    """The cache with the keys and values of the prompts and of what was fed behind them, [B, L] and [B, T - 1].

    It is the one that stock prepared, or that the model makes itself where stock leaves that to it; None if it makes
    none. The model computes it in two passes, so that stock code can go on from it in every respect: like stock's, the
    prompts' pass sees nothing of what follows, which padding would otherwise take in. Recurrent states are led on token
    by token, as in stock's loop, since not every model can with many at once.
    """
    prepared = model_kwargs.get(_CACHE_FIELD)
    output = model._prefill(prompts, GenerationConfig(), dict(model_kwargs))
    cache = output.get(_CACHE_FIELD) if prepared is None else prepared
    if cache is None or not fed.shape[1]:
        return cache
    at_once = 1 if prepared is None or any(keeps_states(cache)) else fed.shape[1]
    num_before, num_fed = _length(cache), 0
    for piece in fed.split(at_once, dim=1):
        # Stock takes as many off the left as the cache says it holds; told by the mask, and by the configuration
        # without one.
        input_ids = torch.nn.functional.pad(piece, (_length(cache), 0))
        num_fed += piece.shape[1]
        config = GenerationConfig()
        config._mask_length = num_before + num_fed
        model._prefill(input_ids, config, _grown({**model_kwargs, _CACHE_FIELD: cache}, num_fed))
    assert not num_before or _length(cache) == num_before + num_fed
    return cache


def _length(cache: Any) -> int:
    """The tokens that ``cache`` says it holds: none where it keeps states alone, or states of its own in the first
    layer."""
    return 0 if states_alone(cache) else int(cache.get_seq_length())


def _grown(model_kwargs: dict[str, Any], count: int) -> dict[str, Any]:
    """What goes to the model besides the tokens, when ``count`` of them follow the prompts."""
    grown = {name: value for name, value in model_kwargs.items() if name != "inputs_embeds"}
    mask, positions = grown.get("attention_mask"), grown.get("position_ids")
    if mask is not None:
        grown["attention_mask"] = torch.nn.functional.pad(mask, (0, count), value=1)
    if positions is not None:
        following = torch.arange(1, count + 1, device=positions.device)
        grown["position_ids"] = torch.cat([positions, positions[..., -1:] + following], dim=-1)
    return grown

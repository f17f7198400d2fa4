"""Rows: the prompts of a padded batch, and what the model would be fed besides them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paged_backend.integrations.huggingface.call import CACHE_ARGUMENTS, refuse

# Arguments of a forward pass that change nothing about the next token, whatever their value.
_INERT_INPUTS = frozenset(
    {
        "attention_mask",
        "cache_position",
        "logits_to_keep",
        "num_logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "use_cache",
    }
)


@dataclass(frozen=True)
class Row:
    """One row of a batch: its number, how much padding stands on its left, and behind that the prompt's token ids.

    num_shown: tokens that processors and criteria see of it, padding included. embeds: what the model is fed in place
    of the prompt, [len(prompt), D], or None; the prompt is then a stand-in.
    """

    index: int
    num_padding: int
    prompt: list[int]
    num_shown: int
    embeds: Tensor | None = None


def split_rows(input_ids: Tensor, attention_mask: Tensor | None, inputs_embeds: Tensor | None = None) -> list[Row]:
    """The rows of ``input_ids`` ([B, L]), without the padding on their left that the mask ([B or 1, L]) tells.

    With ``inputs_embeds`` ([B, E, D]) the mask is [B or 1, E], and ``input_ids`` are only shown. Raises UnsupportedCall
    for a mask that hides anything else.
    """
    if input_ids.dim() != 2 or input_ids.is_floating_point():
        raise refuse(f"{input_ids.dtype} input_ids of shape {tuple(input_ids.shape)}", "give [rows, tokens] integers")
    num_rows, length = input_ids.shape if inputs_embeds is None else inputs_embeds.shape[:2]
    if attention_mask is None:
        lengths = [length] * num_rows
    else:
        shown = (attention_mask != 0).expand(num_rows, length)
        lengths = [_prompt_length(row, mask) for row, mask in enumerate(shown.tolist())]
    tokens = input_ids.tolist()
    rows = []
    for row, kept in enumerate(lengths):
        prompt = tokens[row][length - kept :] if inputs_embeds is None else [0] * kept
        embeds = None if inputs_embeds is None else inputs_embeds[row, length - kept :]
        rows.append(Row(row, length - kept, prompt, input_ids.shape[1], embeds))
    return rows


def _prompt_length(row: int, mask: list[bool]) -> int:
    kept = sum(mask)
    if kept and all(mask[-kept:]):
        return kept
    if not kept:
        raise refuse(f"row {row}, which the attention_mask hides as a whole,", "give it at least one token")
    hole = "padding on the right" if not mask[-1] else "an attention_mask with holes"
    advice = "pad on the left (tokenizer.padding_side = 'left')"
    raise refuse(
        f"{hole} (row {row})",
        f"{advice}; without an attention_mask in the call, stock takes every pad_token_id of the prompt for padding",
    )


def check_inputs(
    model: Any, input_ids: Tensor, rows: list[Row], model_kwargs: Mapping[str, Any], *, masks_padding: bool
) -> None:
    """Refuse whatever the model would be fed besides the rows' tokens at their own positions.

    The model's own ``prepare_inputs_for_generation`` tells, as it would for stock. masks_padding: whether stock
    computes the same with padding as without.
    """
    # Early versions of transformers 5 count the positions in their decoding loop.
    count = getattr(model, "_get_initial_cache_position", None)
    if count is not None:
        model_kwargs = count(input_ids.shape[1], input_ids.device, dict(model_kwargs))
    inputs = model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **model_kwargs)
    if model_kwargs.get("inputs_embeds") is not None and inputs.get("inputs_embeds") is None:
        raise refuse(f"inputs_embeds, which {type(model).__name__} does not feed its model,")
    has_states_alone = False
    for name, value in inputs.items():
        # Multimodal models bring along what their encoders made, an empty mapping for text alone.
        if value is None or name in _INERT_INPUTS or (isinstance(value, Mapping) and not value):
            continue
        if value is False and name not in ("input_ids", "position_ids"):
            continue
        if name in CACHE_ARGUMENTS:
            has_states_alone = states_alone(value)
            if has_states_alone and value.has_previous_state():
                raise refuse(f"{name} with states in it")
            if not has_states_alone and value.get_seq_length():
                raise refuse(f"{name} with {value.get_seq_length()} tokens in it")
            continue
        given = {"input_ids": input_ids, "inputs_embeds": model_kwargs.get("inputs_embeds")}.get(name)
        if name == "position_ids":
            _check_positions(value, rows)
        elif given is None:
            raise refuse(f"the model input {name}")
        elif not torch.equal(value, given.to(value.device)):
            raise refuse(f"what {type(model).__name__} makes of {name}")
    # What has no attention knows no positions, and the mask tells it of padding.
    if inputs.get("position_ids") is None and not has_states_alone:
        _refuse_padding(model, rows, "takes no position_ids, so that stock counts padding as tokens")
    if not masks_padding:
        _refuse_padding(model, rows, "takes padding into its recurrent states in stock")


def states_alone(cache: Any) -> bool:
    """Whether ``cache`` is one of recurrent states without any keys and values, which has no length."""
    kinds = keeps_states(cache)
    return bool(kinds) and all(kinds)


def keeps_states(cache: Any) -> list[bool]:
    """For each layer of ``cache``, whether it holds recurrent states; empty in versions that know of none."""
    return list(getattr(cache, "is_linear", ()))


def _refuse_padding(model: Any, rows: list[Row], reason: str) -> None:
    padded = next((row for row in rows if row.num_padding), None)
    if padded is not None:
        raise refuse(
            f"padding (row {padded.index}) for {type(model).__name__}, which {reason},",
            "give rows of one length, or each row alone",
        )


def _check_positions(position_ids: Tensor, rows: list[Row]) -> None:
    padding = torch.tensor([row.num_padding for row in rows], device=position_ids.device)
    length = rows[0].num_padding + len(rows[0].prompt)
    expected = torch.arange(length, device=position_ids.device) - padding[:, None]
    if not bool(((position_ids == expected) | (expected < 0)).all()):
        raise refuse("position_ids other than 0, 1, 2, ... from each row's first token on")

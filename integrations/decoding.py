"""The decoding loop: what runs in place of ``GenerationMixin._sample`` when a call asks for the paged engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from paged_backend import RequestOutput, SharedEngine
from paged_backend.errors import ContextOverflow, EngineClosed
from paged_backend.integrations.generate_call import GenerateCall, refuse
from paged_backend.integrations.model_engines import engine_for
from paged_backend.integrations.row_sampling import row_params
from paged_backend.integrations.row_stopping import Stops
from paged_backend.integrations.rows import Row, check_inputs, split_rows


def decode(
    call: GenerateCall,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Tensor:
    """Generate from ``input_ids`` ([B, L]) as ``_sample`` does, with the same arguments and the same result.

    ``generate`` has prepared everything: rows are expanded, processors and criteria are those of the configuration and
    of the caller. Raises UnsupportedCall for what the engine does not do, and whatever a row's own code raised.
    """
    if synced_gpus:
        raise refuse("synced_gpus (ranks that step together)")
    _refuse_outputs(generation_config)
    rows = split_rows(input_ids, model_kwargs.get("attention_mask"))
    check_inputs(call.model, input_ids, rows, model_kwargs)
    if streamer is not None and len(rows) > 1:
        raise refuse(f"a streamer for {len(rows)} rows", "stream one row at a time")
    engine = engine_for(call.model, call.config, call.plugins)
    stops = Stops(rows, stopping_criteria, streamer)
    asked = stops.max_new_tokens(input_ids.shape[1])
    limits = [_within_positions(engine, row, asked) for row in rows]
    params = row_params(
        rows,
        logits_processor,
        do_sample=bool(generation_config.do_sample),
        max_tokens=limits,
        stop_token_ids=[token for token in stops.eos_token_ids if 0 <= token < engine.engine.twin.vocab_size],
    )
    outputs = engine.run(
        [
            {"prompt": row.prompt, "params": chosen, "stop_condition": stops.condition(row)}
            for row, chosen in zip(rows, params, strict=True)
        ]
    )
    for output, limit in zip(outputs, limits, strict=True):
        _check(output, cut_short=limit < asked)
    tokens = stops.cut([output.token_ids for output in outputs])
    if streamer is not None:
        stops.finish_streaming(tokens[0])
    return _padded(input_ids, tokens, generation_config._pad_token_tensor)


def _refuse_outputs(config: GenerationConfig) -> None:
    if config.return_dict_in_generate:
        raise refuse("return_dict_in_generate")


def _within_positions(engine: SharedEngine, row: Row, max_new_tokens: int) -> int:
    """How many tokens to ask for: what the model's positions still hold, as the row may end before it needs more."""
    most = engine.engine.max_model_len
    return max_new_tokens if most is None else max(1, min(max_new_tokens, most - len(row.prompt)))


def _check(output: RequestOutput, *, cut_short: bool) -> None:
    """Raise what kept a row from being finished."""
    if output.error is not None:
        raise output.error
    if output.finish_reason == "abort":
        raise EngineClosed("the paged engine dropped this call's requests")
    if output.finish_reason == "length" and cut_short:
        length = len(output.prompt_token_ids) + len(output.token_ids)
        raise ContextOverflow(
            f"a row has come to {length} tokens, the most that the model's positions (or max_model_len) hold for the "
            "paged engine, and is not finished; lower max_new_tokens"
        )


def _padded(input_ids: Tensor, tokens: Sequence[Sequence[int]], pad_token: Tensor | None) -> Tensor:
    """The prompts as they came and behind them each row's tokens, padded to the longest row: [B, L + T] int64."""
    longest = max(map(len, tokens))
    pad = 0 if pad_token is None else int(pad_token)
    new = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in tokens], device=input_ids.device)
    return torch.cat([input_ids, new], dim=1)

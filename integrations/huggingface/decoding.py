"""The decoding loop: what runs in place of ``GenerationMixin._sample`` when a call asks for the paged engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from paged_backend import RequestOutput, SamplingParams, SharedEngine
from paged_backend.errors import ContextOverflow, EngineClosed
from paged_backend.integrations.huggingface.call import GenerateCall, refuse
from paged_backend.integrations.huggingface.engines import engine_for
from paged_backend.integrations.huggingface.loop import GenerationLoop, RowLost
from paged_backend.integrations.huggingface.output import generate_output, refuse_outputs
from paged_backend.integrations.huggingface.row_sampling import sampling_fields
from paged_backend.integrations.huggingface.rows import Row, check_inputs, split_rows


def decode(
    call: GenerateCall,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: Any = None,
    tokenizer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Generate from ``input_ids`` ([B, L]) as ``_sample`` does, with the same arguments and the same result.

    ``generate`` has prepared everything: rows are expanded, processors and criteria are those of the configuration and
    of the caller, made with the tokenizer where they need one. What the engine does by itself, row by row, is handed
    to it as SamplingParams; with anything else its rows stay in step and go through stock's own loop.

    Raises UnsupportedCall for what the engine does not do, and whatever the caller's own code raised.
    """
    if synced_gpus:
        raise refuse("synced_gpus (ranks that step together)")
    refuse_outputs(generation_config)
    engine = engine_for(call.model, call.config, call.plugins)
    rows = split_rows(input_ids, model_kwargs.get("attention_mask"), model_kwargs.get("inputs_embeds"))
    check_inputs(call.model, input_ids, rows, model_kwargs)

    longest = min(c.max_length for c in stopping_criteria if type(c) is MaxLengthCriteria)
    # Stock looks at the length after the first new token.
    max_new_tokens = max(1, longest - input_ids.shape[1])
    do_sample = bool(generation_config.do_sample)
    common: dict[str, Any] = {"ignore_eos": True, "temperature": 1.0 if do_sample else 0.0}
    fields, loop = None, None
    if streamer is None and not _wants_scores(generation_config):
        common["stop_token_ids"] = _stop_token_ids(stopping_criteria, engine)
        fields = _as_fields(logits_processor, stopping_criteria, rows, do_sample, common["stop_token_ids"])
    if fields is None:
        loop = GenerationLoop(input_ids, logits_processor, stopping_criteria, generation_config, streamer)
        engine = engine_for(call.model, call.config_for(len(rows)), call.plugins)
        common["stop_token_ids"] = ()
        fields = [{}] * len(rows)
    limits = [_within_positions(engine, row, max_new_tokens) for row in rows]
    _check_room(engine, rows, limits, loop)

    # Drawn at the call, so that torch.manual_seed reproduces the result whatever else the engine runs.
    seeds = torch.randint(2**63 - 1, (len(rows),)).tolist() if do_sample else [None] * len(rows)
    requests = []
    for row, limit, seed, own in zip(rows, limits, seeds, fields, strict=True):
        own = {**own, "max_tokens": limit, "min_tokens": min(own.get("min_tokens", 0), limit), "seed": seed}
        requests.append({"prompt": row.prompt, "params": SamplingParams(**{**common, **own}), "metadata": row.index})
        if row.embeds is not None:
            requests[-1]["prompt_embeds"] = row.embeds
        if loop is not None:
            requests[-1] |= {"lockstep": loop, "stop_condition": loop.ends}
    outputs = engine.run(requests)
    _check(outputs, [limit < max_new_tokens for limit in limits])

    sequences = _padded(input_ids, outputs, generation_config._pad_token_tensor) if loop is None else loop.input_ids
    if streamer is not None:
        streamer.end()
    if not generation_config.return_dict_in_generate:
        return sequences
    scores, logits = (None, None) if loop is None else (loop.scores, loop.logits)
    return generate_output(call.model, input_ids, sequences, scores, logits, model_kwargs)


def _wants_scores(config: GenerationConfig) -> bool:
    return bool(config.return_dict_in_generate and (config.output_scores or config.output_logits))


def _stop_token_ids(criteria: StoppingCriteriaList, engine: SharedEngine) -> list[int]:
    """The end-of-sequence tokens that can come up; configurations name others too, such as -1 for none."""
    tokens = {token for c in criteria if type(c) is EosTokenCriteria for token in c.eos_token_id.reshape(-1).tolist()}
    return sorted(token for token in tokens if 0 <= token < engine.engine.twin.vocab_size)


def _as_fields(
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    rows: Sequence[Row],
    do_sample: bool,
    stop_token_ids: Sequence[int],
) -> list[dict[str, Any]] | None:
    """What the engine has to be told to do all this by itself, or None if it cannot."""
    if any(type(criterion) not in (MaxLengthCriteria, EosTokenCriteria) for criterion in criteria):
        return None
    return sampling_fields(processors, rows, do_sample=do_sample, stop_token_ids=stop_token_ids)


def _within_positions(engine: SharedEngine, row: Row, max_new_tokens: int) -> int:
    """How many tokens to ask for: what the model's positions still hold, as the row may end before it needs more."""
    most = engine.engine.max_model_len
    return max_new_tokens if most is None else max(1, min(max_new_tokens, most - len(row.prompt)))


def _check_room(engine: SharedEngine, rows: Sequence[Row], limits: Sequence[int], loop: GenerationLoop | None) -> None:
    lengths = [len(row.prompt) + limit for row, limit in zip(rows, limits, strict=True)]
    if loop is not None and not engine.engine.runs_at_once(lengths):
        raise refuse(
            f"a streamer, scores, or a processor or criterion that sees all rows at once (here {len(rows)} rows, "
            f"{sum(lengths)} tokens) where not all of them can run at once",
            "raise max_num_seqs or kv_cache_memory in paged_config, give fewer rows",
        )


def _check(outputs: Sequence[RequestOutput], cut_short: Sequence[bool]) -> None:
    """Raise what kept a row from being finished."""
    for error in sorted((o.error for o in outputs if o.error is not None), key=lambda e: isinstance(e, RowLost)):
        if not isinstance(error, RowLost):
            raise error
    for output, short in zip(outputs, cut_short, strict=True):
        if output.finish_reason == "length" and short:
            length = len(output.prompt_token_ids) + len(output.token_ids)
            raise ContextOverflow(
                f"a row has come to {length} tokens, the most that the model's positions (or max_model_len) hold for "
                "the paged engine, and is not finished; lower max_new_tokens"
            )
    if any(output.finish_reason not in ("stop", "length") for output in outputs):
        raise EngineClosed("the paged engine dropped this call's requests")


def _padded(input_ids: Tensor, outputs: Sequence[RequestOutput], pad_token: Tensor | None) -> Tensor:
    """The prompts as they came and behind them each row's tokens, padded to the longest row: [B, L + T] int64."""
    tokens = [output.token_ids for output in outputs]
    longest = max(map(len, tokens))
    pad = 0 if pad_token is None else int(pad_token)
    new = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in tokens], device=input_ids.device)
    return torch.cat([input_ids, new], dim=1)

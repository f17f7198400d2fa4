"""The decoding loop: what runs in place of ``GenerationMixin._sample`` when a call asks for the paged engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import MaxLengthCriteria

from paged_backend import RequestOutput, SamplingParams, SharedEngine
from paged_backend.errors import ContextOverflow, EngineClosed, SamplingFailed
from paged_backend.integrations.huggingface.call import GenerateCall, refuse
from paged_backend.integrations.huggingface.engines import engine_for
from paged_backend.integrations.huggingface.loop import GenerationLoop, RowLost
from paged_backend.integrations.huggingface.output import generate_output, refuse_outputs
from paged_backend.integrations.huggingface.row_sampling import row_fields
from paged_backend.integrations.huggingface.rows import Row, check_inputs, split_rows

# More than any model has positions for; SamplingParams count no further.
_MOST_TOKENS = 2**31 - 1


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
    rows = split_rows(input_ids, model_kwargs.get("attention_mask"), model_kwargs.get("inputs_embeds"))
    fields = None
    if streamer is None and not _wants_scores(generation_config):
        fields = row_fields(logits_processor, stopping_criteria, rows, do_sample=bool(generation_config.do_sample))
    config = call.config_for(len(rows)) if fields is None else call.config
    with engine_for(call.model, config, call.plugins) as engine:
        check_inputs(call.model, input_ids, rows, model_kwargs, masks_padding=engine.masks_padding)
        batch = _Batch(engine, rows, _max_new_tokens(stopping_criteria, input_ids.shape[1]))
        if fields is not None:
            sequences = _row_by_row(batch, fields, input_ids, generation_config)
            fed, scores, logits = sequences, None, None
        else:
            loop = GenerationLoop(input_ids, logits_processor, stopping_criteria, generation_config, streamer)
            _in_step(batch, loop)
            sequences, fed, scores, logits = loop.input_ids, loop.fed_ids, loop.scores, loop.logits
    if streamer is not None:
        streamer.end()
    if not generation_config.return_dict_in_generate:
        return sequences
    return generate_output(call.model, sequences, fed, input_ids.shape[1], scores, logits, model_kwargs)


class _Batch:
    """The rows of one call and the engine that they run on.

    limits: how many tokens to ask for in each row. What the model's positions hold may be less than ``max_new_tokens``,
    as the row may end before it needs more.
    """

    def __init__(self, engine: SharedEngine, rows: Sequence[Row], max_new_tokens: int) -> None:
        self.engine = engine
        self.rows = rows
        self.max_new_tokens = max_new_tokens
        most = engine.max_model_len
        self.limits = [
            max_new_tokens if most is None else max(1, min(max_new_tokens, most - len(row.prompt))) for row in rows
        ]

    def run(self, fields: Sequence[dict[str, Any]], do_sample: bool, **options: Any) -> list[RequestOutput]:
        """Each row with its fields of SamplingParams and what all of them share; raises what kept one from its end."""
        # Drawn at the call, so that torch.manual_seed reproduces the result whatever else the engine runs.
        seeds = torch.randint(2**63 - 1, (len(self.rows),)).tolist() if do_sample else [None] * len(self.rows)
        requests = []
        for row, limit, seed, own in zip(self.rows, self.limits, seeds, fields, strict=True):
            params = {"ignore_eos": True, "temperature": 1.0 if do_sample else 0.0, **own}
            params |= {"max_tokens": limit, "min_tokens": min(own.get("min_tokens", 0), limit), "seed": seed}
            request = {"prompt": row.prompt, "prompt_embeds": row.embeds, "params": SamplingParams(**params)}
            requests.append({**request, "metadata": row.index, **options})
        outputs = self.engine.run(requests)
        _check(outputs, [limit < self.max_new_tokens for limit in self.limits])
        return outputs


def _row_by_row(batch: _Batch, fields: Sequence[dict[str, Any]], input_ids: Tensor, config: GenerationConfig) -> Tensor:
    """Every row as a request that the engine finishes by itself; returns the sequences, [B, L + T]."""
    # Configurations name tokens too that never come up, such as -1 for none.
    stops = [token for token in fields[0]["stop_token_ids"] if 0 <= token < batch.engine.vocab_size]
    outputs = batch.run([{**own, "stop_token_ids": stops} for own in fields], bool(config.do_sample))
    return _padded(input_ids, outputs, config._pad_token_tensor)


def _in_step(batch: _Batch, loop: GenerationLoop) -> None:
    """All rows together, turning stock's loop, which keeps what comes out."""
    lengths = [len(row.prompt) + limit for row, limit in zip(batch.rows, batch.limits, strict=True)]
    if not batch.engine.runs_at_once(lengths):
        raise refuse(
            f"a streamer, scores, or a processor or criterion that sees all rows at once (here {len(lengths)} rows, "
            f"{sum(lengths)} tokens) where not all of them can run at once",
            "raise max_num_seqs or kv_cache_memory in paged_config, give fewer rows",
        )
    batch.run([{}] * len(lengths), loop.samples, lockstep=loop, stop_condition=loop.ends)


def _wants_scores(config: GenerationConfig) -> bool:
    return bool(config.return_dict_in_generate and (config.output_scores or config.output_logits))


def _max_new_tokens(criteria: StoppingCriteriaList, num_shown: int) -> int:
    """How many tokens the lengths among ``criteria`` leave behind ``num_shown``; stock looks after the first one."""
    # Any number does for stock, and so does a tensor of one.
    longest = min(float(c.max_length) for c in criteria if type(c) is MaxLengthCriteria)
    return max(1, math.ceil(min(_MOST_TOKENS, longest - num_shown)))


def _check(outputs: Sequence[RequestOutput], cut_short: Sequence[bool]) -> None:
    """Raise what kept a row from being finished."""
    for error in (output.error for output in outputs):
        if error is None or isinstance(error, RowLost):
            continue
        cause = error.__cause__
        if isinstance(error, SamplingFailed) and cause is not None and not isinstance(cause, Exception):
            # The caller's own code called for an exit.
            raise cause
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

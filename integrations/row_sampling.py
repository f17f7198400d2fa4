"""How a row's tokens are chosen: SamplingParams equal to what stock's list of logits processors does."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from paged_backend import SamplingParams
from paged_backend.integrations.rows import Row


class RowProcessors:
    """Logits processors that see one row as stock would show it: [1, L] with its padding, scores [1, V]."""

    def __init__(self, row: Row, processors: LogitsProcessorList) -> None:
        self.row = row
        self.processors = processors

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> Tensor:
        shown: Any = self.row.input_ids(input_ids)
        processed: Tensor = self.processors(shown, scores.to(shown.device))
        return processed.to(scores.device)


def row_params(
    rows: Sequence[Row],
    processors: LogitsProcessorList,
    *,
    do_sample: bool,
    max_tokens: Sequence[int],
    stop_token_ids: Sequence[int],
) -> list[SamplingParams]:
    """One SamplingParams per row; where rows are sampled, their seeds come from torch's global generator."""
    seeds = torch.randint(2**63 - 1, (len(rows),)).tolist() if do_sample else [None] * len(rows)
    common = {"ignore_eos": True, "stop_token_ids": stop_token_ids, "temperature": 1.0 if do_sample else 0.0}
    chosen = []
    for row, limit, seed in zip(rows, max_tokens, seeds, strict=True):
        fields = _as_fields(processors, row, do_sample, stop_token_ids)
        if fields is None:
            fields = {"logits_processors": [RowProcessors(row, _for_row(processors, row, len(rows)))]}
        fields["min_tokens"] = min(fields.get("min_tokens", 0), limit)
        chosen.append(SamplingParams(**{**common, **fields, "max_tokens": limit, "seed": seed}))
    return chosen


# transformers' order, which is the order of the engine's own operations.
_ORDER: tuple[type, ...] = (
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper,
)


def _as_fields(
    processors: LogitsProcessorList, row: Row, do_sample: bool, stop_token_ids: Sequence[int]
) -> dict[str, Any] | None:
    """Fields of SamplingParams with exactly the effect of the processors on this row, or None if there are none."""
    fields: dict[str, Any] = {}
    last = -1
    for processor in processors:
        # A subclass may do anything.
        place = _ORDER.index(type(processor)) if type(processor) in _ORDER else -1
        if place <= last:
            return None
        last = place
        field = _field(processor, row, do_sample, stop_token_ids)
        if field is None:
            return None
        name, value = field
        fields[name] = max(value, fields.get(name, 0)) if name == "min_tokens" else value
    return fields


def _field(processor: Any, row: Row, do_sample: bool, stop_token_ids: Sequence[int]) -> tuple[str, Any] | None:
    num_padding = len(row.padding)
    match processor:
        case logits_process.RepetitionPenaltyLogitsProcessor(penalty=penalty, prompt_ignore_length=ignored):
            ignored = int(ignored[row.index]) if isinstance(ignored, Tensor) else ignored or 0
            return ("repetition_penalty", penalty) if ignored == num_padding and 1e-5 <= penalty <= 1e5 else None
        case logits_process.MinLengthLogitsProcessor(min_length=shortest, eos_token_id=eos):
            shown = num_padding + len(row.prompt)
            return ("min_tokens", max(0, shortest - shown)) if _equal(eos, stop_token_ids) else None
        case logits_process.MinNewTokensLengthLogitsProcessor(
            prompt_length_to_skip=skipped, min_new_tokens=shortest, eos_token_id=eos
        ):
            shown = num_padding + len(row.prompt)
            return ("min_tokens", max(0, skipped + shortest - shown)) if _equal(eos, stop_token_ids) else None
    # The rest would change nothing about the likeliest token, but greedy rows have no field for them.
    if not do_sample or getattr(processor, "filter_value", -math.inf) != -math.inf:
        return None
    match processor:
        case logits_process.TemperatureLogitsWarper(temperature=temperature):
            return ("temperature", temperature) if 1e-5 <= temperature <= 1e5 else None
        case logits_process.TopKLogitsWarper(top_k=top_k):
            return "top_k", top_k
        case logits_process.TopPLogitsWarper(top_p=top_p, min_tokens_to_keep=1):
            return ("top_p", top_p) if top_p > 0 else None
        case logits_process.MinPLogitsWarper(min_p=min_p, min_tokens_to_keep=1):
            return "min_p", min_p
    return None


def _equal(eos_token_id: Tensor, stop_token_ids: Sequence[int]) -> bool:
    return set(eos_token_id.reshape(-1).tolist()) == set(stop_token_ids)


def _for_row(processors: LogitsProcessorList, row: Row, num_rows: int) -> LogitsProcessorList:
    """The processors with whatever they hold for each row of the batch cut down to this one."""
    return LogitsProcessorList(_cut_down(processor, row.index, num_rows) for processor in processors)


def _cut_down(processor: Any, row: int, num_rows: int) -> Any:
    match processor:
        case logits_process.RepetitionPenaltyLogitsProcessor(prompt_ignore_length=Tensor() as ignored):
            return _with(processor, prompt_ignore_length=ignored[row : row + 1])
        case logits_process.EncoderRepetitionPenaltyLogitsProcessor(encoder_input_ids=encoder_ids):
            own = row // max(1, num_rows // len(encoder_ids))
            return _with(processor, encoder_input_ids=encoder_ids[own : own + 1])
        case logits_process.EncoderNoRepeatNGramLogitsProcessor(generated_ngrams=ngrams):
            own = row // max(1, num_rows // len(ngrams))
            return _with(processor, generated_ngrams=ngrams[own : own + 1], batch_size=1)
        case logits_process.PrefixConstrainedLogitsProcessor(_prefix_allowed_tokens_fn=allowed, _num_beams=size):
            return _with(
                processor, _prefix_allowed_tokens_fn=lambda _, tokens: allowed(row // size, tokens), _num_beams=1
            )
        case logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor(unconditional_context=context):
            prompts = {
                name: value[row : row + 1] if isinstance(value, Tensor) and len(value) == num_rows else value
                for name, value in context.items()
            }
            return _with(processor, unconditional_context=prompts)
        case logits_process.SynthIDTextWatermarkLogitsProcessor():
            return copy.copy(processor)
    return processor


def _with(processor: Any, **attributes: Any) -> Any:
    changed = copy.copy(processor)
    vars(changed).update(attributes)
    return changed

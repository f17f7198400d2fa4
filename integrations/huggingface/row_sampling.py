"""SamplingParams that do to each row exactly what stock's logits processors do, where such exist."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from typing import Any

from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from paged_backend.integrations.huggingface.rows import Row
from paged_backend.sampling_params import MAX_COUNT

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


def row_fields(
    processors: LogitsProcessorList, criteria: StoppingCriteriaList, rows: Sequence[Row], *, do_sample: bool
) -> list[dict[str, Any]] | None:
    """For each row the fields of SamplingParams that equal the processors and criteria, or None if there are none.

    ``stop_token_ids`` are as the criteria have them, be they tokens or not; lengths are left to the caller.
    """
    if any(type(criterion) not in (MaxLengthCriteria, EosTokenCriteria) for criterion in criteria):
        return None
    stops = {token for c in criteria if type(c) is EosTokenCriteria for token in c.eos_token_id.reshape(-1).tolist()}
    # A subclass may do anything.
    places = [_ORDER.index(type(processor)) if type(processor) in _ORDER else -1 for processor in processors]
    if -1 in places or places != sorted(set(places)):
        return None
    all_fields = []
    for row in rows:
        fields: dict[str, Any] = {"stop_token_ids": sorted(stops)}
        for processor in processors:
            field = _field(processor, row, do_sample, stops)
            if field is None:
                return None
            name, value = field
            fields[name] = max(value, fields.get(name, 0)) if name == "min_tokens" else value
        all_fields.append(fields)
    return all_fields


def _field(processor: Any, row: Row, do_sample: bool, stop_token_ids: Set[int]) -> tuple[str, Any] | None:
    match processor:
        case logits_process.RepetitionPenaltyLogitsProcessor() if row.embeds is not None:
            # The engine would take the stand-in for what was said.
            return None
        case logits_process.RepetitionPenaltyLogitsProcessor(penalty=penalty, prompt_ignore_length=ignored):
            ignored = int(ignored[row.index]) if isinstance(ignored, Tensor) else ignored or 0
            return ("repetition_penalty", penalty) if ignored == row.num_padding and 1e-5 <= penalty <= 1e5 else None
        case logits_process.MinLengthLogitsProcessor(min_length=shortest, eos_token_id=eos):
            return ("min_tokens", max(0, shortest - row.num_shown)) if _equal(eos, stop_token_ids) else None
        case logits_process.MinNewTokensLengthLogitsProcessor(
            prompt_length_to_skip=skipped, min_new_tokens=shortest, eos_token_id=eos
        ):
            return ("min_tokens", max(0, skipped + shortest - row.num_shown)) if _equal(eos, stop_token_ids) else None
    # The rest would change nothing about the likeliest token, but greedy rows have no field for them.
    if not do_sample or getattr(processor, "filter_value", -math.inf) != -math.inf:
        return None
    match processor:
        case logits_process.TemperatureLogitsWarper(temperature=temperature):
            return ("temperature", temperature) if 1e-5 <= temperature <= 1e5 else None
        case logits_process.TopKLogitsWarper(top_k=top_k):
            return ("top_k", top_k) if top_k <= MAX_COUNT else None
        case logits_process.TopPLogitsWarper(top_p=top_p, min_tokens_to_keep=1):
            return ("top_p", top_p) if top_p > 0 else None
        case logits_process.MinPLogitsWarper(min_p=min_p, min_tokens_to_keep=1):
            return "min_p", float(min_p)
    return None


def _equal(eos_token_id: Tensor, stop_token_ids: Set[int]) -> bool:
    return set(eos_token_id.reshape(-1).tolist()) == stop_token_ids

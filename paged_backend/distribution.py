"""Distribution: what the next tokens of many requests are drawn from, after temperature, top_k, top_p and min_p."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paged_backend.sampling_params import SamplingParams

# Candidates are picked with room for float32 rounding and then judged exactly.
_SLACK = 1e-3


class Distribution(NamedTuple):
    """Weights of the tokens that each row may draw; they need not add up to one.

    weights: [R, C], float32 or float64; NaN throughout a row, or zero, where nothing can be drawn.
    token_ids: [R, C] int64, or None where column c is token c.
    """

    weights: Tensor
    token_ids: Tensor | None

    def draw(self, uniforms: Tensor) -> Tensor:
        """One token per row: where its cumulated weights pass its number of ``uniforms`` ([R] float64, in [0, 1)).

        Returns [R] int64, -1 where nothing can be drawn. Inverting the cumulated distribution takes one number per
        token whatever the vocabulary, and each row is summed by itself in float64, so that a row's token depends on
        nothing but its own weights and number.
        """
        cumulated = self.weights.cumsum(-1, dtype=torch.float64)
        totals = cumulated[:, -1]
        # Below the total even when the product rounds up to it, so that the token found has a weight above zero.
        targets = torch.minimum(uniforms * totals, totals.nextafter(torch.zeros_like(totals)))
        columns = torch.searchsorted(cumulated, targets[:, None], right=True).clamp_(max=cumulated.shape[1] - 1)
        tokens = columns if self.token_ids is None else self.token_ids.gather(1, columns)
        return torch.where(totals > 0, tokens[:, 0], -1)

    def logprobs(self, row: int, vocab_size: int) -> Tensor:
        """Natural logarithms of the probabilities of all tokens for one row: [vocab_size] float32, -inf where zero."""
        weights = self.weights[row].double()
        logprobs = (weights / weights.sum()).log().float()
        if self.token_ids is None:
            return logprobs
        drawable = weights > 0
        dense = logprobs.new_full((vocab_size,), -torch.inf)
        dense[self.token_ids[row, drawable]] = logprobs[drawable]
        return dense


def warp(scores: Tensor, params: Sequence[SamplingParams]) -> list[tuple[list[int], Distribution]]:
    """Temperature, top_k, top_p and min_p of every row at once, in transformers' order and with its results.

    scores: [R, V] float32, one row per element of ``params``, none of them greedy; overwritten.
    Returns distributions with the rows that each one holds, together all rows. Rows without top_k, top_p and min_p
    keep the whole vocabulary; the others are cut down to their candidates first, so that no vocabulary is sorted.

    Equal to transformers' TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper and MinPLogitsWarper except
    where the rounding of their float32 sums decides: a token is on the edge of top_p or min_p to within 1e-6, or
    equally likely tokens straddle the edge of top_p (then the lowest token ids are kept).
    """
    scores /= _column(scores, [p.temperature for p in params])
    whole = [row for row, p in enumerate(params) if not _truncates(p, scores.shape[1])]
    if len(whole) == len(params):
        return [(whole, Distribution(scores.softmax(-1), None))]
    truncated = [row for row, p in enumerate(params) if _truncates(p, scores.shape[1])]
    parts = [(truncated, _truncate(scores[truncated], [params[row] for row in truncated]))]
    if whole:
        parts.append((whole, Distribution(scores[whole].softmax(-1), None)))
    return parts


def _truncates(params: SamplingParams, vocab_size: int) -> bool:
    return 0 < params.top_k < vocab_size or params.top_p < 1 or params.min_p > 0


def _truncate(scores: Tensor, params: Sequence[SamplingParams]) -> Distribution:
    vocab_size = scores.shape[1]
    # The softmax of whole rows, not of the candidates: its sums must not depend on how many candidates others have.
    probs = scores.softmax(-1)
    top_p = _column(scores, [p.top_p for p in params])
    min_p = _column(scores, [p.min_p for p in params])

    # A score below which nothing is kept. Probabilities of at most (1 - top_p) / V come to at most 1 - top_p
    # together, so whatever top_p keeps lies above.
    best = scores.amax(-1, keepdim=True)
    log_normalizer = best - probs.amax(-1, keepdim=True).log()
    floor = ((1 - top_p) / vocab_size).log() + log_normalizer - _SLACK
    floor = floor.maximum(best + min_p.log() - _SLACK)
    counted = [row for row, p in enumerate(params) if 0 < p.top_k < vocab_size]
    if counted:
        top_k = torch.tensor([[params[row].top_k] for row in counted], device=scores.device)
        # Equal to the last of the top_k is kept, as in transformers; what follows is relative to what top_k kept.
        floor[counted] = scores[counted].topk(int(top_k.max())).values.gather(1, top_k - 1)
    floor = floor.clamp(min=torch.finfo(scores.dtype).min)

    token_ids, candidates = _candidates(scores, scores >= floor)
    weights = torch.where(candidates > -torch.inf, probs.gather(1, token_ids).double(), 0.0)
    totals = torch.ones_like(weights[:, :1])
    totals[counted] = weights[counted].sum(-1, keepdim=True)
    before = weights.cumsum(-1) - weights
    keep = ((before < top_p.double() * totals) | (top_p == 1)) & (weights >= min_p * weights[:, :1])
    return Distribution(weights * keep, token_ids)


def _candidates(scores: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The masked scores of each row, best first and -inf behind them, as [R, C] ``token_ids`` and scores.

    Equal scores stand in the order of their ids.
    """
    rows, tokens = mask.nonzero(as_tuple=True)
    counts = rows.bincount(minlength=len(scores))
    columns = torch.arange(len(rows), device=scores.device) - (counts.cumsum(0) - counts)[rows]
    shape = (len(scores), max(int(counts.max()), 1))
    token_ids = tokens.new_zeros(shape)
    token_ids[rows, columns] = tokens
    candidates = scores.new_full(shape, -torch.inf)
    candidates[rows, columns] = scores[rows, tokens]
    candidates, order = candidates.sort(dim=-1, descending=True, stable=True)
    return token_ids.gather(1, order), candidates


def _column(like: Tensor, values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]

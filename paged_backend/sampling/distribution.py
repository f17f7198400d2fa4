"""Distribution: what the next tokens of many requests are drawn from, after temperature, top_k, top_p and min_p."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from paged_backend.sampling_params import SamplingParams

# Candidates are picked with room for float32 rounding and then judged exactly.
_SLACK = 1e-3
# Scores per block; only blocks whose maxima promise something are looked into.
_CANDIDATE_BLOCK = 64


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

    scores: [R, V] float32, one row per element of ``params``, none of them greedy.
    Returns distributions with the rows that each one holds, together all rows. Rows without top_k, top_p and min_p
    keep the whole vocabulary; the others are cut down to their candidates first, so that no vocabulary is sorted.

    Equal to transformers' TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper and MinPLogitsWarper except
    where the rounding of their float32 sums decides: a token is on the edge of top_p or min_p to within 1e-6, or
    equally likely tokens straddle the edge of top_p (then the lowest token ids are kept).
    """
    scores = scores / _column(scores, [p.temperature for p in params])
    whole = [row for row, p in enumerate(params) if not _truncates(p, scores.shape[1])]
    truncated = [row for row, p in enumerate(params) if _truncates(p, scores.shape[1])]
    parts = []
    if whole:
        parts.append((whole, Distribution(take_rows(scores, whole).softmax(-1), None)))
    if truncated:
        parts.append((truncated, _truncate(take_rows(scores, truncated), [params[row] for row in truncated])))
    return parts


def take_rows(scores: Tensor, rows: list[int]) -> Tensor:
    """Some rows, in order: all of them as they are, fewer as a copy. Indexing by a list costs several times as much."""
    if len(rows) == len(scores):
        return scores
    return scores.index_select(0, torch.tensor(rows, device=scores.device))


def _truncates(params: SamplingParams, vocab_size: int) -> bool:
    return 0 < params.top_k < vocab_size or params.top_p < 1 or params.min_p > 0


def _truncate(scores: Tensor, params: Sequence[SamplingParams]) -> Distribution:
    """What top_k, top_p and min_p leave of each row: first the candidates, which hold all of it, then exactly."""
    vocab_size = scores.shape[1]
    # The softmax of whole rows, not of the candidates: its sums must not depend on how many candidates others have.
    probs = scores.softmax(-1)
    top_p = _column(scores, [p.top_p for p in params])
    min_p = _column(scores, [p.min_p for p in params])
    top_k = _TopK.of(params, vocab_size, scores.device)
    scores = functional.pad(scores, (0, -vocab_size % _CANDIDATE_BLOCK), value=-torch.inf)
    maxima = scores.unflatten(1, (-1, _CANDIDATE_BLOCK)).amax(-1)

    # A score that everything kept reaches, and preferably little else.
    best = maxima.amax(-1, keepdim=True)
    floor = best + min_p.log() - _SLACK
    if len(top_k.rows) < len(params):
        log_normalizer = best - probs.amax(-1, keepdim=True).log()
        floor = floor.maximum(_nucleus_floor(probs, top_p).log() + log_normalizer - _SLACK)
    if top_k.rows:
        # Everything top_k keeps, since what follows is relative to it. The k-th highest maximum of a block is no higher
        # than the k-th highest score.
        floor[top_k.rows] = top_k.lowest(maxima if top_k.most <= maxima.shape[1] else scores)
    candidates, token_ids = _candidates(scores, maxima, floor.clamp(min=torch.finfo(scores.dtype).min))

    weights = torch.where(candidates > -torch.inf, probs.gather(1, token_ids), 0.0)
    totals = torch.ones_like(best, dtype=torch.float64)
    if top_k.rows:
        # Whatever equals the k-th is kept too.
        weights[top_k.rows] *= take_rows(candidates, top_k.rows) >= top_k.lowest(candidates)
        totals[top_k.rows] = weights[top_k.rows].sum(-1, keepdim=True, dtype=torch.float64)
    if any(p.top_p < 1 for p in params):
        weights = _keep_nucleus(weights, top_p, totals)
    weights *= weights >= min_p * weights.amax(-1, keepdim=True)
    return Distribution(weights, token_ids)


class _TopK(NamedTuple):
    """The rows that keep only their likeliest tokens, and how many.

    rows: indices of K rows. counts: [K, 1] int64. most: the largest of them.
    """

    rows: list[int]
    counts: Tensor
    most: int

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> _TopK:
        rows = [row for row, p in enumerate(params) if 0 < p.top_k < vocab_size]
        counts = [params[row].top_k for row in rows]
        return cls(rows, torch.tensor(counts, device=device, dtype=torch.int64)[:, None], max(counts, default=0))

    def lowest(self, scores: Tensor) -> Tensor:
        """The last score that is kept in each of the rows, out of ``scores`` ([R, C]) of all: [K, 1]."""
        own = take_rows(scores, self.rows)
        count = min(self.most, own.shape[1])
        return own.topk(count).values.gather(1, self.counts.clamp(max=own.shape[1]) - 1)


def _nucleus_floor(probs: Tensor, top_p: Tensor) -> Tensor:
    """A probability that all tokens kept by top_p reach, [R, 1]."""
    # Probabilities up to this one come to at most 1 - top_p together.
    floor = (1 - top_p) / probs.shape[1]
    for share in (2**12, 2**9, 2**6):
        # Higher if the tokens above come to top_p even without the part of each that is below.
        level = (1 - top_p) / share
        enough = (probs - level).clamp_(min=0).sum(-1, keepdim=True) > top_p + _SLACK * (1 - top_p)
        floor = torch.where(enough, level.maximum(floor), floor)
    return floor


def _candidates(scores: Tensor, maxima: Tensor, floor: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's scores from its ``floor`` ([R, 1]) on and their token ids, both [R, C], filled up with -inf and 0.

    Only the blocks whose maximum reaches the floor are looked into.
    """
    rows, blocks = (maxima >= floor).nonzero(as_tuple=True)
    values = scores.view(-1, _CANDIDATE_BLOCK).index_select(0, rows * maxima.shape[1] + blocks)
    hits, places = (values >= floor[rows]).nonzero(as_tuple=True)
    rows, tokens = rows[hits], blocks[hits] * _CANDIDATE_BLOCK + places

    counts = rows.bincount(minlength=len(scores))
    columns = torch.arange(len(rows), device=scores.device) - (counts.cumsum(0) - counts)[rows]
    shape = (len(scores), max(int(counts.max()), 1))
    candidates, token_ids = scores.new_full(shape, -torch.inf), tokens.new_zeros(shape)
    candidates[rows, columns] = values[hits, places]
    token_ids[rows, columns] = tokens
    return candidates, token_ids


def _keep_nucleus(weights: Tensor, top_p: Tensor, totals: Tensor) -> Tensor:
    """Zero all but the highest weights of each row that come to ``top_p`` of its total; of equals the first stay."""
    if weights.device.type == "cpu":
        # NumPy sorts several times faster than torch.
        descending = torch.from_numpy(np.sort(weights.numpy(), axis=-1)).flip(-1)
    else:
        descending = weights.sort(dim=-1, descending=True).values
    before = descending.cumsum(-1, dtype=torch.float64) - descending
    num_kept = ((before < top_p * totals) | (top_p == 1)).sum(-1, keepdim=True)
    last = descending.gather(1, num_kept.clamp_(min=1) - 1)
    above, equal = weights > last, weights == last
    return weights * (above | (equal & (equal.cumsum(-1) <= num_kept - above.sum(-1, keepdim=True))))


def _column(like: Tensor, values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]

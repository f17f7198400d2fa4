"""GenerationLoop: stock's decoding loop, turned by the engine one step at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from paged_backend import Lockstep
from paged_backend.errors import PagedBackendError, SamplingFailed
from paged_backend.integrations.huggingface.call import refuse

# Every processor and criterion of these modules treats each row by itself.
_ROW_BY_ROW = frozenset({"transformers.generation.logits_process", "transformers.generation.stopping_criteria"})


class RowLost(PagedBackendError):
    """Another row of the call has failed, which is what the caller gets to hear of."""


class GenerationLoop(Lockstep):
    """Does after each forward pass what ``GenerationMixin._sample`` does, on the same [B, L] and [B, V] tensors.

    For calls whose processors, criteria or streamer are called with the whole batch, or that want scores. Each row is a
    request, its number the request's ``metadata``, and ``ends`` its ``stop_condition``. Finished rows go on, fed with
    padding, where anything could tell the difference.

    A criterion may write another token over the one that was chosen, which is fed then as in stock. What is written
    over earlier tokens is shown and returned, as stock has fed those already.

    input_ids: [B, L] int, grown by a column each step. scores, logits: one [B, V] float32 for each step, if wanted.
    samples: whether tokens are drawn.
    """

    def __init__(
        self,
        input_ids: Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        streamer: Any,
    ) -> None:
        super().__init__()
        self.input_ids = input_ids
        self._fed = [input_ids.clone()]
        # Then stock feeds all tokens again in each step.
        self._feeds_again = config.use_cache is False
        self._processors = processors
        self._criteria = criteria
        self._streamer = streamer
        self.samples = bool(config.do_sample)
        wanted = bool(config.return_dict_in_generate)
        self.scores: tuple[Tensor, ...] | None = () if wanted and config.output_scores else None
        self.logits: tuple[Tensor, ...] | None = () if wanted and config.output_logits else None
        self._unfinished = torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)
        # Without an end-of-sequence token stock has nothing to pad with: a finished row just goes on.
        pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        pad_token: Any = config._pad_token_tensor
        self._pad: int | None = int(pad_token) if pads else None
        row_by_row = all(type(part).__module__ in _ROW_BY_ROW for part in [*processors, *criteria])
        self._drops_finished = pads and row_by_row and self.scores is None and self.logits is None
        self._num_steps = 0
        self._vocab_size = 0
        self._requests: Sequence[Any] = ()

    @property
    def fed_ids(self) -> Tensor:
        """``input_ids`` as the model was given them, [B, L], the last token included."""
        return torch.cat(self._fed, dim=1)

    def process(self, requests: Sequence[Any], scores: Tensor) -> Tensor:
        rows = torch.tensor([request.metadata for request in requests], device=scores.device)
        if int(self._unfinished.sum()) > int(self._unfinished[rows.to(self._unfinished.device)].sum()):
            raise RowLost("another row of this call has failed")
        self._requests, self._vocab_size = requests, scores.shape[1]
        # Nobody looks at the scores of finished rows that were dropped.
        logits = scores.new_zeros(len(self.input_ids), scores.shape[1]).index_copy_(0, rows, scores)
        logits = logits.to(self.input_ids.device)
        input_ids: Any = self.input_ids
        processed: Any = self._processors(input_ids, logits)
        if self.scores is not None:
            self.scores += (processed,)
        if self.logits is not None:
            self.logits += (logits,)
        # Stock's own choice, which takes a token even where the scores leave none.
        tokens = processed.argmax(-1)
        forced = torch.full_like(self._unfinished, not self.samples)
        if self._pad is not None:
            tokens[~self._unfinished] = self._pad
            forced |= ~self._unfinished
        only = torch.full_like(logits, -torch.inf).scatter_(1, tokens[:, None], 0.0)
        chosen: Tensor = torch.where(forced[:, None], only, processed).to(scores.device)[rows]
        return chosen

    def ends(self, request: Any) -> bool:
        """Whether the row of ``request`` ends with its last token; every row of the batch has that many."""
        if request.num_output_tokens > self._num_steps:
            self._num_steps += 1
            self._turn()
        return not bool(self._unfinished.any()) or (self._drops_finished and not self._unfinished[request.metadata])

    def _turn(self) -> None:
        """What stock does once the next tokens are chosen."""
        tokens = [self._pad or 0] * len(self.input_ids)
        lost = False
        for request in self._requests:
            lost = lost or request.num_output_tokens != self._num_steps
            tokens[request.metadata] = request.token_ids[-1]
        if lost:
            self._unfinished[:] = False
            return
        next_tokens = torch.tensor(tokens, device=self.input_ids.device)
        self.input_ids = torch.cat([self.input_ids, next_tokens[:, None]], dim=-1)
        input_ids: Any = self.input_ids
        ended = torch.ones_like(self._unfinished)
        try:
            ended = self._criteria(input_ids, self.scores)
            self._feed(next_tokens)
            if self._streamer is not None:
                self._streamer.put(next_tokens.cpu())
        except BaseException:
            # It fails this row; the others have nothing left to do.
            ended = torch.ones_like(self._unfinished)
            raise
        finally:
            self._unfinished &= ~ended
        self._end_texts()

    def _feed(self, next_tokens: Tensor) -> None:
        """Let the requests go on from ``input_ids`` as they are now, where ``next_tokens`` [B] were chosen."""
        if self._feeds_again and bool((self.input_ids[:, :-1] != self.fed_ids).any()):
            raise refuse(
                "a processor or criterion that writes over earlier tokens while use_cache=False feeds them again",
                "leave use_cache out",
            )
        last = self.input_ids[:, -1]
        self._fed.append(last[:, None].clone())
        if torch.equal(last, next_tokens):
            return
        tokens = last.tolist()
        for request in self._requests:
            token = tokens[request.metadata]
            if not 0 <= token < self._vocab_size:
                raise SamplingFailed(
                    f"a criterion has put token {token} into input_ids; the model has token ids 0 to "
                    f"{self._vocab_size - 1}"
                )
            request.replace_last_token(token)

    def _end_texts(self) -> None:
        end_row = getattr(self._streamer, "end_row", None)
        if end_row is not None:
            for row in (~self._unfinished).nonzero().flatten().tolist():
                end_row(row)

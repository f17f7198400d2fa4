"""Executor: carries out a scheduled step, and confines a forward pass that fails to the requests it fails for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paged_backend.engine.scheduler import ScheduledStep
from paged_backend.engine.stopwatch import Stopwatch
from paged_backend.memory.block_manager import BlockManager
from paged_backend.model.batch import Batch, build_batch
from paged_backend.model.runner import ModelRunner
from paged_backend.model.state_spans import StateSpans
from paged_backend.request.request import Request


class Executor:
    """Builds the step's batches and runs them: one forward pass (``shared``) or decodes and prefills apart."""

    def __init__(self, runner: ModelRunner, blocks: BlockManager, *, shared: bool) -> None:
        self.runner = runner
        self.blocks = blocks
        self.shared = shared

    def run(self, step: ScheduledStep, watch: Stopwatch) -> tuple[torch.Tensor | None, dict[Request, Exception]]:
        """Logits ``[len(step.sampling), vocab_size]``, and why requests failed; the failed are taken out of the step.

        Keys and values are written by position, and states where no state is read, so a pass that failed half-way can
        simply be run again on fewer requests.
        """
        for g, pairs in enumerate(self.blocks.copies):
            if pairs:
                self.runner.kv_cache.copy_blocks(g, pairs)
                self.blocks.copies[g] = []
        passes = [step.requests] if self.shared else [step.decodes, step.prefills]
        failures: dict[Request, Exception] = {}
        results = [self._forward(part, failures, watch) for part in passes if part]
        if failures:
            step.decodes = [r for r in step.decodes if r not in failures]
            step.prefills = [r for r in step.prefills if r not in failures]
        return _joined(results), failures

    def _forward(
        self, requests: Sequence[Request], failures: dict[Request, Exception], watch: Stopwatch
    ) -> torch.Tensor | None:
        try:
            batch = self._batch(requests)
            if self.blocks.states is not None:
                self.runner.states.grow(self.blocks.states.num_made, self.blocks.max_states)
            watch.lap("batch")
            return self.runner.forward(batch)
        except Exception as error:
            if len(requests) == 1:
                failures[requests[0]] = error
                return None
        finally:
            watch.lap("forward")
        half = len(requests) // 2
        return _joined([self._forward(part, failures, watch) for part in (requests[:half], requests[half:])])

    def _batch(self, requests: Sequence[Request]) -> Batch:
        decodes = [r for r in requests if r.is_decoding]
        prefills = requests[len(decodes) :]
        chunks, counts, embeds = [], [], []
        place = len(decodes)
        for request in prefills:
            start, end = request.num_computed_tokens, request.num_computed_tokens + request.num_scheduled_tokens
            chunks.append(request.token_ids[start:end])
            counts.append(request.num_seats if end == request.num_tokens else 0)
            if request.prompt_embeds is not None and start < request.num_prompt_tokens:
                embeds.append((place, request.prompt_embeds[start:end]))
            place += end - start
        return build_batch(
            [r.token_ids[-1] for r in decodes],
            [r.num_computed_tokens for r in decodes],
            chunks,
            [r.num_computed_tokens for r in prefills],
            counts,
            self.blocks.tables(requests),
            self.blocks.block_size,
            self.runner.twin.device,
            embeds,
            self._spans(decodes, prefills),
        )

    def _spans(self, decodes: Sequence[Request], prefills: Sequence[Request]) -> StateSpans | None:
        states = self.blocks.states
        if states is None:
            return None
        return StateSpans.of(
            [states.plan(request, 1)[0] for request in decodes],
            [states.plan(request, request.num_scheduled_tokens) for request in prefills],
        )


def _joined(results: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    parts = [part for part in results if part is not None]
    if len(parts) < 2:
        return parts[0] if parts else None
    return torch.cat(parts)

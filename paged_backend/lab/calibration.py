"""Calibration: what an engine's steps cost on this machine, from steps that it runs."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from paged_backend.hookspecs import ObservedEngine, hookimpl
from paged_backend.lab.step_cost import StepCost
from paged_backend.sampling_params import SamplingParams
from paged_backend.stats import StepStats

if TYPE_CHECKING:
    from paged_backend.engine.engine import Engine

# How many requests at once, and how long their prompts are, in turn: the short ones decode while the long are read.
_ROUNDS = ((1, (500,)), (2, (16, 400)), (4, (250, 32)), (8, (20, 120)), (16, (60, 10)), (32, (16,)))
_OUTPUT_LENGTH = 16


class StepCollector:
    """A plugin that keeps the numbers of all steps."""

    def __init__(self) -> None:
        self.steps: list[StepStats] = []

    @hookimpl
    def step_finished(self, engine: ObservedEngine, stats: StepStats) -> None:
        """One more."""
        self.steps.append(stats)


def calibrate(model: Any, tokenizer: Any = None, **options: Any) -> StepCost:
    """The costs of an engine's steps for ``model`` on this machine, fitted from some hundred steps that it runs.

    options: of the engine, such as ``kv_cache_memory``.
    """
    # It takes torch, which all else here does without.
    from paged_backend.engine.engine import Engine

    collector = StepCollector()
    with Engine(model, tokenizer, plugins=[collector], enable_prefix_caching=False, **options) as engine:
        # What is compiled and allocated on first use is no cost of a step.
        _run(engine, 2, (40, 8))
        collector.steps.clear()
        for num_requests, lengths in _ROUNDS:
            _run(engine, num_requests, lengths)
    return StepCost.fit(collector.steps)


def _run(engine: Engine, num_requests: int, lengths: tuple[int, ...]) -> None:
    """Requests with prompts of these lengths in turn, as far as the model and the cache reach."""
    draw, most = random.Random(0), (engine.max_model_len or 4096) - _OUTPUT_LENGTH
    params = SamplingParams(max_tokens=_OUTPUT_LENGTH, ignore_eos=True)
    prompts = []
    for index in range(min(num_requests, engine.config.max_num_seqs)):
        length = max(1, min(lengths[index % len(lengths)], most))
        while length > 1 and engine.blocks.shortage(length + _OUTPUT_LENGTH) is not None:
            length //= 2
        prompts.append([draw.randrange(engine.twin.vocab_size) for _ in range(length)])
    engine.generate(prompts, params)

"""VirtualExecutor: carries out steps without a model, in seconds that pass on a clock of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from paged_backend.engine.scheduler import ScheduledStep
from paged_backend.engine.step_loop import Executed
from paged_backend.engine.stopwatch import Stopwatch
from paged_backend.memory.block_manager import BlockManager
from paged_backend.request.request import Request
from paged_backend.sampling.sampled import Sampled

# The token that ends a request; prompts have none below 0.
EOS = -1


class VirtualExecutor:
    """Gives every request its next token, each another than all others, and lets the seconds of the step pass.

    step_seconds: how long a planned step takes. now: seconds; whoever drives the executor may set it forward. A request
    ends with ``EOS`` as its last token if it ends before its ``max_tokens``.
    """

    def __init__(self, blocks: BlockManager, step_seconds: Callable[[ScheduledStep], float]) -> None:
        self.now = 0.0
        self._blocks = blocks
        self._step_seconds = step_seconds
        self._tokens = itertools.count(EOS - 1, -1)
        # Of unfinished requests.
        self._output_lengths: dict[Request, int] = {}

    def clock(self) -> float:
        """The time."""
        return self.now

    def expect(self, request: Request, output_length: int) -> None:
        """Let ``request`` generate this many tokens."""
        self._output_lengths[request] = output_length

    def __call__(self, step: ScheduledStep, watch: Stopwatch) -> Executed:
        """Carry out ``step``."""
        for copies in self._blocks.copies:
            copies.clear()
        rows = step.sampling
        if step:
            self.now += self._step_seconds(step)
        tokens: list[int | Exception] = []
        for request in rows:
            left = self._output_lengths[request] - request.num_output_tokens
            if left > 1:
                tokens.append(next(self._tokens))
            else:
                del self._output_lengths[request]
                tokens.append(EOS if request.num_output_tokens + 1 < request.params.max_tokens else next(self._tokens))
        return Executed(rows, Sampled(tokens, [None] * len(rows)) if rows else None)

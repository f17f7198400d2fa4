"""What blocks of a size cost in time and memory, and which of several sizes to take."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

CANDIDATES = (8, 16, 32, 64, 128, 256)
# What is taken when it costs hardly more than the cheapest: half the blocks to keep books of that 8 would be.
USUAL = 16
# Differences below this are noise.
TOLERANCE = 0.03
# The longest of the requests that are taken to be typical, in tokens, where the model reaches as far.
TYPICAL_LENGTH = 1024


@dataclass(frozen=True)
class Workload:
    """The requests that block sizes are judged by; three sequences of one length, in tokens.

    prompts, outputs: of each request, at least 1. shared: how much of its prompt's beginning an earlier prompt had in
    common, less than the prompt, since its last token is computed in any case.
    """

    prompts: Sequence[int]
    outputs: Sequence[int]
    shared: Sequence[int]

    @classmethod
    def typical(cls, max_positions: int | None = None) -> Workload:
        """Where nothing is known: requests that hold 512 tokens in the mean and share half of their prompts.

        Prompts are spread evenly over 128 to 640 tokens and answered with 256; all are shorter in proportion for a
        model of fewer than 1024 positions.
        """
        longest = min(TYPICAL_LENGTH, max_positions or TYPICAL_LENGTH)
        prompts = range(max(1, longest // 8), max(1, longest * 5 // 8) + 1)
        return cls(prompts, [max(1, longest // 4)] * len(prompts), [length // 2 for length in prompts])

    @cached_property
    def _steps(self) -> np.ndarray:
        """How often a request holds n tokens at a step's end, by n; its last token is never stored."""
        first = np.asarray(self.prompts, np.int64)
        end = first + np.asarray(self.outputs, np.int64)
        changes = np.bincount(first, minlength=int(end.max()) + 1) - np.bincount(end)
        return np.cumsum(changes)[:-1]

    @cached_property
    def _lengths(self) -> np.ndarray:
        return np.arange(len(self._steps))

    @property
    def mean_prompt(self) -> float:
        return sum(self.prompts) / len(self.prompts)

    @property
    def mean_output(self) -> float:
        return sum(self.outputs) / len(self.outputs)

    @property
    def mean_context(self) -> float:
        """Tokens that a request holds, averaged over its steps."""
        return float(self._lengths @ self._steps / self._steps.sum())

    def slots_per_token(self, block_size: int, windows: Mapping[int, int] | None = None) -> float:
        """Slots that requests hold for each token they may still look at, averaged over their growth.

        A request of n tokens holds ``ceil(n / b) * b`` slots. In layers that see the latest w tokens it holds the
        blocks that any of these lies in. Blocks that requests share count for each.

        windows: bytes of a token in the layers that see so many of the latest tokens, by that number, where 0 stands
        for all; by default all layers see all.
        """
        held = needed = 0.0
        for window, weight in (windows or {0: 1}).items():
            first = np.maximum(0, self._lengths - window) if window else np.zeros_like(self._lengths)
            slots = (-(-self._lengths // block_size) - first // block_size) * block_size
            held += weight * float(slots @ self._steps)
            needed += weight * float((self._lengths - first) @ self._steps)
        return held / needed

    def lost_share(self, block_size: int) -> float:
        """The share of all prompt tokens that are computed though an earlier prompt had them: only whole blocks are
        shared.
        """
        return self._lost(block_size) / sum(self.prompts)

    def work(self, block_size: int) -> float:
        """Tokens that are computed, prompt and output, for each that would be if any beginning could be shared."""
        least = sum(self.prompts) + sum(self.outputs) - sum(self.shared)
        return (least + self._lost(block_size)) / least

    def _lost(self, block_size: int) -> int:
        return sum(length % block_size for length in self.shared)

    def table_bytes(self, block_size: int) -> float:
        """Bytes of a request's block table in one KV group, four for each block, averaged over its growth."""
        return float(4 * -(-self._lengths // block_size) @ self._steps / self._steps.sum())


@dataclass(frozen=True)
class BlockCost:
    """What blocks of one size cost, in three ratios that would be 1 at best.

    slowdown: the attention's seconds over those of the fastest size. slots_per_token, work: see `Workload`.
    """

    block_size: int
    slowdown: float
    slots_per_token: float
    work: float

    @property
    def total(self) -> float:
        """The product of the three: of two sizes, the one with twice the total takes twice the attention's time, or
        twice the memory, or computes twice the tokens. A step's time beside attention is the same for all sizes and
        left out, so what attention wins or loses counts in full, as it does where contexts are long.
        """
        return self.slowdown * self.slots_per_token * self.work

    def __str__(self) -> str:
        return (
            f"their attention takes {self.slowdown:.2f} times as long as the fastest size's, "
            f"{self.slots_per_token:.2f} slots are held for a token, and {self.work:.2f} tokens computed for one that "
            "had to be"
        )


def in_turn(measure: Callable[[int], float], sizes: Iterable[int], rounds: int) -> dict[int, float]:
    """The least of several rounds by size, since a machine's other work can only add.

    All sizes are measured in each round, so that no size has the quiet moments for itself.
    """
    seconds = dict.fromkeys(sizes, math.inf)
    for _ in range(rounds):
        for size, least in seconds.items():
            seconds[size] = min(least, measure(size))
    return seconds


def compare(
    workload: Workload, seconds: Mapping[int, float], windows: Mapping[int, int] | None = None
) -> list[BlockCost]:
    """The costs of each block size whose attention took so many ``seconds``; windows as in `Workload`."""
    fastest = min(seconds.values())
    return [
        BlockCost(size, taken / fastest, workload.slots_per_token(size, windows), workload.work(size))
        for size, taken in seconds.items()
    ]


def pick(costs: Sequence[BlockCost]) -> BlockCost:
    """Of those within 3% of the cheapest 16 tokens, else the smallest block."""
    cheapest = min(cost.total for cost in costs)
    close = [cost for cost in costs if cost.total <= cheapest * (1 + TOLERANCE)]
    return min(close, key=lambda cost: (cost.block_size != USUAL, cost.block_size))


def explain(costs: Sequence[BlockCost]) -> str:
    """Why one was picked, in words, with what all of them cost."""
    picked, cheapest = pick(costs), min(costs, key=lambda cost: cost.total)
    lead = f"blocks of {picked.block_size} tokens cost least"
    if picked != cheapest:
        why = "are the usual ones" if picked.block_size == USUAL else "are smaller"
        lead = (
            f"blocks of {picked.block_size} tokens cost within {TOLERANCE:.0%} of those of {cheapest.block_size}, the "
            f"cheapest, and {why}"
        )
    totals = ", ".join(f"{cost.block_size}: {cost.total:.2f}" for cost in costs)
    return f"{lead}: {picked}. The products of these three, by size, are {totals}"

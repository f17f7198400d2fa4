"""Block-size study: what blocks of each size take of a model's time and memory, and which size is best for requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from paged_backend.block_cost import CANDIDATES, BlockCost, Workload, compare, explain, in_turn, pick
from paged_backend.errors import ConfigError
from paged_backend.lab.shared_prefixes import shared_lengths
from paged_backend.lab.trace import TraceRequest

# Times that each size is measured, all in turn.
ROUNDS = 9
# Contexts beyond this take longer in proportion, at every size, so they are timed at it.
LONGEST_CONTEXT = 2048
# What a model without a stated length is taken to run at most.
LONGEST_REQUEST = 2**20


class Timing(Protocol):
    """What measures: seconds of all attention layers of a model together; `AttentionTiming` is one."""

    def decode_seconds(self, block_size: int, context_len: int, num_seqs: int) -> float:
        """A step of ``num_seqs`` requests of ``context_len`` tokens."""
        ...

    def prefill_seconds(self, block_size: int, context_len: int, num_tokens: int) -> float:
        """A chunk of ``num_tokens`` that ends at ``context_len``."""
        ...

    def store_seconds(self, block_size: int, context_len: int, num_tokens: int) -> float:
        """Storing such a chunk."""
        ...


@dataclass(frozen=True)
class SizeResult:
    """What blocks of one size take.

    decode_s, prefill_s, store_s: seconds of all attention layers for a step of decodes, for a chunk of a prompt, and
    for storing that chunk, which is part of the second. unfilled: share of a request's slots that hold no token that it
    may still look at. lost_share: share of prompt tokens computed though an earlier prompt had them. table_bytes: of a
    request's block tables. cost: what all that comes to.
    """

    decode_s: float
    prefill_s: float
    store_s: float
    unfilled: float
    lost_share: float
    table_bytes: float
    cost: BlockCost


@dataclass(frozen=True)
class Study:
    """Results by size, and what was timed: decodes of ``num_seqs`` requests of ``context_len`` tokens, and a chunk of
    ``chunk`` tokens that ends at ``chunk_end``.
    """

    results: tuple[SizeResult, ...]
    num_seqs: int
    context_len: int
    chunk: int
    chunk_end: int

    @property
    def picked(self) -> int:
        """The block size to take."""
        return pick([result.cost for result in self.results]).block_size

    @property
    def reason(self) -> str:
        """Why, in words."""
        return explain([result.cost for result in self.results])


def study(
    timing: Timing,
    workload: Workload,
    num_seqs: int,
    chunk: int,
    windows: Mapping[int, int] | None = None,
    sizes: Sequence[int] = CANDIDATES,
) -> Study:
    """Measure each of ``sizes``, several times in turn, and weigh it against what it wastes of ``workload``.

    A size's attention time is that of a mean request: its share of a decode step for each output token, and its prompt
    in chunks, each taken to be in the middle of it. chunk: tokens of a prompt that are timed at once, at most. windows:
    as in `Workload.slots_per_token`.
    """
    prompt, context = workload.mean_prompt, min(LONGEST_CONTEXT, max(1, round(workload.mean_context)))
    chunk = max(1, min(chunk, round(prompt)))
    end = min(LONGEST_CONTEXT, max(chunk, round((prompt + chunk) / 2)))
    decode = in_turn(lambda size: timing.decode_seconds(size, context, num_seqs), sizes, ROUNDS)
    prefill = in_turn(lambda size: timing.prefill_seconds(size, end, chunk), sizes, ROUNDS)
    store = in_turn(lambda size: timing.store_seconds(size, end, chunk), sizes, ROUNDS)
    seconds = {size: decode[size] / num_seqs * workload.mean_output + prefill[size] * prompt / chunk for size in sizes}
    num_groups = len(windows or {0: 1})
    results = tuple(
        SizeResult(
            decode[cost.block_size],
            prefill[cost.block_size],
            store[cost.block_size],
            1 - 1 / cost.slots_per_token,
            workload.lost_share(cost.block_size),
            num_groups * workload.table_bytes(cost.block_size),
            cost,
        )
        for cost in compare(workload, seconds, windows)
    )
    return Study(results, num_seqs, context, chunk, end)


def spread_workload(
    shortest: int, longest: int, output_length: int, shared_prefix: int, max_model_len: int | None
) -> Workload:
    """Prompts spread evenly from ``shortest`` to ``longest`` tokens that all begin with the same ``shared_prefix``.

    Raises ConfigError for requests that are longer than a model of ``max_model_len`` can run.
    """
    if max_model_len is not None and longest + output_length > max_model_len:
        raise ConfigError(
            f"prompts of up to {longest} tokens and {output_length} of output are beyond the {max_model_len} that the "
            "model runs; give shorter ones"
        )
    prompts = range(shortest, longest + 1)
    return Workload(prompts, [output_length] * len(prompts), [min(shared_prefix, length - 1) for length in prompts])


def trace_workload(requests: Sequence[TraceRequest], max_model_len: int | None) -> tuple[Workload, int]:
    """The requests of a trace that a model of ``max_model_len`` can run, and how many it cannot, which are left out.

    Raises ConfigError if that leaves none.
    """
    limit = max_model_len or LONGEST_REQUEST
    fitting = [request for request in requests if len(request.prompt) + request.output_length <= limit]
    if not fitting:
        raise ConfigError(f"each of the {len(requests):,} requests is longer than the {limit:,} tokens that can be run")
    workload = Workload(
        [len(request.prompt) for request in fitting],
        [request.output_length for request in fitting],
        shared_lengths(fitting),
    )
    return workload, len(requests) - len(fitting)

"""Belady drops what is needed last, by the requests that have yet to begin."""

from __future__ import annotations

import random
from functools import cache

import pytest

from paged_backend.lab.belady import Belady, uses_of
from paged_backend.lab.replay import Machine, Policies, replay
from paged_backend.lab.step_cost import StepCost
from paged_backend.lab.trace import TraceRequest
from paged_backend.policies import CachedBlock

COST = StepCost(0.01, 0.001, 0.001)


def misses_under_belady(references: list[int], size: int) -> int:
    """How often contents are computed, where a cache of ``size`` blocks drops what Belady says."""
    begun = -1
    uses = {contents: [n for n, other in enumerate(references) if other == contents] for contents in references}
    policy, cached, misses = Belady(uses, lambda order: order > begun), {}, 0
    for begun, contents in enumerate(references):
        if contents in cached:
            policy.remove(cached.pop(contents))
        else:
            misses += 1
            if len(cached) == size:
                number = policy.evict()
                dropped = next(block for block in cached.values() if block.id == number)
                policy.remove(cached.pop(dropped.contents))
        block = cached[contents] = CachedBlock(begun, 0, 0, begun, float(begun), contents=contents)
        policy.add(block)
    return misses


def fewest_misses(references: list[int], size: int) -> int:
    """The least that any choice of what to drop comes to."""

    @cache
    def least(start: int, cached: frozenset[int]) -> int:
        if start == len(references):
            return 0
        contents = references[start]
        if contents in cached:
            return least(start + 1, cached)
        if len(cached) < size:
            return 1 + least(start + 1, cached | {contents})
        return 1 + min(least(start + 1, cached - {dropped} | {contents}) for dropped in cached)

    return least(0, frozenset())


@pytest.mark.parametrize("seed", range(20))
def test_no_other_choice_of_what_to_drop_computes_less_again(seed: int) -> None:
    draw = random.Random(seed)
    references = [draw.randrange(6) for _ in range(16)]
    assert misses_under_belady(references, 3) == fewest_misses(references, 3)


def request(arrival: float, *blocks: int, salt: str | None = None) -> TraceRequest:
    """A prompt of these blocks of four tokens and one token more."""
    prompt = [4 * block + i for block in blocks for i in range(4)]
    return TraceRequest(arrival, [*prompt, 99], 1, cache_salt=salt)


def test_uses_are_of_whole_prefixes_with_their_salt() -> None:
    trace = [request(0, 1, 2), request(1, 2, 1), request(2, 1, 3), request(3, 1, salt="other"), request(4, 1, 2)]
    assert sorted(uses_of(trace, 4).values()) == [[0, 2, 4], [0, 4]]


def test_a_block_that_ends_with_the_prompt_is_not_asked_for() -> None:
    trace = [TraceRequest(0, range(8), 1), TraceRequest(1, range(8), 1)]
    assert list(uses_of(trace, 4).values()) == [[0, 1]]


def test_in_a_replay_it_keeps_what_comes_again_where_lru_does_not() -> None:
    # Memory for three blocks beside those of a running request: 1 is used longest ago when 3 pushes something out.
    blocks = [1, 2, 3, 4, 1, 5, 1]
    trace = [request(float(n), block) for n, block in enumerate(blocks)]
    machine = Machine(COST, seats=1, num_blocks=4, block_size=4)
    hits = {
        eviction: replay(trace, machine, Policies(eviction=eviction)).stats.num_cached_tokens
        for eviction in ("lru", "belady")
    }
    assert hits == {"lru": 4, "belady": 8}


@pytest.mark.parametrize("seed", range(5))
def test_in_a_replay_no_other_choice_would_compute_less_again(seed: int) -> None:
    draw = random.Random(seed)
    blocks = [draw.randrange(6) for _ in range(14)]
    trace = [request(float(n), block) for n, block in enumerate(blocks)]
    # One of the four is not full, so that three are left for what is kept.
    replayed = replay(trace, Machine(COST, seats=1, num_blocks=4, block_size=4), Policies(eviction="belady"))
    assert replayed.stats.num_cached_tokens == 4 * (len(blocks) - fewest_misses(blocks, 3))

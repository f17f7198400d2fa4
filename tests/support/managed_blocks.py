"""A block manager of a few small groups, and requests that take its blocks as if a model ran."""

from __future__ import annotations

from paged_backend.kernels import FULL, MaskRule
from paged_backend.memory.block_manager import BlockManager
from paged_backend.memory.kv_group import KVGroup
from paged_backend.plugins.eviction import Lru
from paged_backend.request.request import Request
from paged_backend.sampling_params import SamplingParams

LAYOUTS = {
    "none": [],
    "full": [FULL],
    "window": [MaskRule("window", 5)],
    "full and window": [FULL, MaskRule("window", 8)],
    "full, chunk and window": [FULL, MaskRule("chunk", 6), MaskRule("window", 3)],
    "two windows": [MaskRule("window", 4), MaskRule("window", 9)],
}


MAX_CHUNK = 12


def no_policy_errors(policy: object, method: str, error: object) -> None:
    raise AssertionError(f"{policy}.{method}: {error}")


def make_manager(
    layout: str, num_blocks: int, block_size: int = 4, max_num_seqs: int = 6, num_snapshots: int | None = None
) -> BlockManager:
    groups = [KVGroup(rule, (index,), 8) for index, rule in enumerate(LAYOUTS[layout])]
    return BlockManager(
        groups,
        [num_blocks] * len(groups),
        block_size,
        max_num_seqs,
        MAX_CHUNK,
        [Lru() for _ in groups],
        no_policy_errors,
        num_snapshots=num_snapshots,
    )


def make_request(tokens: list[int], order: int, salt: str | None = None) -> Request:
    return Request(str(order), tokens, SamplingParams(max_tokens=1000), 0.0, order, cache_salt=salt)


def compute(manager: BlockManager, request: Request, num_tokens: int) -> None:
    """Pretend that a forward pass wrote ``num_tokens`` more tokens."""
    assert manager.reserve(request, request.num_computed_tokens + num_tokens)
    if manager.states is not None:
        manager.states.plan(request, num_tokens)
    request.num_computed_tokens += num_tokens
    manager.register([(request, num_tokens)])


def start(manager: BlockManager, request: Request) -> int:
    """Admit ``request`` with whatever prefix is cached; returns the number of cached tokens."""
    match = manager.match_prefix(request)
    manager.admit(request, match)
    request.num_computed_tokens = match.num_tokens
    return match.num_tokens

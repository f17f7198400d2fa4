"""How many blocks each KV group gets: for given sequences, or within a byte budget."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paged_backend.config import parse_memory
from paged_backend.errors import ConfigError
from paged_backend.kv_cache import KVGroup

DEFAULT_BUDGET = 2 * 2**30
# The length that the groups' shares of a budget are balanced for: at most this many tokens.
REFERENCE_LENGTH = 2048


def blocks_for_lengths(groups: Sequence[KVGroup], block_size: int, chunk: int, lengths: Sequence[int]) -> list[int]:
    """Blocks per group so that sequences of these lengths run at once, one block a sequence to spare."""
    return [sum(group.blocks_for(n, block_size, chunk) + 1 for n in lengths) for group in groups]


def blocks_for_budget(groups: Sequence[KVGroup], block_size: int, chunk: int, budget: int, max_len: int) -> list[int]:
    """Blocks per group within ``budget`` bytes, in the proportions that sequences of up to 2,048 tokens use them.

    A group with a window or chunk rule holds less of a long sequence, so its share never needs to be larger than its
    part of the sequences that fit. Raises ConfigError when the budget does not buy one block a group.
    """
    length = min(max_len, REFERENCE_LENGTH)
    per_sequence = [group.blocks_for(length, block_size, chunk) for group in groups]
    block_bytes = [group.bytes_per_token * block_size for group in groups]
    cost = sum(n * size for n, size in zip(per_sequence, block_bytes, strict=True))
    counts = [int(budget * n / cost) for n in per_sequence]
    if min(counts) < 1:
        need = -(-cost // min(per_sequence))
        raise ConfigError(
            f"kv_cache_memory of {budget:,} bytes does not hold one block of {block_size} tokens in each of the "
            f"{len(groups)} KV groups; give at least {need:,} bytes or a smaller block_size"
        )
    return counts


def budget_bytes(
    value: int | float | str | None, groups: Sequence[KVGroup], max_num_seqs: int, max_len: int, device: torch.device
) -> int:
    """The byte budget that ``kv_cache_memory`` stands for.

    None is what ``max_num_seqs`` sequences of ``max_len`` tokens need, at most 2 GiB.
    """
    if value is None:
        return min(DEFAULT_BUDGET, max_num_seqs * max_len * sum(group.bytes_per_token for group in groups))
    amount = parse_memory(value)
    if isinstance(amount, int):
        return amount
    if device.type != "cuda":
        raise ConfigError(
            f"kv_cache_memory={value!r} is a share of a GPU's free memory, but the model is on {device.type}; "
            "give bytes or a size such as '2GiB'"
        )
    free, _ = torch.cuda.mem_get_info(device)
    return int(free * amount)

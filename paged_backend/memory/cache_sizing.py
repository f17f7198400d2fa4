"""How many blocks each KV group gets: for given sequences, or within a byte budget."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

import torch

from paged_backend.checks import describe
from paged_backend.config import EngineConfig, parse_bytes, parse_memory
from paged_backend.errors import ConfigError
from paged_backend.memory.kv_group import KVGroup
from paged_backend.memory.state_slots import SLOTS_PER_SEAT

DEFAULT_BUDGET = 2 * 2**30
# What recurrent states of running requests, and those kept for prefixes, take at most when nothing else is asked.
DEFAULT_STATE_BUDGET = 4 * 2**30
DEFAULT_SNAPSHOT_BUDGET = 2**29
# The length that the groups' shares of a budget are balanced for: at most this many tokens.
REFERENCE_LENGTH = 2048
# Every block is counted, in some 50 bytes of the host's memory.
MAX_BLOCKS = 2**22


def blocks_for_lengths(groups: Sequence[KVGroup], block_size: int, chunk: int, lengths: Sequence[int]) -> list[int]:
    """Blocks per group so that sequences of these lengths run at once, one block a sequence to spare."""
    return [sum(group.blocks_for(n, block_size, chunk) + 1 for n in lengths) for group in groups]


def seats_for_config(
    config: EngineConfig, groups: Sequence[KVGroup], bytes_per_state: int, device: torch.device
) -> int:
    """How many requests may run at once, given what the recurrent state of one takes; 0 bytes limit nothing.

    Raises ConfigError when ``config.kv_cache_memory`` does not hold the state of one.
    """
    if not bytes_per_state:
        return config.max_num_seqs
    each, value = SLOTS_PER_SEAT * bytes_per_state, config.kv_cache_memory
    if value is None:
        return max(1, min(config.max_num_seqs, DEFAULT_STATE_BUDGET // each))
    share = 2 if groups else 1
    seats = budget_bytes(value, groups, config.max_num_seqs, 0, device) // (share * each)
    if seats < 1:
        raise ConfigError(
            f"kv_cache_memory={describe(value)} does not hold the recurrent state of one request, {each:,} bytes, in "
            f"{'half of it' if groups else 'it'}; give at least {share * each:,} bytes"
        )
    return min(config.max_num_seqs, seats)


def snapshots_for_config(
    config: EngineConfig, groups: Sequence[KVGroup], bytes_per_state: int, device: torch.device
) -> int | None:
    """How many prefixes may keep their recurrent state; None where there is none.

    Raises ConfigError when ``config.snapshot_memory`` holds none.
    """
    if not bytes_per_state:
        return None
    if config.snapshot_memory is not None:
        count = parse_bytes("snapshot_memory", config.snapshot_memory) // bytes_per_state
        if count < 1:
            raise ConfigError(
                f"snapshot_memory={describe(config.snapshot_memory)} does not hold the recurrent state of one prefix; "
                f"give at least {bytes_per_state:,} bytes, or enable_prefix_caching=False to keep none"
            )
        return count
    if config.kv_cache_memory is None:
        return DEFAULT_SNAPSHOT_BUDGET // bytes_per_state
    return budget_bytes(config.kv_cache_memory, groups, config.max_num_seqs, 0, device) // 8 // bytes_per_state


def blocks_for_config(
    config: EngineConfig,
    groups: Sequence[KVGroup],
    block_size: int,
    max_len: int,
    devices: Sequence[torch.device],
    state_bytes: int = 0,
) -> list[int]:
    """Blocks per group that ``config.kv_cache_memory`` buys on ``devices``, of the layers, beside ``state_bytes``.

    Raises ConfigError for less than a block, for more than the devices' memory, and for more than ``MAX_BLOCKS``.
    """
    value, chunk = config.kv_cache_memory, config.max_num_batched_tokens
    budget = budget_bytes(value, groups, config.max_num_seqs, max_len, devices[0])
    if not groups:
        return []
    if value is None:
        budget = max(budget, least_budget(groups, block_size, chunk, max_len))
        return [min(count, MAX_BLOCKS) for count in blocks_for_budget(groups, block_size, chunk, budget, max_len)]
    memory = memory_of(devices)
    if memory is not None and budget > memory:
        raise ConfigError(
            f"kv_cache_memory={describe(value)} is {budget:,} bytes, and {devices[0].type} has {memory:,} bytes of "
            "memory; give less, such as '2GiB', or None for the default"
        )
    counts = blocks_for_budget(groups, block_size, chunk, budget - state_bytes, max_len)
    if max(counts) > MAX_BLOCKS:
        raise ConfigError(
            f"kv_cache_memory={describe(value)} comes to {max(counts):,} blocks of {block_size} tokens, and at most "
            f"{MAX_BLOCKS:,} can be managed; give at most {budget * MAX_BLOCKS // max(counts):,} bytes, or a larger "
            "block_size"
        )
    return counts


def blocks_for_budget(groups: Sequence[KVGroup], block_size: int, chunk: int, budget: int, max_len: int) -> list[int]:
    """Blocks per group within ``budget`` bytes, in the proportions that sequences of up to 2,048 tokens use them.

    A group with a window or chunk rule holds less of a long sequence, so its share never needs to be larger than its
    part of the sequences that fit. Raises ConfigError when the budget does not buy one block a group.
    """
    per_sequence, cost = _cost_of_sequence(groups, block_size, chunk, max_len)
    counts = [budget * n // cost for n in per_sequence]
    if min(counts) < 1:
        raise ConfigError(
            f"kv_cache_memory of {budget:,} bytes does not hold one block of {block_size} tokens in each of the "
            f"{len(groups)} KV groups; give at least {least_budget(groups, block_size, chunk, max_len):,} bytes or a "
            "smaller block_size"
        )
    return counts


def least_budget(groups: Sequence[KVGroup], block_size: int, chunk: int, max_len: int) -> int:
    """The bytes that buy one block in each group."""
    per_sequence, cost = _cost_of_sequence(groups, block_size, chunk, max_len)
    return -(-cost // min(per_sequence))


def _cost_of_sequence(groups: Sequence[KVGroup], block_size: int, chunk: int, max_len: int) -> tuple[list[int], int]:
    """The blocks per group of a sequence of the reference length, and their bytes."""
    length = min(max_len, REFERENCE_LENGTH)
    per_sequence = [group.blocks_for(length, block_size, chunk) for group in groups]
    sizes = [group.bytes_per_token * block_size for group in groups]
    return per_sequence, sum(n * size for n, size in zip(per_sequence, sizes, strict=True))


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


def memory_of(devices: Collection[torch.device]) -> int | None:
    """Bytes of memory that ``devices`` have together, used or not; None where that cannot be told."""
    total = 0
    for device in set(devices):
        if device.type == "cuda":
            total += torch.cuda.mem_get_info(device)[1]
        elif device.type == "cpu" and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
            total += os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        else:
            return None
    return total

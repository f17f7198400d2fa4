"""PrefixIndex: which replica was sent which beginnings of prompts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

# Of all replicas together; beyond it, beginnings are told apart by more tokens at a time.
MAX_BEGINNINGS = 2**20


class PrefixIndex:
    """Guesses what is in the caches of replicas from the prompts that went there.

    It sees no cache: a replica is taken to hold what it was sent last, as much as its cache can hold, least recently
    sent forgotten first, the ends of prompts before their beginnings. Bounded: at most ``MAX_BEGINNINGS`` are
    remembered, each of ``span`` tokens more than the one before it.

    block_size: tokens, what prompts share in whole. num_blocks: of each replica's cache.
    """

    def __init__(self, num_replicas: int, block_size: int, num_blocks: int) -> None:
        blocks_a_span = -(-num_replicas * num_blocks // MAX_BEGINNINGS)
        self.span = block_size * blocks_a_span
        self._capacity = max(1, num_blocks // blocks_a_span)
        # Per replica, least recently sent first.
        self._sent: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_replicas)]
        self._holders: dict[int, set[int]] = {}

    def __len__(self) -> int:
        """How many beginnings are remembered, counted once for each replica."""
        return sum(map(len, self._sent))

    def beginnings(self, token_ids: Sequence[int], salt: str | None) -> list[int]:
        """A number for each beginning of whole spans, the same for the same tokens and salt, but for chance."""
        found, last = [], hash(salt)
        for start in range(0, len(token_ids) - self.span + 1, self.span):
            last = hash((last, tuple(token_ids[start : start + self.span])))
            found.append(last)
        return found

    def known(self, beginnings: Sequence[int]) -> dict[int, int]:
        """How many tokens of a prompt with these beginnings each replica should have, without those that have none."""
        chain: list[set[int]] = []
        for beginning in beginnings:
            holders = self._holders.get(beginning)
            if not holders:
                break
            chain.append(holders)
        found: dict[int, int] = {}
        # Whoever holds a beginning holds all shorter ones, so only where there are more of them somebody is new.
        for depth in range(len(chain), 0, -1):
            if len(chain[depth - 1]) > len(found):
                for replica in chain[depth - 1]:
                    found.setdefault(replica, depth * self.span)
        return found

    def add(self, replica: int, beginnings: Sequence[int]) -> None:
        """``replica`` was sent a prompt with these beginnings."""
        sent = self._sent[replica]
        # The longest first, so that it is forgotten first.
        for beginning in reversed(beginnings[: self._capacity]):
            if beginning in sent:
                sent.move_to_end(beginning)
            else:
                sent[beginning] = None
                self._holders.setdefault(beginning, set()).add(replica)
        while len(sent) > self._capacity:
            forgotten, _ = sent.popitem(last=False)
            holders = self._holders[forgotten]
            holders.discard(replica)
            if not holders:
                del self._holders[forgotten]

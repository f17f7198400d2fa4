"""PrefixPins: the beginnings of prompts that callers keep in the cache."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

from paged_backend.errors import RequestRefused
from paged_backend.memory.block_pool import BlockPool
from paged_backend.memory.kv_group import KVGroup
from paged_backend.memory.prefix_tree import PrefixNode, PrefixTree
from paged_backend.memory.state_slots import StateSlots

logger = logging.getLogger("paged_backend")

# Pinned prefixes may keep this share of a group's blocks, so that there is always room to work.
MAX_PINNED_SHARE = 0.5

# A cache salt, and tokens.
Prefix = tuple[str | None, tuple[int, ...]]


class PrefixPins:
    """The one book of what is pinned; tree and pools are told of the blocks that this keeps."""

    def __init__(
        self, groups: Sequence[KVGroup], pools: Sequence[BlockPool], tree: PrefixTree, states: StateSlots | None
    ) -> None:
        self._groups = groups
        self._pools = pools
        self._tree = tree
        self._states = states
        # By the tokens of full blocks; as it was given, for a cache whose blocks have another size.
        self._prefixes: dict[Prefix, Prefix] = {}

    def __iter__(self) -> Iterator[Prefix]:
        """What is pinned, as it was given."""
        return iter(self._prefixes.values())

    def add(self, prefix: Prefix) -> int:
        """Keep the full blocks of ``prefix`` once they are computed, whoever else wants them; returns their tokens.

        Raises RequestRefused when it fills no block, or pins would take more than half of a group's blocks or of the
        snapshots of states.
        """
        full = self._full(prefix)
        num_tokens = len(full[1])
        if not num_tokens:
            raise RequestRefused(f"a prefix of {len(prefix[1])} tokens fills no block of {self._tree.block_size}")
        if full not in self._prefixes:
            path = self._path(full)
            for group, pool, nodes in zip(self._groups, self._pools, self._seen_at_end(path), strict=True):
                count, most = pool.num_pinned_with(nodes), int(pool.num_blocks * MAX_PINNED_SHARE)
                if count > most:
                    self._tree.prune(path[-1])
                    raise RequestRefused(
                        f"{count} blocks would be pinned in the {group.rule} attention group; at most {most} "
                        f"of its {pool.num_blocks} may be: unpin another prefix or raise kv_cache_memory"
                    )
            self._check_snapshots(path[-1])
            self._pin(path)
        self._prefixes[full] = prefix
        return num_tokens

    def _check_snapshots(self, end: PrefixNode) -> None:
        if self._states is None:
            return
        pinned = sum(node.snapshot_pins > 0 for node in self._tree.nodes()) + (not end.snapshot_pins)
        most = int(self._states.num_snapshots * MAX_PINNED_SHARE)
        if pinned > most:
            self._tree.prune(end)
            raise RequestRefused(
                f"the recurrent states of {pinned} prefixes would be pinned; at most {most} of "
                f"{self._states.num_snapshots} may be: unpin another prefix or raise snapshot_memory"
            )

    def discard(self, prefix: Prefix) -> bool:
        """Take back the ``add`` of a prefix with the same full blocks; False if there is none."""
        full = self._full(prefix)
        if self._prefixes.pop(full, None) is None:
            return False
        path = self._path(full)
        for pool, nodes in zip(self._pools, self._seen_at_end(path), strict=True):
            pool.unpin(reversed(nodes))
        if self._states is not None:
            path[-1].snapshot_pins -= 1
        self._tree.prune(path[-1])
        return True

    def take_over(self, prefixes: Iterable[Prefix]) -> None:
        """Pin what was pinned in another cache; what finds no room is given up."""
        for prefix in prefixes:
            try:
                self.add(prefix)
            except RequestRefused as error:
                logger.warning("a pinned prefix of %d tokens is given up: %s", len(prefix[1]), error)

    def renew(self) -> None:
        """Pin everything again in tree and pools that have forgotten all."""
        for full in self._prefixes:
            self._pin(self._path(full))

    def _full(self, prefix: Prefix) -> Prefix:
        salt, tokens = prefix
        return salt, tokens[: len(tokens) // self._tree.block_size * self._tree.block_size]

    def _pin(self, path: Sequence[PrefixNode]) -> None:
        if self._states is not None:
            path[-1].snapshot_pins += 1
        for pool, nodes in zip(self._pools, self._seen_at_end(path), strict=True):
            pool.pin(nodes)

    def _path(self, full: Prefix) -> list[PrefixNode]:
        salt, tokens = full
        size, node, path = self._tree.block_size, self._tree.root(salt), []
        for start in range(0, len(tokens), size):
            node = self._tree.child(node, tokens[start : start + size])
            path.append(node)
        return path

    def _seen_at_end(self, path: Sequence[PrefixNode]) -> list[Sequence[PrefixNode]]:
        """Per group, the nodes of a prefix that its mask rule still sees at the prefix's end."""
        size = self._tree.block_size
        return [path[group.rule.first_visible(len(path) * size) // size :] for group in self._groups]

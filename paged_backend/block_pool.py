"""BlockPool: one KV group's blocks, each free, owned by requests, or cached for reuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from paged_backend.errors import IntegrityError
from paged_backend.policies import CachedBlock, EvictionPolicy
from paged_backend.prefix_tree import PrefixNode, PrefixTree

PolicyErrorHandler = Callable[[object, str, BaseException | str], None]


class BlockPool:
    """Counts references and finds blocks: a free one first, else the cached one that the eviction policy names.

    The policy is advice: an answer that is no cached block, or that would drop a full-attention block before its
    descendants, is reported and the longest unused block goes instead.
    """

    def __init__(
        self,
        group: int,
        num_blocks: int,
        tree: PrefixTree,
        policy: EvictionPolicy,
        on_policy_error: PolicyErrorHandler,
        *,
        needs_ancestors: bool,
    ) -> None:
        self.group = group
        self.num_blocks = num_blocks
        self.tree = tree
        self.policy = policy
        self.needs_ancestors = needs_ancestors
        self._on_policy_error = on_policy_error
        # Cached blocks that nobody uses, longest unused first.
        self._cached: dict[int, CachedBlock] = {}
        self.num_evictions = 0
        self.reset()

    def reset(self) -> None:
        """Every block free, nothing cached, whatever state the pool was in."""
        for block in list(self._cached):
            self._uncache(block)
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._ref_counts = [0] * self.num_blocks
        self._nodes: list[PrefixNode | None] = [None] * self.num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody uses but that hold a reusable prefix."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that a request could get now."""
        return len(self._free) + len(self._cached)

    @property
    def num_owned(self) -> int:
        return self.num_blocks - self.num_available

    def is_shared(self, block: int) -> bool:
        return self._ref_counts[block] > 1

    def is_unused(self, block: int) -> bool:
        return self._ref_counts[block] == 0

    def allocate(self) -> int:
        """An unowned block, now owned once; the caller checked ``num_available``."""
        block = self._free.pop() if self._free else self._evict()
        self._ref_counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more request uses ``block``."""
        if self._ref_counts[block] == 0:
            self._uncache(block)
        self._ref_counts[block] += 1

    def release(self, block: int, now: float, priority: int = 0) -> None:
        """One request less uses ``block``; the last one leaves it cached if it holds a known prefix, else free."""
        self._ref_counts[block] -= 1
        if self._ref_counts[block]:
            return
        node = self._nodes[block]
        if node is None:
            self._free.append(block)
            return
        entry = CachedBlock(block, node.depth - 1, node.hits, now, priority)
        self._cached[block] = entry
        self._ask("add", entry, now)

    def register(self, block: int, node: PrefixNode) -> int:
        """Let ``block`` hold ``node``'s tokens; returns the block that does, an earlier one if there is one.

        The caller that gets another block back shares that one instead, so that whoever owns a block of a prefix owns
        what the prefix is reached through.
        """
        held = node.blocks[self.group]
        if held is not None:
            return held
        if self._nodes[block] is None:
            node.blocks[self.group] = block
            self._nodes[block] = node
        return block

    def flush(self) -> None:
        """Forget every prefix: cached blocks become free, owned ones stay but are no longer found."""
        for block in list(self._cached):
            self._uncache(block)
            self._free.append(block)
        self._nodes = [None] * self.num_blocks

    def resize(self, num_blocks: int) -> None:
        """Add free blocks at the end of the pool; an empty pool may shrink too."""
        more = num_blocks - self.num_blocks
        if more < 0:
            assert self.num_free == self.num_blocks
            self.num_blocks = num_blocks
            self.reset()
            return
        self._free[:0] = range(num_blocks - 1, self.num_blocks - 1, -1)
        self._ref_counts.extend([0] * more)
        self._nodes.extend([None] * more)
        self.num_blocks = num_blocks

    def blocks_in_use(self) -> list[int]:
        """The blocks whose contents matter: owned or cached."""
        return sorted(set(range(self.num_blocks)) - set(self._free))

    def _evict(self) -> int:
        answer = self._ask("evict")
        block: int = answer if self._may_evict(answer) else self._oldest_leaf()
        self._uncache(block)
        node = self._nodes[block]
        assert node is not None
        self._nodes[block] = None
        self.tree.forget(node, self.group)
        self.num_evictions += 1
        return block

    def _may_evict(self, block: object) -> bool:
        """Whether the policy's answer can be followed; reports it if not."""
        if not isinstance(block, int) or isinstance(block, bool) or block not in self._cached:
            problem = f"returned {block!r}, which is no cached block that nobody uses"
        elif not self._is_leaf(block):
            problem = f"returned block {block}, whose descendants are still cached"
        else:
            return True
        self._on_policy_error(self.policy, "evict", problem)
        return False

    def _is_leaf(self, block: int) -> bool:
        node = self._nodes[block]
        assert node is not None
        if not self.needs_ancestors:
            return True
        return all(child.blocks[self.group] is None for child in node.children.values())

    def _oldest_leaf(self) -> int:
        return next(block for block in self._cached if self._is_leaf(block))

    def _uncache(self, block: int) -> None:
        self._ask("remove", self._cached.pop(block))

    def _ask(self, method: str, *args: object) -> Any:
        try:
            return getattr(self.policy, method)(*args)
        except Exception as error:
            self._on_policy_error(self.policy, method, error)
            return None

    def check_integrity(self, owners: dict[int, int]) -> None:
        """Raise IntegrityError unless every block is exactly one of free, cached or owned, with the right counts.

        ``owners`` maps each block in some request's table to how many tables hold it.
        """

        def fail(message: str) -> NoReturn:
            raise IntegrityError(f"KV group {self.group}: {message}")

        free = set(self._free)
        if len(free) != len(self._free):
            fail("a block is free twice")
        for block in range(self.num_blocks):
            states = (block in free) + (block in self._cached) + (block in owners)
            if states != 1:
                fail(f"block {block} is in {states} of the states free, cached, owned")
            if self._ref_counts[block] != owners.get(block, 0):
                fail(f"block {block} has {self._ref_counts[block]} references, {owners.get(block, 0)} tables hold it")
            node = self._nodes[block]
            if node is not None and node.blocks[self.group] != block:
                fail(f"block {block} points at a prefix that is stored in block {node.blocks[self.group]}")
            if (block in free and node is not None) or (block in self._cached and node is None):
                fail(f"block {block} is {'free' if block in free else 'cached'} but its prefix says otherwise")
        for node in self.tree.nodes():
            held = node.blocks[self.group]
            if held is not None and self._nodes[held] is not node:
                fail(f"a prefix of depth {node.depth} points at block {held}, which holds another")

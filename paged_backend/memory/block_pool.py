"""BlockPool: one KV group's blocks, each free, owned by requests, or cached for reuse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NoReturn

from paged_backend.checks import describe
from paged_backend.errors import IntegrityError
from paged_backend.memory.prefix_tree import PrefixNode, PrefixTree
from paged_backend.policies import CachedBlock, EvictionPolicy, LazyHeap
from paged_backend.policy.eviction_guard import EvictionGuard
from paged_backend.policy.policy_errors import FAILED, ErrorHandler


class BlockPool:
    """Counts references and finds blocks: a free one first, else the cached one that the eviction policy names.

    On offer to the policy are the cached blocks that may go: nobody uses them, they are not pinned, and with
    ``needs_ancestors`` no block is reached through them. The policy is advice: any other answer is reported, and the
    block that is on offer longest goes instead. Blocks that waiting requests begin with are offered only when there are
    no others, the one that is wanted last first, unless the policy says that it does not spare them.
    """

    def __init__(
        self,
        group: int,
        num_blocks: int,
        tree: PrefixTree,
        policy: EvictionPolicy,
        on_policy_error: ErrorHandler,
        *,
        needs_ancestors: bool,
    ) -> None:
        self.group = group
        self.num_blocks = num_blocks
        self.tree = tree
        self.policy = EvictionGuard(policy, on_policy_error)
        self.needs_ancestors = needs_ancestors
        # Blocks that nobody uses but that hold a reusable prefix.
        self._cached: dict[int, CachedBlock] = {}
        # Those of them that may be dropped, longest on offer first, and those that are spared for who waits.
        self._offered: dict[int, CachedBlock] = {}
        self._spared: LazyHeap[int] = LazyHeap()
        # Blocks that stay for a prefix, whether it is computed yet or not; and those of them that nobody uses.
        self.num_pinned = 0
        self._num_idle_pinned = 0
        self.num_evictions = 0
        self.reset()

    def reset(self) -> None:
        """Every block free, nothing cached or pinned, whatever state the pool was in."""
        for block in list(self._cached):
            self._uncache(block)
        self.num_pinned = 0
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
        return len(self._free) + len(self._cached) - self._num_idle_pinned

    @property
    def num_owned(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached)

    def is_shared(self, block: int) -> bool:
        return self._ref_counts[block] > 1

    def is_available(self, block: int) -> bool:
        """Whether the block counts in ``num_available``, so that taking it leaves one less."""
        return self._ref_counts[block] == 0 and not self._is_pinned(block)

    def num_freed_by(self, blocks: Counter[int]) -> int:
        """How many more would be available if each of ``blocks`` lost this many users."""
        return sum(count == self._ref_counts[block] and not self._is_pinned(block) for block, count in blocks.items())

    def allocate(self, count: int) -> list[int]:
        """Unowned blocks, now owned once; the caller checked ``num_available``."""
        free = self._free
        num_free = min(count, len(free))
        blocks = free[len(free) - num_free :][::-1]
        del free[len(free) - num_free :]
        if num_free < count:
            with self.policy.timed("evict"):
                for _ in range(count - num_free):
                    blocks.append(self._evict())
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def share(self, block: int) -> None:
        """One more request uses ``block``."""
        if self._ref_counts[block] == 0:
            self._uncache(block)
        self._ref_counts[block] += 1

    def release(self, blocks: Iterable[int], now: float, priority: int = 0) -> None:
        """One request less uses ``blocks``; the last one leaves them cached if they hold a known prefix, else free."""
        group, counts, nodes = self.group, self._ref_counts, self._nodes
        with self.policy.timed("add"):
            for block in blocks:
                counts[block] -= 1
                if counts[block]:
                    continue
                node = nodes[block]
                if node is None:
                    self._free.append(block)
                    continue
                self._cached[block] = CachedBlock(
                    block, node.depth - 1, node.hits, node.created, now, priority, node.contents
                )
                self._num_idle_pinned += node.pins[group] > 0
                self._offer(block, node)

    def register(self, block: int, node: PrefixNode) -> int:
        """Let ``block`` hold ``node``'s tokens; returns the block that does, an earlier one if there is one.

        The caller that gets another block back shares that one instead, so that whoever owns a block of a prefix owns
        what the prefix is reached through.
        """
        held = node.blocks[self.group]
        if held is not None:
            return held
        if self._nodes[block] is None:
            self.tree.hold(node, self.group, block)
            self._nodes[block] = node
        return block

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

    def pin(self, nodes: Iterable[PrefixNode]) -> None:
        """Keep the blocks of ``nodes``, also those that are computed later."""
        for node in nodes:
            node.pins[self.group] += 1
            if node.pins[self.group] > 1:
                continue
            self.num_pinned += 1
            block = node.blocks[self.group]
            if block is not None and block in self._cached:
                self._num_idle_pinned += 1
                self._withdraw(block)

    def unpin(self, nodes: Iterable[PrefixNode]) -> None:
        """Take back one ``pin`` of each node, end of the prefix first."""
        for node in nodes:
            node.pins[self.group] -= 1
            if node.pins[self.group]:
                continue
            self.num_pinned -= 1
            block = node.blocks[self.group]
            if block is not None and block in self._cached:
                self._num_idle_pinned -= 1
                self._offer(block, node)

    def offer_again(self, node: PrefixNode) -> None:
        """Who waits for ``node`` changed."""
        block = node.blocks[self.group]
        if block is not None and (block in self._spared or (block in self._offered and node.num_awaiting)):
            self._withdraw(block)
            self._offer(block, node)

    def num_pinned_with(self, nodes: Iterable[PrefixNode]) -> int:
        """What ``num_pinned`` would be with ``nodes`` pinned too."""
        return self.num_pinned + sum(not node.pins[self.group] for node in nodes)

    def _is_pinned(self, block: int) -> bool:
        node = self._nodes[block]
        return node is not None and node.pins[self.group] > 0

    def _evict(self) -> int:
        block = self._chosen() if self._offered else self._awaited_last()
        node = self._nodes[block]
        assert node is not None
        self._withdraw(block)
        del self._cached[block]
        parent = node.parent
        self._nodes[block] = None
        self.tree.forget(node, self.group)
        self.num_evictions += 1
        above = None if parent is None else parent.blocks[self.group]
        if above is not None and above in self._cached:
            assert parent is not None
            self._offer(above, parent)
        return block

    def _chosen(self) -> int:
        """The block on offer that the policy names."""
        answer = self.policy.evict()
        if type(answer) is int and answer in self._offered:
            return answer
        if answer is not FAILED:
            self.policy.report("evict", f"returned {describe(answer)}, which is no block on offer")
        return next(iter(self._offered))

    def _awaited_last(self) -> int:
        """The block whose first waiting request came last."""
        first = self._spared.first()
        assert first is not None
        return first[1]

    def _may_go(self, node: PrefixNode) -> bool:
        return not node.pins[self.group] and not (self.needs_ancestors and node.held_children[self.group])

    def _offer(self, block: int, node: PrefixNode) -> None:
        """Tell the policy of a cached block that is not on offer, if it may go and need not be spared."""
        if not self._may_go(node):
            return
        if node.num_awaiting and self.policy.spares_awaited:
            self._spared.push(block, -node.first_awaiting, block)
            return
        entry = self._offered[block] = self._cached[block]
        self.policy.add(entry)

    def _withdraw(self, block: int) -> None:
        entry = self._offered.pop(block, None)
        if entry is not None:
            self.policy.remove(entry)
        else:
            self._spared.discard(block)

    def _uncache(self, block: int) -> None:
        self._withdraw(block)
        self._num_idle_pinned -= self._is_pinned(block)
        del self._cached[block]

    def check_integrity(self, owners: dict[int, int]) -> None:
        """Raise IntegrityError unless every block is exactly one of free, cached or owned, with the right counts.

        ``owners`` maps each block in some request's table to how many tables hold it.
        """

        def fail(message: str) -> NoReturn:
            raise IntegrityError(f"KV group {self.group}: {message}")

        free, num_spared = set(self._free), 0
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
            if block in self._cached:
                assert node is not None
                offered, spared = block in self._offered, block in self._spared
                num_spared += spared
                spare = node.num_awaiting > 0 and self.policy.spares_awaited
                if (offered, spared) != ((not spare, spare) if self._may_go(node) else (False, False)):
                    fail(f"block {block} is {'' if offered else 'not '}on offer and {'' if spared else 'not '}spared")
        if num_spared != len(self._spared):
            fail(f"{len(self._spared)} blocks are said to be spared, {num_spared} are")
        idle = sum(block in self._cached and self._is_pinned(block) for block in range(self.num_blocks))
        if idle != self._num_idle_pinned or not self._offered.keys() <= self._cached.keys():
            fail(f"{self._num_idle_pinned} pinned blocks are said to be unused, {idle} are")
        pinned = sum(node.pins[self.group] > 0 for node in self.tree.nodes())
        if pinned != self.num_pinned:
            fail(f"{self.num_pinned} blocks are said to be pinned, {pinned} prefixes are")
        for node in self.tree.nodes():
            children = sum(child.blocks[self.group] is not None for child in node.children.values())
            if node.held_children[self.group] != children:
                fail(f"a prefix of depth {node.depth} counts {node.held_children[self.group]} children, not {children}")
            held = node.blocks[self.group]
            if held is not None and self._nodes[held] is not node:
                fail(f"a prefix of depth {node.depth} points at block {held}, which holds another")

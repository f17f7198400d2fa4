"""BlockManager: every request's block tables over the KV groups, prefix reuse, and copy on write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from paged_backend.errors import IntegrityError, RequestRefused
from paged_backend.memory.block_pool import BlockPool
from paged_backend.memory.kv_group import KVGroup
from paged_backend.memory.pins import PrefixPins
from paged_backend.memory.prefix_queue import PrefixQueue
from paged_backend.memory.prefix_tree import PrefixNode, PrefixTree
from paged_backend.memory.state_slots import SLOTS_PER_SEAT, StateSlots, deepest_snapshot
from paged_backend.policies import EvictionPolicy
from paged_backend.policy.policy_errors import ErrorHandler
from paged_backend.request.request import Request

# Slots reserved beyond the step's own, so that a block is at hand before the token that needs it.
LOOKAHEAD_TOKENS = 2
# A block table's entry for a block that the group's mask rule no longer sees, or that is not there yet.
NO_BLOCK = -1


@dataclass(frozen=True)
class PrefixMatch:
    """The cached beginning of a request: its first ``num_tokens`` tokens, which end in ``node``, a root if there are
    none.

    num_stateless: tokens of a longer beginning, whose keys and values are there but no state.
    """

    node: PrefixNode
    num_tokens: int
    num_stateless: int = 0


class BlockTable:
    """A request's blocks in each group, in order of position.

    capacity: tokens that can be written without asking for blocks. first: per group, the index of the first block
    still held. node: the deepest registered prefix, None once the request must not register any more.
    """

    __slots__ = ("blocks", "capacity", "first", "node", "seat")

    def __init__(self, seat: int, num_groups: int, node: PrefixNode | None) -> None:
        self.seat = seat
        self.blocks: list[list[int]] = [[] for _ in range(num_groups)]
        self.first = [0] * num_groups
        self.capacity = 0
        self.node = node


class BlockManager:
    """Gives blocks to requests on demand and takes them back. Knows tokens and blocks, not tensors.

    ``copies[g]`` collects the ``(source, target)`` blocks of group g that must be copied before the step's forward
    pass; the engine drains it. There may be no group at all. num_snapshots: recurrent states that prefixes may keep,
    None when the model has no state; ``states`` are the books of it.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        num_blocks: Sequence[int],
        block_size: int,
        max_num_seqs: int,
        max_chunk: int,
        evictions: Sequence[EvictionPolicy],
        on_policy_error: ErrorHandler,
        *,
        enable_prefix_caching: bool = True,
        num_snapshots: int | None = None,
    ) -> None:
        self.groups = tuple(groups)
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_chunk = max_chunk
        self.enable_prefix_caching = enable_prefix_caching
        self.tree = PrefixTree(len(groups), block_size)
        self.pools = [
            BlockPool(g, count, self.tree, policy, on_policy_error, needs_ancestors=group.rule.kind == "full")
            for g, (group, count, policy) in enumerate(zip(groups, num_blocks, evictions, strict=True))
        ]
        self.queue = PrefixQueue(self.tree, self._awaiting_changed)
        self.states = None if num_snapshots is None else StateSlots(num_snapshots, self.tree)
        self.pins = PrefixPins(self.groups, self.pools, self.tree, self.states)
        self.copies: list[list[tuple[int, int]]] = [[] for _ in groups]
        self._tables: dict[Request, BlockTable] = {}
        # Those that may share the block that they write.
        self._forked: set[Request] = set()
        self._free_seats = list(range(max_num_seqs - 1, -1, -1))
        self._rows = [np.full((max_num_seqs, 8), NO_BLOCK, np.int32) for _ in groups]

    # Questions

    @property
    def num_free_seats(self) -> int:
        return len(self._free_seats)

    @property
    def max_states(self) -> int:
        """Slots of recurrent states that may be in use at once, by requests and for prefixes."""
        return 0 if self.states is None else SLOTS_PER_SEAT * self.max_num_seqs + self.states.num_snapshots

    def num_held(self, request: Request) -> int:
        """Blocks over all groups that ``request`` holds."""
        table = self._tables[request]
        return sum(len(blocks) - first for blocks, first in zip(table.blocks, table.first, strict=True))

    def shortage(self, num_tokens: int, num_own_pinned: int = 0) -> str | None:
        """Why a sequence of ``num_tokens`` can never fit even alone, with the numbers; None when it can.

        num_own_pinned: pinned blocks that it begins with, see ``num_pinned_of``.
        """
        for group, pool in zip(self.groups, self.pools, strict=True):
            need = group.blocks_for(num_tokens, self.block_size, self.max_chunk)
            num_pinned = pool.num_pinned - num_own_pinned
            if need > pool.num_blocks - num_pinned:
                pinned = f", {num_pinned} of them pinned (see unpin_prefix)" if num_pinned else ""
                return (
                    f"{num_tokens} tokens need {need} blocks of {self.block_size} tokens in the {group.rule} attention "
                    f"group, which has {pool.num_blocks}{pinned}"
                )
        return None

    def num_pinned_of(self, token_ids: Sequence[int], salt: str | None) -> int:
        """How many pinned blocks a request of these tokens can always use as its own.

        None beside windows and recurrent states: what they need at the end of a prefix may not be computed yet where
        its first blocks are, which then cannot be matched.
        """
        alike = self.states is None and all(group.rule.kind == "full" for group in self.groups)
        if not alike or not self.enable_prefix_caching:
            return 0
        path = self.tree.match(token_ids, salt, (len(token_ids) - 1) // self.block_size)
        return sum(all(node.pins) for node in path)

    def num_pinned_for(self, request: Request) -> int:
        """``num_pinned_of`` the prompt of ``request``."""
        if not self._caches(request):
            return 0
        return self.num_pinned_of(request.token_ids[: request.num_prompt_tokens], request.cache_salt)

    def _caches(self, request: Request) -> bool:
        # The tokens of a prompt that is fed as embeddings do not tell its keys and values.
        return self.enable_prefix_caching and request.prompt_embeds is None

    def match_prefix(self, request: Request) -> PrefixMatch:
        """The longest cached beginning of the request's tokens that every group can still serve.

        At least one token stays to be computed, since its logits are wanted. O(log blocks of the prefix) while the
        request waits, where all groups are of full attention and there is no recurrent state.
        """
        if not self._caches(request):
            return PrefixMatch(self.tree.root(request.cache_salt), 0)
        node = known = self._agreed(self._known_end(request))
        if self.states is not None:
            # At the end of a shorter beginning, what windows see there may be gone.
            while node.depth and node.snapshot is None:
                node = self._agreed(deepest_snapshot(node))
        return PrefixMatch(node, node.depth * self.block_size, known.depth * self.block_size)

    def _known_end(self, request: Request) -> PrefixNode:
        """Where the tree's path along the request's tokens ends, all but the last."""
        if request.prefix_node is not None:
            node: PrefixNode = request.prefix_node
            return node
        last = (request.num_tokens - 1) // self.block_size
        path = self.tree.match(request.token_ids, request.cache_salt, last)
        return path[-1] if path else self.tree.root(request.cache_salt)

    def _agreed(self, node: PrefixNode) -> PrefixNode:
        """The longest match up to ``node`` that every group can serve."""
        agreed = None
        while node.depth and node is not agreed:
            # Each group may shorten the match, after which the others must agree again.
            agreed = node
            for g in range(len(self.groups)):
                node = self._servable(node, g)
        return node

    def _servable(self, node: PrefixNode, g: int) -> PrefixNode:
        """The longest match up to ``node`` whose visible part group g still holds."""
        if self.groups[g].rule.kind == "full":
            return node.deepest(lambda ancestor: ancestor.blocks[g] is not None)
        # Every shorter match that reaches past a missing block sees it too.
        while missing := next((seen for seen in self._seen(node, g) if seen.blocks[g] is None), None):
            assert missing.parent is not None
            node = missing.parent
        return node

    def _seen(self, node: PrefixNode, g: int) -> Iterator[PrefixNode]:
        """What group g sees of the prefix that ends in ``node``, last block first."""
        first = self.groups[g].rule.first_visible(node.depth * self.block_size) // self.block_size
        return islice(node.upwards(), node.depth - first)

    def can_admit(self, request: Request, match: PrefixMatch, promised: Sequence[int], headroom: int) -> bool:
        """Whether the whole of ``request`` so far fits beside what is ``promised`` per group to other prefills,
        leaving up to ``headroom`` blocks, at most an eighth of the pool, for those that decode."""
        for g, (group, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            need = group.blocks_for(request.num_tokens, self.block_size, self.max_chunk)
            num_shared = match.node.depth - group.rule.first_visible(match.num_tokens) // self.block_size
            spare = min(headroom, pool.num_blocks // 8)
            if pool.num_available - promised[g] < max(need, num_shared) - self._num_taken(match.node, g) + spare:
                return False
        return True

    def _num_taken(self, node: PrefixNode, g: int) -> int:
        """How many blocks that group g sees of the prefix that ends in ``node`` are not available, since others use
        them or they are pinned."""
        pool = self.pools[g]
        if self.groups[g].rule.kind == "full":
            # Whoever has a block has what it is reached through.
            return node.deepest(lambda ancestor: not pool.is_available(self._block(ancestor, g))).depth
        return sum(not pool.is_available(self._block(seen, g)) for seen in self._seen(node, g))

    @staticmethod
    def _block(node: PrefixNode, g: int) -> int:
        block = node.blocks[g]
        assert block is not None
        return block

    def still_needed(self, request: Request) -> list[int]:
        """Per group, the blocks a half-prefilled request has yet to take."""
        table = self._tables[request]
        return [
            max(0, group.blocks_for(request.num_tokens, self.block_size, self.max_chunk) - (len(blocks) - first))
            for group, blocks, first in zip(self.groups, table.blocks, table.first, strict=True)
        ]

    def freed_by(self, requests: Sequence[Request]) -> list[int]:
        """Per group, how many more blocks would be available if ``requests`` gave back theirs."""
        freed = []
        for g, pool in enumerate(self.pools):
            tables = (self._tables[request] for request in requests)
            freed.append(pool.num_freed_by(Counter(b for table in tables for b in table.blocks[g][table.first[g] :])))
        return freed

    # Pinning

    def pin(self, token_ids: Sequence[int], salt: str | None = None, unfinished: Iterable[Request] = ()) -> int:
        """Keep the full blocks of this prefix once they are computed, whoever else wants them; returns their tokens.

        Raises RequestRefused when the prefix fills no block, when pins would take more than half of a group's blocks,
        or when one of the ``unfinished`` requests could not fit beside it.
        """
        prefix = (salt, tuple(token_ids))
        num_tokens = self.pins.add(prefix)
        for request in unfinished:
            shortage = self.shortage(request.max_num_tokens, self.num_pinned_for(request))
            if shortage is not None:
                self.pins.discard(prefix)
                raise RequestRefused(f"an unfinished request could not fit beside the pinned prefix: {shortage}")
        return num_tokens

    def unpin(self, token_ids: Sequence[int], salt: str | None = None) -> bool:
        """Take back the ``pin`` of this prefix; False if there is none."""
        return self.pins.discard((salt, tuple(token_ids)))

    # Waiting

    def expect(self, request: Request) -> None:
        """``request`` waits from now on, so what it begins with is worth keeping."""
        if self._caches(request):
            self.queue.join(request)

    def expect_no_more(self, request: Request) -> None:
        """``request`` waits no longer."""
        self.queue.leave(request)

    def _awaiting_changed(self, node: PrefixNode) -> None:
        for pool in self.pools:
            pool.offer_again(node)

    # Taking and giving back

    def admit(self, request: Request, match: PrefixMatch) -> None:
        """Give ``request`` a seat and the blocks of its cached beginning."""
        table = BlockTable(self._free_seats.pop(), len(self.groups), match.node if self._caches(request) else None)
        self._tables[request] = table
        request.seat = table.seat
        for node in match.node.upwards():
            node.hits += 1
        for g, pool in enumerate(self.pools):
            blocks = [self._block(node, g) for node in self._seen(match.node, g)][::-1]
            for block in blocks:
                pool.share(block)
            table.first[g] = match.node.depth - len(blocks)
            self._append(table, g, [NO_BLOCK] * table.first[g] + blocks)
        table.capacity = match.num_tokens
        if self.states is not None:
            stops = self._stops(request, match) if table.node is not None else ()
            self.states.begin(request, match.node if match.num_tokens else None, stops)
        self.queue.leave(request)

    def _stops(self, request: Request, match: PrefixMatch) -> set[int]:
        """Where the state of ``request`` is worth keeping: at the last block's end before its last token, where known
        prefixes branch off, and at the ends of pinned ones."""
        size, last = self.block_size, (request.num_tokens - 1) // self.block_size
        pinned = (node.depth * size for node in self._known_end(request).upwards() if node.snapshot_pins)
        stops = {last * size, match.num_stateless, *pinned}
        return {stop for stop in stops if stop > match.num_tokens}

    def without_room(self, requests: Iterable[Request]) -> list[Request]:
        """Those whose tokens so far have not all a writable slot yet."""
        tables = self._tables
        return [request for request in requests if request.num_tokens > tables[request].capacity]

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Make the slots of the first ``num_tokens`` tokens writable from ``request.num_computed_tokens`` on.

        Gives back blocks that the mask rules no longer see, takes new ones, and copies a shared block that is about to
        be written. False, with nothing taken, when a group has too few blocks.
        """
        table = self._tables[request]
        if num_tokens <= table.capacity:
            return True
        self._release_unseen(request, table)
        wanted = min(num_tokens + LOOKAHEAD_TOKENS, request.max_num_tokens)
        return self._extend(request, table, max(wanted, num_tokens)) or self._extend(request, table, num_tokens)

    def _extend(self, request: Request, table: BlockTable, num_tokens: int) -> bool:
        target = -(-num_tokens // self.block_size)
        written = request.num_computed_tokens // self.block_size
        plans = []
        for pool, blocks in zip(self.pools, table.blocks, strict=True):
            copy = written < len(blocks) and blocks[written] != NO_BLOCK and pool.is_shared(blocks[written])
            new = max(0, target - len(blocks))
            if new + copy > pool.num_available:
                return False
            plans.append((new, copy))
        for g, (new, copy) in enumerate(plans):
            pool = self.pools[g]
            if copy:
                source, (block,) = table.blocks[g][written], pool.allocate(1)
                pool.release([source], 0.0)
                self.copies[g].append((source, block))
                table.blocks[g][written] = block
                self._rows[g][table.seat, written] = block
            if new:
                self._append(table, g, pool.allocate(new))
        table.capacity = min((len(blocks) for blocks in table.blocks), default=target) * self.block_size
        return True

    def _release_unseen(self, request: Request, table: BlockTable) -> None:
        now = request.last_scheduled_time or 0.0
        for g, group in enumerate(self.groups):
            if group.rule.kind == "full":
                continue
            seen = group.rule.first_visible(request.num_computed_tokens) // self.block_size
            blocks, first = table.blocks[g], table.first[g]
            end = min(seen, len(blocks))
            if first < end:
                self.pools[g].release(blocks[first:end], now, request.priority)
                blocks[first:end] = [NO_BLOCK] * (end - first)
                self._rows[g][table.seat, first:end] = NO_BLOCK
                table.first[g] = end

    def register(self, computed: Iterable[tuple[Request, int]]) -> None:
        """Book what was computed, so many tokens each: the state as the request's, full blocks as findable for requests
        that begin alike."""
        size, has_state = self.block_size, self.states is not None
        for request, count in computed:
            if has_state or count > 1 or request.num_computed_tokens % size == 0:
                self._register(request)

    def _register(self, request: Request) -> None:
        table = self._tables[request]
        states = self.states
        keeps_state = states is not None and states.commit(request)
        # Without keys and values only a state makes a prefix worth finding.
        full = request.num_computed_tokens // self.block_size
        if table.node is not None and table.node.depth < full and (self.groups or keeps_state):
            self._register_blocks(request, table, table.node, full)
        if states is not None and keeps_state:
            states.keep(request, table.node)
            if table.node is not None:
                self.tree.prune(table.node)

    def _register_blocks(self, request: Request, table: BlockTable, node: PrefixNode, full: int) -> None:
        size = self.block_size
        if node.depth and node.parent is None:
            # The node was dropped with the last block of another request; walk the tree anew.
            node = self.tree.root(request.cache_salt)
        while node.depth < full:
            index = node.depth
            node = self.tree.child(node, tuple(request.token_ids[index * size : (index + 1) * size]))
            for g, pool in enumerate(self.pools):
                block = table.blocks[g][index]
                if block == NO_BLOCK:
                    continue
                known = pool.register(block, node)
                if known != block:
                    # Two requests computed the same block; one copy is enough.
                    pool.share(known)
                    pool.release([block], request.last_scheduled_time or 0.0)
                    table.blocks[g][index] = known
                    self._rows[g][table.seat, index] = known
        table.node = node

    def fork(self, parent: Request, child: Request) -> None:
        """``child`` takes a seat and shares all of ``parent``'s blocks, the partly filled last one too."""
        source = self._tables[parent]
        table = BlockTable(self._free_seats.pop(), len(self.groups), source.node)
        self._tables[child] = table
        self._forked.add(child)
        child.seat = table.seat
        child.num_computed_tokens = parent.num_computed_tokens
        for g, blocks in enumerate(source.blocks):
            # Blocks reserved ahead of the written tokens stay the parent's alone.
            used = blocks[: -(-parent.num_computed_tokens // self.block_size)]
            table.first[g] = source.first[g]
            for block in used:
                if block != NO_BLOCK:
                    self.pools[g].share(block)
            self._append(table, g, used)
        # The next write by either of them must look at the shared block first.
        source.capacity = table.capacity = parent.num_computed_tokens // self.block_size * self.block_size
        if self.states is not None:
            self.states.fork(parent, child)

    def free(self, request: Request, now: float) -> None:
        """Give back everything, tail first, so that what stays cached loses its end before its beginning."""
        table = self._tables.pop(request)
        self._forked.discard(request)
        for g, blocks in enumerate(table.blocks):
            if self.copies[g]:
                # A copy into a block that is given back must not land on its next owner.
                self.copies[g] = [pair for pair in self.copies[g] if pair[1] not in blocks]
            self.pools[g].release(blocks[table.first[g] :][::-1], now, request.priority)
            self._rows[g][table.seat, : len(blocks)] = NO_BLOCK
        self._free_seats.append(table.seat)
        request.seat = None
        if self.states is not None:
            self.states.free(request)

    def reset(self) -> None:
        """Every block free, every seat empty, nothing cached."""
        for request in self._tables:
            request.seat = None
        self._tables.clear()
        self._forked.clear()
        self._free_seats = list(range(self.max_num_seqs - 1, -1, -1))
        self.tree.clear()
        self.queue.renew()
        if self.states is not None:
            self.states.reset()
        for g, pool in enumerate(self.pools):
            pool.reset()
            self.copies[g] = []
            self._rows[g].fill(NO_BLOCK)
        self.pins.renew()

    def resize(self, num_blocks: Sequence[int]) -> None:
        """Change the pools' sizes; block ids in use stay what they are. Only empty pools shrink."""
        for pool, count in zip(self.pools, num_blocks, strict=True):
            pool.resize(count)

    def blocks_in_use(self) -> list[list[int]]:
        """Per group, the blocks whose contents matter."""
        return [pool.blocks_in_use() for pool in self.pools]

    # Tables for the batch

    def tables(self, requests: Sequence[Request]) -> list[np.ndarray]:
        """Per group, the int32 block tables ``[len(requests), width]`` of ``requests``."""
        seats = np.fromiter((request.seat for request in requests), np.int64, len(requests))
        return [rows[seats] for rows in self._rows]

    def _append(self, table: BlockTable, g: int, blocks: Sequence[int]) -> None:
        index, rows = len(table.blocks[g]), self._rows[g]
        end = index + len(blocks)
        while end > rows.shape[1]:
            rows = self._rows[g] = np.concatenate([rows, np.full_like(rows, NO_BLOCK)], axis=1)
        rows[table.seat, index:end] = blocks
        table.blocks[g].extend(blocks)

    # Books

    def num_unfilled_slots(self, g: int) -> int:
        """Slots of group g that requests hold but no token fills yet; a block shared by forks counts once."""
        size, pool, unfilled = self.block_size, self.pools[g], 0
        if not self._forked:
            pairs = self._tables.items()
            return sum([max(0, len(table.blocks[g]) * size - r.num_computed_tokens) for r, table in pairs])
        # Only the block that is being written can be one that forks share; it is as full as the fullest of them has it.
        shared: dict[int, int] = {}
        for request, table in self._tables.items():
            blocks = table.blocks[g]
            empty = len(blocks) * size - request.num_computed_tokens
            if empty <= 0:
                continue
            index, used = divmod(request.num_computed_tokens, size)
            if pool.is_shared(blocks[index]):
                shared[blocks[index]] = min(shared.get(blocks[index], size), size - used)
                empty -= size - used
            unfilled += empty
        return unfilled + sum(shared.values())

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the books agree: blocks, references, tables, seats, and one writer per slot."""
        for g, (group, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            owners: Counter[int] = Counter()
            for request, table in self._tables.items():
                blocks, first = table.blocks[g], table.first[g]
                held = blocks[first:]
                if NO_BLOCK in held or any(block != NO_BLOCK for block in blocks[:first]):
                    raise IntegrityError(f"{request!r} holds {blocks} with first={first} in KV group {g}")
                if first > group.rule.first_visible(request.num_computed_tokens) // self.block_size:
                    raise IntegrityError(f"{request!r} gave back blocks it still sees in KV group {g}")
                if list(self._rows[g][table.seat, : len(blocks)]) != blocks:
                    raise IntegrityError(f"{request!r}: the batch's table differs in KV group {g}")
                if len(blocks) * self.block_size < max(request.num_computed_tokens, table.capacity):
                    raise IntegrityError(f"{request!r} has computed or may write more than its blocks hold")
                writable = held[max(0, request.num_computed_tokens // self.block_size - first) :]
                shared = [block for block in writable if pool.is_shared(block)]
                if shared and table.capacity > request.num_computed_tokens:
                    raise IntegrityError(f"{request!r} may write block {shared[0]}, which another request holds too")
                owners.update(held)
            pool.check_integrity(owners)
        self.queue.check_integrity()
        if self.states is not None:
            self.states.check_integrity(self._tables)
        seats = [table.seat for table in self._tables.values()] + self._free_seats
        if sorted(seats) != list(range(len(seats))):
            raise IntegrityError("a seat is lost or taken twice")

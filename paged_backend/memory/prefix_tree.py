"""PrefixTree: which blocks hold the keys and values of which token prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paged_backend.request.request import Request


class PrefixNode:
    """One full block of tokens after the prefix its ancestors spell; ``blocks[g]`` holds it in KV group g, or is None.

    A node is found by comparing token ids, never by a hash alone, so two prefixes cannot be taken for each other.

    awaiting: waiting requests whose tokens lead here and no further, by the tokens of the block that comes next in
    them, None for those that want no more; None as long as there are none. num_awaiting: how many stand here or below.
    contents: a hash of the salt and the tokens up to its end, for those who only want to recognise it.
    held_children: per group, how many of the children are held by a block. created: position among all nodes by age.
    jump: a node far above, so that a search up the path takes O(log depth).
    pins: per group, how often it is pinned. snapshot: the slot of the recurrent state after its tokens, or None;
    snapshot_pins: how often that is pinned.
    """

    __slots__ = (
        "awaiting",
        "blocks",
        "children",
        "contents",
        "created",
        "depth",
        "held_children",
        "hits",
        "jump",
        "num_awaiting",
        "parent",
        "pins",
        "snapshot",
        "snapshot_pins",
        "tokens",
    )

    def __init__(
        self,
        parent: PrefixNode | None,
        tokens: tuple[int, ...],
        num_groups: int,
        created: int = 0,
        salt: str | None = None,
    ) -> None:
        self.parent = parent
        self.tokens = tokens
        self.contents: int = _contents(salt if parent is None else parent.contents, tokens)
        self.depth: int = 0 if parent is None else parent.depth + 1
        # Skew-binary jump pointers (Myers, An applicative random-access stack, 1983).
        self.jump: PrefixNode = self if parent is None else parent
        if parent is not None and parent.depth - parent.jump.depth == parent.jump.depth - parent.jump.jump.depth:
            self.jump = parent.jump.jump
        self.children: dict[tuple[int, ...], PrefixNode] = {}
        self.blocks: list[int | None] = [None] * num_groups
        self.held_children = [0] * num_groups
        self.created = created
        self.hits = 0
        self.pins = [0] * num_groups
        self.awaiting: dict[tuple[int, ...] | None, dict[Request, None]] | None = None
        self.num_awaiting = 0
        self.snapshot: int | None = None
        self.snapshot_pins = 0

    def upwards(self) -> Iterator[PrefixNode]:
        """It and the nodes before it, last first, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def deepest(self, holds: Callable[[PrefixNode], bool]) -> PrefixNode:
        """The last node up to this one of which ``holds`` is true, else the root; O(log depth).

        What holds of a node must hold of all before it.
        """
        node = self
        while node.parent is not None and not holds(node):
            jump = node.jump
            node = node.parent if jump.parent is None or holds(jump) else jump
        return node

    @property
    def first_awaiting(self) -> int:
        """The order of the waiting request that is the first to want it, by when it came to stand here or below.

        Only to be asked where somebody waits.
        """
        node = self
        while not node.awaiting:
            node = next(child for child in node.children.values() if child.num_awaiting)
        return next(iter(next(iter(node.awaiting.values())))).order

    @property
    def leads_somewhere(self) -> bool:
        """Whether anything is held by it, or reached through it."""
        if self.children or self.blocks.count(None) < len(self.blocks):
            return True
        return self.snapshot is not None or self.snapshot_pins > 0 or any(self.pins)


class PrefixTree:
    """A tree of full blocks per cache salt; requests with different salts never see each other's blocks.

    on_lost_snapshot: told of a node with a snapshot whose keys and values are gone, which makes that useless.
    on_new_node: told of a node when it is made. on_dropped_node: of one that goes, and of the one before it.
    """

    on_lost_snapshot: Callable[[PrefixNode], None]

    def __init__(self, num_groups: int, block_size: int) -> None:
        self.num_groups = num_groups
        self.block_size = block_size
        self._roots: dict[str | None, PrefixNode] = {}
        self._num_created = 0
        self.on_new_node: Callable[[PrefixNode], object] = _nobody_listens
        self.on_dropped_node: Callable[[PrefixNode, PrefixNode], object] = _nobody_listens

    def root(self, salt: str | None) -> PrefixNode:
        node = self._roots.get(salt)
        if node is None:
            node = self._roots[salt] = PrefixNode(None, (), self.num_groups, salt=salt)
        return node

    def match(self, token_ids: Sequence[int], salt: str | None, max_blocks: int) -> list[PrefixNode]:
        """The nodes of the longest known prefix, at most ``max_blocks``; some may have lost their blocks."""
        node, size = self.root(salt), self.block_size
        found: list[PrefixNode] = []
        for start in range(0, max_blocks * size, size):
            child = node.children.get(tuple(token_ids[start : start + size]))
            if child is None:
                break
            found.append(child)
            node = child
        return found

    def child(self, node: PrefixNode, tokens: tuple[int, ...]) -> PrefixNode:
        """The node of ``tokens`` after ``node``, made if it is new."""
        child = node.children.get(tokens)
        if child is None:
            self._num_created += 1
            child = node.children[tokens] = PrefixNode(node, tokens, self.num_groups, self._num_created)
            self.on_new_node(child)
        return child

    def hold(self, node: PrefixNode, group: int, block: int) -> None:
        """``block`` holds the node in ``group`` from now on."""
        node.blocks[group] = block
        if node.parent is not None:
            node.parent.held_children[group] += 1

    def forget(self, node: PrefixNode, group: int) -> None:
        """The node's block in ``group`` is gone."""
        node.blocks[group] = None
        if node.snapshot is not None:
            self.on_lost_snapshot(node)
        if node.parent is not None:
            node.parent.held_children[group] -= 1
        if not node.children:
            self.prune(node)

    def prune(self, node: PrefixNode) -> None:
        """Drop the node, and its ancestors, that lead nowhere."""
        while node.parent is not None and not node.leads_somewhere:
            # A request may still stand on a dropped node; it is then off the tree and registers nothing more.
            parent = node.parent
            if parent.children.get(node.tokens) is node:
                del parent.children[node.tokens]
                self.on_dropped_node(node, parent)
            node.parent = None
            node = parent

    def nodes(self) -> list[PrefixNode]:
        """Every node but the roots, parents first."""
        found, stack = [], list(self._roots.values())
        while stack:
            node = stack.pop()
            if node.depth:
                found.append(node)
            stack.extend(node.children.values())
        return found

    def clear(self) -> None:
        self._roots.clear()


def _nobody_listens(*nodes: PrefixNode) -> None: ...


def prefix_contents(token_ids: Sequence[int], length: int, salt: str | None, block_size: int) -> Iterator[int]:
    """What ``PrefixNode.contents`` is of each full block of the first ``length`` tokens."""
    contents = _contents(salt, ())
    for start in range(0, length - block_size + 1, block_size):
        contents = _contents(contents, tuple(token_ids[start : start + block_size]))
        yield contents


def _contents(before: int | str | None, tokens: tuple[int, ...]) -> int:
    return hash((before, tokens))

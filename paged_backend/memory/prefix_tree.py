"""PrefixTree: which blocks hold the keys and values of which token prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence


class PrefixNode:
    """One full block of tokens after the prefix its ancestors spell; ``blocks[g]`` holds it in KV group g, or is None.

    A node is found by comparing token ids, never by a hash alone, so two prefixes cannot be taken for each other.

    contents: a hash of the salt and the tokens up to its end, for those who only want to recognise it.
    held_children: per group, how many of the children are held by a block. created: position among all nodes by age.
    pins: per group, how often it is pinned. snapshot: the slot of the recurrent state after its tokens, or None;
    snapshot_pins: how often that is pinned.
    """

    __slots__ = (
        "blocks",
        "children",
        "contents",
        "created",
        "depth",
        "held_children",
        "hits",
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
        self.children: dict[tuple[int, ...], PrefixNode] = {}
        self.blocks: list[int | None] = [None] * num_groups
        self.held_children = [0] * num_groups
        self.created = created
        self.hits = 0
        self.pins = [0] * num_groups
        self.snapshot: int | None = None
        self.snapshot_pins = 0

    @property
    def leads_somewhere(self) -> bool:
        """Whether anything is held by it, or reached through it."""
        if self.children or self.snapshot_pins or self.snapshot is not None or any(self.pins):
            return True
        return self.blocks.count(None) < len(self.blocks)


class PrefixTree:
    """A tree of full blocks per cache salt; requests with different salts never see each other's blocks.

    on_lost_snapshot: told of a node with a snapshot whose keys and values are gone, which makes that useless.
    """

    on_lost_snapshot: Callable[[PrefixNode], None]

    def __init__(self, num_groups: int, block_size: int) -> None:
        self.num_groups = num_groups
        self.block_size = block_size
        self._roots: dict[str | None, PrefixNode] = {}
        self._num_created = 0

    def root(self, salt: str | None) -> PrefixNode:
        node = self._roots.get(salt)
        if node is None:
            node = self._roots[salt] = PrefixNode(None, (), self.num_groups, salt=salt)
        return node

    def match(
        self, token_ids: Sequence[int], salt: str | None, max_blocks: int, before: Sequence[PrefixNode] = ()
    ) -> list[PrefixNode]:
        """The nodes of the longest known prefix, at most ``max_blocks``; some may have lost their blocks.

        before: what was found for these tokens earlier; what is still on the tree of it is not looked for again.
        """
        node, size, found = self.root(salt), self.block_size, list(before)
        while found and found[-1].parent is None:
            # A prefix is dropped from its end, so that what stands before a node that is there is there too.
            found.pop()
        if found and found[0].parent is not node:
            # They are of a tree that was cleared.
            found = []
        node = found[-1] if found else node
        for start in range(len(found) * size, max_blocks * size, size):
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
        self.prune(node)

    def prune(self, node: PrefixNode) -> None:
        """Drop the node, and its ancestors, that lead nowhere."""
        while node.parent is not None and not node.leads_somewhere:
            # A request may still stand on a dropped node; it is then off the tree and registers nothing more.
            parent = node.parent
            if parent.children.get(node.tokens) is node:
                del parent.children[node.tokens]
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


def prefix_contents(token_ids: Sequence[int], length: int, salt: str | None, block_size: int) -> Iterator[int]:
    """What ``PrefixNode.contents`` is of each full block of the first ``length`` tokens."""
    contents = _contents(salt, ())
    for start in range(0, length - block_size + 1, block_size):
        contents = _contents(contents, tuple(token_ids[start : start + block_size]))
        yield contents


def _contents(before: int | str | None, tokens: tuple[int, ...]) -> int:
    return hash((before, tokens))

"""PrefixQueue: where in the tree of prefixes the waiting requests stand."""

from __future__ import annotations

from collections.abc import Callable

from paged_backend.errors import IntegrityError
from paged_backend.memory.prefix_tree import PrefixNode, PrefixTree
from paged_backend.request.request import Request


class PrefixQueue:
    """Every waiting request stands at the last node that its tokens lead to, and moves as the tree grows and shrinks.

    So what a request begins with is known without looking for it again, and of each node how many wait for it. Joining
    and leaving costs O(blocks that are known), a step of the tree O(1) for each request that moves.

    on_change: told of a node when somebody begins or ceases to stand there, or below for the first or last time.
    """

    def __init__(self, tree: PrefixTree, on_change: Callable[[PrefixNode], None]) -> None:
        self._tree = tree
        self._on_change = on_change
        self._requests: dict[Request, None] = {}
        tree.on_new_node = self._advance
        tree.on_dropped_node = self._retreat

    def __contains__(self, request: Request) -> bool:
        return request in self._requests

    def join(self, request: Request) -> None:
        """``request`` waits; its tokens stay what they are until it leaves."""
        self._requests[request] = None
        path = self._tree.match(request.token_ids, request.cache_salt, self._num_wanted(request))
        node = path[-1] if path else self._tree.root(request.cache_salt)
        self._stand(request, node)
        self._count(node, 1)

    def leave(self, request: Request) -> None:
        """``request`` waits no more; nothing is done if it did not."""
        if request not in self._requests:
            return
        del self._requests[request]
        node, tokens = request.prefix_node, self._next_tokens(request, request.prefix_node)
        assert node.awaiting is not None
        del node.awaiting[tokens][request]
        if not node.awaiting[tokens]:
            del node.awaiting[tokens]
        request.prefix_node = None
        self._count(node, -1)

    def path(self, request: Request) -> list[PrefixNode]:
        """The nodes that a waiting request's tokens lead along; some may have lost their blocks."""
        node: PrefixNode = request.prefix_node
        return list(node.upwards())[::-1]

    def renew(self) -> None:
        """Let all stand in a tree that has forgotten everything."""
        requests, self._requests = self._requests, {}
        for request in requests:
            self.join(request)

    def _num_wanted(self, request: Request) -> int:
        # At least one token is computed, since its logits are wanted.
        return (request.num_tokens - 1) // self._tree.block_size

    def _next_tokens(self, request: Request, node: PrefixNode) -> tuple[int, ...] | None:
        if node.depth == self._num_wanted(request):
            return None
        start = node.depth * self._tree.block_size
        return tuple(request.token_ids[start : start + self._tree.block_size])

    def _stand(self, request: Request, node: PrefixNode) -> None:
        request.prefix_node = node
        if node.awaiting is None:
            node.awaiting = {}
        node.awaiting.setdefault(self._next_tokens(request, node), {})[request] = None

    def _count(self, node: PrefixNode, more: int) -> None:
        for ancestor in node.upwards():
            ancestor.num_awaiting += more
            if ancestor is node or ancestor.num_awaiting in (0, more):
                self._on_change(ancestor)

    def _advance(self, node: PrefixNode) -> None:
        """A node is new: those go on to it that stood before it and want its tokens."""
        parent = node.parent
        assert parent is not None
        requests = parent.awaiting.pop(node.tokens, None) if parent.awaiting else None
        for request in requests or ():
            self._stand(request, node)
            node.num_awaiting += 1

    def _retreat(self, node: PrefixNode, parent: PrefixNode) -> None:
        """A node goes: those that stood there stand before it again."""
        if node.num_awaiting:
            assert node.awaiting is not None
            for requests in node.awaiting.values():
                for request in requests:
                    self._stand(request, parent)
            node.awaiting, node.num_awaiting = None, 0

    def check_integrity(self) -> None:
        """Raise IntegrityError unless each request stands at the end of its path and is counted along it."""
        counts: dict[PrefixNode, int] = {}
        for request in self._requests:
            path = self._tree.match(request.token_ids, request.cache_salt, self._num_wanted(request))
            if path != self.path(request):
                raise IntegrityError(f"{request!r} stands {len(self.path(request))} blocks down, {len(path)} are known")
            for node in path:
                counts[node] = counts.get(node, 0) + 1
        for node in self._tree.nodes():
            standing = sum(len(requests) for requests in (node.awaiting or {}).values())
            if node.num_awaiting != counts.get(node, 0) or standing > node.num_awaiting:
                raise IntegrityError(
                    f"a prefix of depth {node.depth} counts {node.num_awaiting} waiting requests, not "
                    f"{counts.get(node, 0)}"
                )

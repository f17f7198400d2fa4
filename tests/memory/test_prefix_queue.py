"""Waiting requests stand where their tokens lead to, as prefixes come and go."""

from __future__ import annotations

import pytest
from managed_blocks import make_request

from paged_backend.errors import IntegrityError
from paged_backend.memory.prefix_queue import PrefixQueue
from paged_backend.memory.prefix_tree import PrefixNode, PrefixTree

TOKENS = [1, 2, 3, 4, 5, 6, 7]


class Standing:
    """A tree of blocks of two tokens, its queue, and the nodes that the queue told of."""

    def __init__(self) -> None:
        self.tree = PrefixTree(1, 2)
        self.changed: list[PrefixNode] = []
        self.queue = PrefixQueue(self.tree, self.changed.append)

    def grow(self, tokens: list[int]) -> list[PrefixNode]:
        """Let a block hold each two of ``tokens``."""
        node, path = self.tree.root(None), []
        for start in range(0, len(tokens), 2):
            node = self.tree.child(node, tuple(tokens[start : start + 2]))
            if node.blocks[0] is None:
                self.tree.hold(node, 0, node.created)
            path.append(node)
        return path


@pytest.fixture
def standing() -> Standing:
    return Standing()


def test_a_request_stands_at_the_end_of_what_is_known_when_it_joins(standing):
    path = standing.grow([1, 2, 3, 4])
    request = make_request(TOKENS, 0)
    standing.queue.join(request)
    assert request.prefix_node is path[1]
    assert request.num_known_tokens == 4
    assert [node.num_awaiting for node in path] == [1, 1]
    standing.queue.check_integrity()


def test_its_last_token_is_never_known_beforehand(standing):
    path = standing.grow([1, 2, 3, 4])
    request = make_request([1, 2, 3, 4], 0)
    standing.queue.join(request)
    assert request.prefix_node is path[0]


def test_a_request_moves_on_as_others_compute_what_it_begins_with(standing):
    request, other = make_request(TOKENS, 0), make_request([9, *TOKENS], 1)
    standing.queue.join(request)
    standing.queue.join(other)
    path = standing.grow(TOKENS[:6])
    assert request.prefix_node is path[2]
    assert other.num_known_tokens == 0
    standing.queue.check_integrity()


def test_a_request_moves_back_when_the_end_of_its_prefix_is_dropped_and_on_when_it_is_there_again(standing):
    path = standing.grow(TOKENS[:6])
    request = make_request(TOKENS, 0)
    standing.queue.join(request)
    standing.tree.forget(path[2], 0)
    assert request.prefix_node is path[1]
    standing.queue.check_integrity()
    standing.tree.forget(path[1], 0)
    again = standing.grow(TOKENS[:6])
    assert again[0] is path[0]
    assert request.prefix_node is again[2]
    standing.queue.check_integrity()


def test_a_request_that_left_counts_nowhere_and_may_leave_again(standing):
    path = standing.grow(TOKENS[:4])
    requests = [make_request(TOKENS, order) for order in range(2)]
    for request in requests:
        standing.queue.join(request)
    standing.queue.leave(requests[0])
    standing.queue.leave(requests[0])
    assert [node.num_awaiting for node in path] == [1, 1]
    assert requests[0].prefix_node is None
    standing.queue.check_integrity()


def test_who_keeps_blocks_is_told_where_somebody_begins_or_ceases_to_wait(standing):
    first, second = standing.grow(TOKENS[:4])
    requests = [make_request(TOKENS, order) for order in range(2)]
    standing.queue.join(requests[0])
    assert standing.changed == [second, first]
    standing.changed.clear()
    standing.queue.join(requests[1])
    assert standing.changed == [second]
    standing.queue.leave(requests[0])
    standing.changed.clear()
    standing.queue.leave(requests[1])
    assert standing.changed == [second, first]


def test_the_first_to_want_a_prefix_is_who_came_to_stand_in_it_first(standing):
    first, second = standing.grow(TOKENS[:4])
    short, early, late = make_request([1, 2, 9], 5), make_request(TOKENS, 6), make_request([*TOKENS, 8], 7)
    for request in (early, late, short):
        standing.queue.join(request)
    assert second.first_awaiting == 6
    standing.queue.leave(early)
    assert second.first_awaiting == 7
    assert first.first_awaiting == 5
    standing.queue.leave(short)
    assert first.first_awaiting == 7


def test_salts_stand_apart(standing):
    standing.grow(TOKENS[:4])
    request = make_request(TOKENS, 0, "a")
    standing.queue.join(request)
    assert request.num_known_tokens == 0


def test_all_stand_at_the_beginning_of_a_tree_that_forgot_everything(standing):
    standing.grow(TOKENS[:4])
    request = make_request(TOKENS, 0)
    standing.queue.join(request)
    standing.tree.clear()
    standing.queue.renew()
    assert request.prefix_node is standing.tree.root(None)
    standing.grow(TOKENS[:2])
    assert request.num_known_tokens == 2
    standing.queue.check_integrity()


@pytest.mark.parametrize("damage", ["stands elsewhere", "is not counted"])
def test_integrity_check_notices_that_a_request(standing, damage):
    path = standing.grow(TOKENS[:4])
    request = make_request(TOKENS, 0)
    standing.queue.join(request)
    if damage == "stands elsewhere":
        request.prefix_node = path[0]
    else:
        path[0].num_awaiting = 0
    with pytest.raises(IntegrityError, match=r"stands 1 blocks down|counts 0 waiting"):
        standing.queue.check_integrity()

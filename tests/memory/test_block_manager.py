"""The block manager's books stay right through any sequence of operations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from block_checks import assert_all_available
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from managed_blocks import LAYOUTS, MAX_CHUNK, compute, make_manager, make_request, start

from paged_backend.errors import IntegrityError, RequestRefused
from paged_backend.memory.block_manager import NO_BLOCK
from paged_backend.memory.prefix_tree import PrefixNode
from paged_backend.memory.state_slots import NO_SLOT
from paged_backend.request.request import Request
from paged_backend.request.state import RequestState


class BlockManagerMachine(RuleBasedStateMachine):
    """Random requests over a tiny alphabet, so that prefixes meet often; contents of slots are modelled too."""

    @initialize(
        layout=st.sampled_from(sorted(LAYOUTS)),
        num_blocks=st.integers(6, 40),
        block_size=st.integers(1, 5),
        num_snapshots=st.sampled_from([None, None, 0, 1, 2, 8]),
    )
    def begin(self, layout: str, num_blocks: int, block_size: int, num_snapshots: int | None) -> None:
        if layout == "none" and num_snapshots is None:
            num_snapshots = 3
        self.manager = make_manager(layout, num_blocks, block_size, num_snapshots=num_snapshots)
        # What each slot of states holds: the prefix after which it was written.
        self.states: dict[int, tuple] = {NO_SLOT: ()}
        self.order = 0
        self.requests: list[Request] = []
        self.waiting: list[Request] = []
        self.pins: list[tuple[list[int], str | None]] = []
        # What each slot of each group holds: the prefix (salt included) whose last token was written there.
        self.slots: list[dict[int, tuple]] = [{} for _ in self.manager.groups]

    def written(self, request: Request, position: int) -> tuple:
        return (request.cache_salt, *request.token_ids[: position + 1])

    def copy(self) -> None:
        for g, pairs in enumerate(self.manager.copies):
            size = self.manager.block_size
            before = dict(self.slots[g])
            for source, target in pairs:
                for offset in range(size):
                    if source * size + offset in before:
                        self.slots[g][target * size + offset] = before[source * size + offset]
            self.manager.copies[g] = []

    def write(self, request: Request, count: int) -> None:
        size, first = self.manager.block_size, request.num_computed_tokens
        self.copy()
        tables = self.manager.tables([request])
        for g, table in enumerate(tables):
            for position in range(first, first + count):
                block = int(table[0, position // size])
                assert block != NO_BLOCK
                self.slots[g][block * size + position % size] = self.written(request, position)
        self.mix(request, count)
        request.num_computed_tokens += count
        self.manager.register([(request, count)])

    def mix(self, request: Request, count: int) -> None:
        """Lead the request's state on, as a pass does."""
        if self.manager.states is None:
            return
        spans = self.manager.states.plan(request, count)
        assert [spans[0].first, spans[-1].end] == [request.num_computed_tokens, request.num_computed_tokens + count]
        assert self.manager.states.num_held <= self.manager.max_states
        for span in spans:
            assert span.first < span.end
            before = self.written(request, span.first - 1) if span.first else ()
            assert self.states[span.source] == before
            self.states[span.target] = self.written(request, span.end - 1)

    @precondition(lambda self: self.requests and self.manager.states is not None)
    @rule(data=st.data(), count=st.integers(1, MAX_CHUNK))
    def fail(self, data: st.DataObject, count: int) -> None:
        """A pass that wrote something and failed."""
        request = data.draw(st.sampled_from(self.requests))
        if count <= request.num_uncomputed_tokens:
            for span in self.manager.states.plan(request, count):
                self.states[span.target] = ("nonsense",)

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=24),
        salt=st.sampled_from([None, None, "a"]),
    )
    def wait(self, tokens: list[int], salt: str | None) -> None:
        request = make_request(tokens, self.order, salt)
        self.order += 1
        self.manager.expect(request)
        self.waiting.append(request)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        request = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        self.manager.expect_no_more(request)
        assert request.prefix_node is None

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def admit_waiting(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        self.start(request)
        if request in self.requests:
            self.waiting.remove(request)

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=24),
        salt=st.sampled_from([None, None, "a"]),
    )
    def admit(self, tokens: list[int], salt: str | None) -> None:
        request = make_request(tokens, self.order, salt)
        self.order += 1
        self.start(request)

    def start(self, request: Request) -> None:
        match = self.manager.match_prefix(request)
        assert match.num_tokens < request.num_tokens
        no_promises = [0] * len(self.manager.groups)
        if not self.manager.num_free_seats or not self.manager.can_admit(request, match, no_promises, 0):
            return
        self.manager.admit(request, match)
        request.num_computed_tokens = match.num_tokens
        request.state = RequestState.PREFILL
        self.requests.append(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), count=st.integers(1, MAX_CHUNK))
    def compute(self, data: st.DataObject, count: int) -> None:
        request = data.draw(st.sampled_from(self.requests))
        count = min(count, request.num_uncomputed_tokens)
        if count and self.manager.reserve(request, request.num_computed_tokens + count):
            self.write(request, count)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), token=st.integers(0, 1))
    def append(self, data: st.DataObject, token: int) -> None:
        request = data.draw(st.sampled_from(self.requests))
        if request.num_uncomputed_tokens == 0:
            request.append_token(token)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.requests))
        if parent.num_uncomputed_tokens or not self.manager.num_free_seats:
            return
        child = make_request(list(parent.token_ids), self.order, parent.cache_salt)
        self.order += 1
        self.manager.fork(parent, child)
        self.requests.append(child)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        self.requests.remove(request)
        self.manager.free(request, float(self.order))

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12), salt=st.sampled_from([None, "a"]))
    def pin(self, tokens: list[int], salt: str | None) -> None:
        try:
            self.manager.pin(tokens, salt)
        except RequestRefused:
            return
        self.pins.append((tokens, salt))

    @precondition(lambda self: getattr(self, "pins", None))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        tokens, salt = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        self.manager.unpin(tokens, salt)

    @rule()
    def reset(self) -> None:
        self.manager.reset()
        self.requests.clear()

    @rule(more=st.integers(1, 4))
    def grow(self, more: int) -> None:
        if self.manager.pools and self.manager.pools[0].num_blocks < 60:
            self.manager.resize([pool.num_blocks + more for pool in self.manager.pools])

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check_integrity()

    @invariant()
    def every_visible_token_is_where_the_table_says(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.copy()
        size = self.manager.block_size
        for request in self.requests:
            for g, table in enumerate(self.manager.tables([request])):
                first = self.manager.groups[g].rule.first_visible(request.num_computed_tokens)
                for position in range(first, request.num_computed_tokens):
                    block = int(table[0, position // size])
                    assert self.slots[g][block * size + position % size] == self.written(request, position)

    @invariant()
    def every_snapshot_is_of_its_prefix(self) -> None:
        if not hasattr(self, "manager"):
            return
        for node in self.manager.tree.nodes():
            if node.snapshot is not None:
                _, *content = self.states[node.snapshot]
                assert content == self.tokens_of(node)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def searches_find_what_looking_at_every_block_finds(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        manager, size = self.manager, self.manager.block_size
        path = manager.tree.match(request.token_ids, request.cache_salt, (request.num_tokens - 1) // size)
        assert request.num_known_tokens == len(path) * size
        match = manager.match_prefix(request)
        assert match.num_tokens == max(self.served(path), default=0) * size
        for g, (group, pool) in enumerate(zip(manager.groups, manager.pools, strict=True)):
            seen = path[group.rule.first_visible(match.num_tokens) // size : match.node.depth]
            taken = sum(not pool.is_available(node.blocks[g]) for node in seen)
            assert manager._num_taken(match.node, g) == taken

    def served(self, path: list[PrefixNode]) -> Iterator[int]:
        """The lengths in blocks at which every group has what it sees, and the state is there if there is one."""
        for length in range(1, len(path) + 1):
            firsts = [group.rule.first_visible(length * self.manager.block_size) for group in self.manager.groups]
            held = all(
                node.blocks[g] is not None
                for g, first in enumerate(firsts)
                for node in path[first // self.manager.block_size : length]
            )
            if held and (self.manager.states is None or path[length - 1].snapshot is not None):
                yield length

    @staticmethod
    def tokens_of(node: PrefixNode | None) -> list[int]:
        tokens: list[int] = []
        while node is not None:
            tokens[:0] = node.tokens
            node = node.parent
        return tokens

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            for request in self.requests:
                self.manager.free(request, 0.0)
            for tokens, salt in self.pins:
                self.manager.unpin(tokens, salt)
            assert_all_available(self.manager)


TestRandomOperations = BlockManagerMachine.TestCase
TestRandomOperations.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.slow
def test_books_agree_after_ten_thousand_random_operations():
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        BlockManagerMachine,
        settings=settings(
            max_examples=170, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_second_request_with_the_same_beginning_shares_its_full_blocks():
    manager = make_manager("full", 20)
    first, second = make_request([1] * 10, 0), make_request([1] * 9 + [2, 3], 1)
    assert start(manager, first) == 0
    compute(manager, first, 10)
    assert start(manager, second) == 8
    assert manager.tables([first])[0][0, :2].tolist() == manager.tables([second])[0][0, :2].tolist()


def test_last_token_is_computed_even_when_the_whole_prompt_is_cached():
    manager = make_manager("full", 20)
    first = make_request([1] * 8, 0)
    start(manager, first)
    compute(manager, first, 8)
    assert start(manager, make_request([1] * 8, 1)) == 4


def test_salts_keep_prefixes_apart():
    manager = make_manager("full", 20)
    first = make_request([1] * 8, 0, salt="a")
    start(manager, first)
    compute(manager, first, 8)
    assert start(manager, make_request([1] * 9, 1, salt="b")) == 0
    assert start(manager, make_request([1] * 9, 2, salt="a")) == 8


def test_window_group_needs_only_the_blocks_its_window_still_sees():
    manager = make_manager("full and window", 20)
    first = make_request([1] * 32, 0)
    start(manager, first)
    for _ in range(4):
        compute(manager, first, 8)
    # Position 24 sees the window 17..24: blocks 4 and 5 of the window group, and all of the full group.
    match = manager.match_prefix(make_request([1] * 25, 1))
    assert match.num_tokens == 24
    assert [sum(1 for _ in manager._seen(match.node, g)) for g in (0, 1)] == [6, 2]


def test_hit_is_shortened_until_the_window_group_can_serve_it():
    manager = make_manager("full and window", 12)
    first = make_request([1] * 24, 0)
    start(manager, first)
    for _ in range(3):
        compute(manager, first, 8)
    manager.free(first, 0.0)
    pool = manager.pools[1]
    # Take the window group's blocks away one by one, longest unused first, until only two cached ones are left.
    while pool.num_cached > 2:
        pool.allocate(1)
    match = manager.match_prefix(make_request([1] * 24, 1))
    held = [node.blocks[1] is not None for node in [*match.node.upwards()][::-1]]
    assert match.num_tokens == 4 * len(held)
    assert all(held[manager.groups[1].rule.first_visible(match.num_tokens) // 4 :])


def test_windowed_request_holds_a_bounded_number_of_blocks_however_long_it_gets():
    manager = make_manager("full and window", 200)
    request = make_request([1] * 400, 0)
    start(manager, request)
    most = 0
    while request.num_uncomputed_tokens:
        compute(manager, request, min(MAX_CHUNK, request.num_uncomputed_tokens))
        most = max(most, sum(block != NO_BLOCK for block in manager.tables([request])[1][0].tolist()))
    assert most <= manager.groups[1].blocks_for(400, 4, MAX_CHUNK) == 6


def test_blocks_that_left_the_window_can_be_hit_by_others():
    manager = make_manager("window", 40)
    first = make_request([1] * 40, 0)
    start(manager, first)
    for _ in range(4):
        compute(manager, first, 10)
    assert start(manager, make_request([1] * 13, 1)) == 12


def test_slots_that_forks_share_are_unfilled_once():
    manager = make_manager("full", 20)
    parent, child = make_request([1] * 30, 0), make_request([1] * 30, 1)
    start(manager, parent)
    compute(manager, parent, 5)
    own = manager.num_unfilled_slots(0)
    manager.fork(parent, child)
    # Block 2 is shared with 3 empty slots; the parent alone reserved what lies behind it.
    assert manager.num_unfilled_slots(0) == own >= 3
    compute(manager, child, 1)
    assert manager.num_unfilled_slots(0) > own
    manager.free(child, 0.0)
    assert manager.num_unfilled_slots(0) == own
    assert not manager._forked


def test_fork_copies_the_partial_block_once_and_only_when_written():
    manager = make_manager("full", 20)
    parent = make_request([1] * 6, 0)
    start(manager, parent)
    compute(manager, parent, 6)
    child = make_request([1] * 6, 1)
    manager.fork(parent, child)
    assert manager.copies == [[]]
    for request in (parent, child):
        request.append_token(5)
        assert manager.reserve(request, 7)
    assert len(manager.copies[0]) == 1
    tables = manager.tables([parent, child])[0]
    assert tables[0, 0] == tables[1, 0]
    assert tables[0, 1] != tables[1, 1]


def test_reserve_takes_nothing_when_one_group_is_short():
    manager = make_manager("two windows", 3)
    request = make_request([1] * 40, 0)
    start(manager, request)
    assert not manager.reserve(request, 16)
    assert manager.num_held(request) == 0


def test_integrity_check_notices_two_writers_of_a_slot():
    manager = make_manager("full", 20)
    parent = make_request([1] * 6, 0)
    start(manager, parent)
    compute(manager, parent, 6)
    child = make_request([1] * 6, 1)
    manager.fork(parent, child)
    manager._tables[child].capacity = 8
    with pytest.raises(IntegrityError, match="another request holds too"):
        manager.check_integrity()


def test_requests_together_free_what_they_share():
    manager = make_manager("full", 20)
    first = make_request([1] * 12, 0)
    start(manager, first)
    compute(manager, first, 12)
    second = make_request([1] * 12, 1)
    start(manager, second)
    compute(manager, second, 4)
    assert manager.freed_by([first]) == [1]
    assert manager.freed_by([first, second]) == [manager.pools[0].num_owned]

"""Whose state lies in which slot, and which prefixes keep theirs."""

from __future__ import annotations

import pytest
from managed_blocks import compute, make_manager, make_request, start

from paged_backend.errors import IntegrityError, RequestRefused
from paged_backend.memory.block_manager import BlockManager
from paged_backend.memory.state_slots import NO_SLOT, StateSlots
from paged_backend.request.request import Request


def slots_of(manager: BlockManager) -> StateSlots:
    assert manager.states is not None
    return manager.states


def run(manager: BlockManager, tokens: list[int], order: int, num_new: int = 0) -> Request:
    """A request that computes its prompt at once, then ``num_new`` tokens one by one."""
    request = make_request(tokens, order)
    start(manager, request)
    compute(manager, request, request.num_uncomputed_tokens)
    for _ in range(num_new):
        request.append_token(7)
        compute(manager, request, 1)
    manager.check_integrity()
    return request


def snapshots(manager: BlockManager) -> list[int]:
    """At how many tokens states are kept."""
    return sorted(node.depth * manager.block_size for node in manager.tree.nodes() if node.snapshot is not None)


def test_a_request_begins_from_nothing_and_goes_on_from_what_its_pass_wrote():
    manager = make_manager("full", 20, num_snapshots=0)
    request = make_request([1] * 8, 0)
    start(manager, request)
    (first,) = slots_of(manager).plan(request, 4)
    assert (first.source, first.first, first.end) == (NO_SLOT, 0, 4)
    compute(manager, request, 4)
    (second,) = slots_of(manager).plan(request, 4)
    assert (second.source, second.first, second.end) == (first.target, 4, 8)
    assert second.target != second.source


def test_a_pass_that_is_planned_again_reads_the_same_slot():
    manager = make_manager("full", 20, num_snapshots=0)
    request = run(manager, [1] * 6, 0)
    request.append_token(2)
    plans = [slots_of(manager).plan(request, 1) for _ in range(3)]
    assert len({plan[0].source for plan in plans}) == 1
    assert slots_of(manager).num_held == 2
    manager.check_integrity()


def test_two_slots_do_for_a_request_however_long_it_runs():
    manager = make_manager("full", 40, num_snapshots=0)
    run(manager, [1] * 9, 0, num_new=50)
    assert slots_of(manager).num_made == 2


def test_forks_share_a_slot_until_they_part():
    manager = make_manager("full", 20, num_snapshots=0)
    parent = run(manager, [1] * 6, 0)
    child = make_request([1] * 6, 1)
    manager.fork(parent, child)
    assert slots_of(manager).num_held == 1
    for request in (parent, child):
        request.append_token(3)
    sources = [slots_of(manager).plan(request, 1)[0].source for request in (parent, child)]
    assert sources[0] == sources[1]
    manager.check_integrity()


def test_a_prompt_leaves_its_state_at_the_last_end_of_a_block_before_its_last_token():
    manager = make_manager("full", 20, num_snapshots=4)
    run(manager, [1] * 12, 0)
    # At 12 it decodes already, and keeps its latest state too.
    assert snapshots(manager) == [8, 12]
    assert start(manager, make_request([1] * 10, 1)) == 8


def test_a_chunk_is_cut_where_a_state_is_wanted():
    manager = make_manager("full", 20, num_snapshots=4)
    request = make_request([1] * 11, 0)
    start(manager, request)
    spans = slots_of(manager).plan(request, 11)
    assert [(span.first, span.end) for span in spans] == [(0, 8), (8, 11)]
    assert spans[1].source == spans[0].target


def test_a_chunk_that_ends_where_a_state_is_wanted_leaves_it_and_the_next_one_begins_there():
    manager = make_manager("full", 20, num_snapshots=4)
    request = make_request([1] * 11, 0)
    start(manager, request)
    compute(manager, request, 8)
    assert snapshots(manager) == [8]
    assert [(span.first, span.end) for span in slots_of(manager).plan(request, 3)] == [(8, 11)]


@pytest.mark.parametrize(("num_snapshots", "ends"), [(0, [21]), (1, [8, 21]), (2, [8, 20, 21])])
def test_a_chunk_is_cut_only_where_there_is_room_for_a_state(num_snapshots, ends):
    manager = make_manager("full", 40, num_snapshots=num_snapshots)
    run(manager, [1] * 8 + [2] * 3, 0)
    for node in manager.tree.nodes():
        if node.snapshot is not None:
            slots_of(manager)._drop(node)
    request = make_request([1] * 8 + [3] * 13, 1)
    start(manager, request)
    assert [span.end for span in slots_of(manager).plan(request, 21)] == ends


def test_the_end_of_a_chunk_is_no_reason_to_keep_a_state():
    manager = make_manager("full", 40, num_snapshots=8)
    run(manager, [1] * 8 + [2] * 14, 0)
    before = snapshots(manager)
    request = make_request([1] * 4 + [3] * 25, 1)
    start(manager, request)
    compute(manager, request, 12)
    assert snapshots(manager) == sorted([*before, 4])


def test_what_a_prompt_left_stays_when_its_answer_goes_on():
    manager = make_manager("full", 40, num_snapshots=8)
    request = make_request([1] * 11, 0)
    start(manager, request)
    compute(manager, request, 8)
    compute(manager, request, 3)
    for _ in range(10):
        request.append_token(7)
        compute(manager, request, 1)
    assert snapshots(manager) == [8, 20]


def test_a_pinned_state_stays_when_the_request_that_left_it_goes_on():
    manager = make_manager("full", 40, num_snapshots=8)
    assert manager.pin([1] * 5 + [7] * 3) == 8
    run(manager, [1] * 5, 0, num_new=8)
    assert snapshots(manager) == [4, 8, 12]


def test_the_latest_state_of_a_request_that_ended_goes_no_sooner_than_older_ones():
    manager = make_manager("full", 60, num_snapshots=3)
    manager.free(run(manager, [2] * 5, 0), 0.0)
    request = run(manager, [1] * 5, 1, num_new=4)
    manager.free(request, 0.0)
    manager.free(run(manager, [3] * 5, 2), 0.0)
    assert start(manager, make_request([*request.token_ids, 9], 3)) == 8
    assert start(manager, make_request([2] * 5, 4)) == 0


def test_keys_and_values_without_a_state_are_no_hit_and_the_branch_leaves_one():
    manager = make_manager("full", 40, num_snapshots=8)
    run(manager, [1] * 16 + [2] * 5, 0)
    branch = [1] * 16 + [3] * 5
    assert run(manager, branch, 1).num_computed_tokens == 21
    assert 16 in snapshots(manager)
    assert start(manager, make_request([1] * 16 + [4] * 5, 2)) == 16


def test_a_prompt_goes_on_from_the_deepest_state_of_its_beginning():
    manager = make_manager("full", 60, num_snapshots=8)
    for order, tokens in enumerate(([1] * 16 + [2] * 13, [1] * 8 + [3] * 5, [1] * 16 + [4] * 5)):
        request = make_request(tokens, order)
        start(manager, request)
        while request.num_uncomputed_tokens:
            compute(manager, request, min(12, request.num_uncomputed_tokens))
    assert {8, 16} <= set(snapshots(manager))
    assert start(manager, make_request([1] * 16 + [2] * 9, 9)) == 16


def test_a_running_request_keeps_only_its_latest_state_and_the_next_turn_goes_on_from_it():
    manager = make_manager("full", 40, num_snapshots=8)
    request = run(manager, [1] * 5, 0, num_new=20)
    assert snapshots(manager) == [4, 24]
    manager.free(request, 0.0)
    assert start(manager, make_request([*request.token_ids, 9, 9, 9], 1)) == 24


def test_a_state_that_another_request_goes_on_from_stays_when_its_own_has_gone_on():
    manager = make_manager("full", 60, num_snapshots=8)
    request = run(manager, [1] * 5, 0, num_new=4)
    assert snapshots(manager) == [4, 8]
    assert start(manager, make_request([*request.token_ids[:8], 9, 9], 1)) == 8
    for _ in range(8):
        request.append_token(7)
        compute(manager, request, 1)
    assert {8, 16} <= set(snapshots(manager))


def test_the_states_that_running_requests_just_left_go_before_those_of_prompts():
    manager = make_manager("full", 60, num_snapshots=3)
    run(manager, [1] * 6, 0)
    run(manager, [2] * 6, 1, num_new=9)
    assert snapshots(manager) == [4, 4, 12]
    # A second one that runs takes the place of the first one's.
    request = run(manager, [2] * 6, 2)
    for _ in range(10):
        request.append_token(8)
        compute(manager, request, 1)
    assert snapshots(manager) == [4, 4, 16]
    assert slots_of(manager).num_evictions == 1


def test_what_was_longest_unused_goes_first():
    manager = make_manager("full", 60, num_snapshots=2)
    for order, token in enumerate((1, 2)):
        manager.free(run(manager, [token] * 6, order), 0.0)
    # Used again, so that the other one is older.
    manager.free(run(manager, [1] * 6, 2), 0.0)
    manager.free(run(manager, [3] * 6, 3), 0.0)
    assert start(manager, make_request([1] * 6, 4)) == 4
    assert start(manager, make_request([2] * 6, 5)) == 0


def test_without_a_budget_nothing_is_kept():
    manager = make_manager("full", 20, num_snapshots=0)
    manager.free(run(manager, [1] * 12, 0), 0.0)
    assert snapshots(manager) == []
    assert start(manager, make_request([1] * 12, 1)) == 0


def test_a_pinned_prefix_keeps_its_state_whoever_else_comes():
    manager = make_manager("full", 60, num_snapshots=2)
    assert manager.pin([1] * 9) == 8
    manager.free(run(manager, [1] * 8 + [5] * 9, 0), 0.0)
    for order in range(1, 5):
        manager.free(run(manager, [order + 1] * 9, order), 0.0)
    assert start(manager, make_request([1] * 8 + [6] * 3, 9)) == 8
    assert manager.unpin([1] * 9)
    manager.check_integrity()


def test_pins_take_at_most_half_of_the_states_that_may_be_kept():
    manager = make_manager("full", 60, num_snapshots=2)
    manager.pin([1] * 9)
    with pytest.raises(RequestRefused, match="at most 1 of 2 may be: unpin another prefix or raise snapshot_memory"):
        manager.pin([2] * 9)
    manager.pin([1] * 9)
    manager.check_integrity()


def test_a_state_goes_with_the_keys_and_values_of_its_prefix():
    manager = make_manager("full", 4, num_snapshots=4)
    manager.free(run(manager, [1] * 8, 0), 0.0)
    kept = set(snapshots(manager))
    manager.free(run(manager, [2] * 15, 1), 0.0)
    assert kept
    assert start(manager, make_request([1] * 8, 2)) == 0
    manager.check_integrity()


def test_a_window_that_no_longer_holds_a_prefix_shortens_the_hit_to_a_state_that_it_can_serve():
    manager = make_manager("full and window", 30, num_snapshots=8)
    request = run(manager, [1] * 8 + [2], 0, num_new=12)
    manager.free(request, 0.0)
    # Of the window's group, blocks of what was left early are gone first.
    while manager.pools[1].num_cached > 2:
        manager.pools[1].allocate(1)
    match = manager.match_prefix(make_request([*request.token_ids, 9], 1))
    assert match.num_tokens in (0, *snapshots(manager))


def test_without_any_attention_prefixes_live_by_their_states_alone():
    manager = make_manager("none", 0, num_snapshots=2)
    request = run(manager, [1] * 30, 0, num_new=40)
    assert snapshots(manager) == [28, 68]
    # No node leads nowhere.
    assert len(manager.tree.nodes()) == 17
    manager.free(request, 0.0)
    for order in (1, 2):
        manager.free(run(manager, [order + 1] * 9, order), 0.0)
    assert snapshots(manager) == [8, 8]
    assert len(manager.tree.nodes()) == 4


def test_the_books_notice_a_slot_that_is_lost():
    manager = make_manager("full", 20, num_snapshots=1)
    request = run(manager, [1] * 6, 0)
    slots_of(manager)._counts[slots_of(manager)._seats[request].slot] += 1
    with pytest.raises(IntegrityError, match="owners"):
        manager.check_integrity()

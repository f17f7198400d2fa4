"""What a block size costs can be counted by hand, and the cheapest is picked with a reason."""

from __future__ import annotations

import random

import pytest

from paged_backend.block_cost import CANDIDATES, Workload, compare, explain, in_turn, pick

FLAT = dict.fromkeys(CANDIDATES, 1.0)


def even(low: int, high: int, output: int, shared: int = 0) -> Workload:
    prompts = range(low, high + 1)
    return Workload(prompts, [output] * len(prompts), [shared] * len(prompts))


def test_slots_are_counted_at_every_step_of_a_request() -> None:
    # It holds 3, 4, 5 and 6 tokens; the one it ends with is not stored.
    workload = Workload([3], [4], [0])
    assert workload.slots_per_token(4) == (4 + 4 + 8 + 8) / (3 + 4 + 5 + 6)
    assert workload.slots_per_token(1) == 1
    assert workload.mean_context == 4.5
    assert workload.table_bytes(4) == 4 * (1 + 1 + 2 + 2) / 4


def test_a_window_holds_the_blocks_that_it_reaches_into() -> None:
    # With 5 to 8 tokens, of which it sees 3: tokens 2, 3 and 4 lie in two blocks of four, and 5, 6 and 7 in one.
    workload = Workload([5], [4], [0])
    assert workload.slots_per_token(4, {3: 1}) == (8 + 8 + 4 + 4 + 4 - 4) / (4 * 3)
    assert workload.slots_per_token(4, {3: 1, 0: 2}) == (24 + 2 * 32) / (12 + 2 * 26)


@pytest.mark.parametrize("window", [0, 7, 40])
def test_slots_are_those_of_a_count_request_by_request(window: int) -> None:
    draw = random.Random(window)
    prompts, outputs = ([draw.randint(1, 60) for _ in range(20)] for _ in range(2))
    held = needed = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        for tokens in range(prompt, prompt + output):
            seen = range(max(0, tokens - window) if window else 0, tokens)
            held += 8 * len({token // 8 for token in seen})
            needed += len(seen)
    assert Workload(prompts, outputs, [0] * 20).slots_per_token(8, {window: 1}) == pytest.approx(held / needed)


def test_what_is_shared_ends_at_a_whole_block() -> None:
    workload = Workload([20, 30, 10], [5, 5, 10], [0, 19, 9])
    assert workload.lost_share(16) == (3 + 9) / 60
    assert workload.lost_share(8) == (3 + 1) / 60
    assert workload.work(16) == (80 - 16) / (80 - 28)
    assert workload.work(1) == 1


def test_equal_times_pick_a_small_block() -> None:
    assert pick(compare(even(20, 120, 20, shared=19), FLAT)).block_size == 8
    assert pick(compare(even(100, 800, 100), FLAT)).block_size == 16


def test_kernels_twice_as_slow_on_small_blocks_pick_a_larger_one() -> None:
    assert pick(compare(even(20, 120, 20), {**FLAT, 8: 2.0})).block_size == 16
    assert pick(compare(even(20, 120, 20), {**FLAT, 8: 2.0, 16: 2.0})).block_size == 32


def test_long_requests_bear_larger_blocks() -> None:
    seconds = {8: 1.0, 16: 0.98, 32: 0.96, 64: 0.92, 128: 0.9, 256: 0.88}
    picked = [pick(compare(even(low, 2 * low, low), seconds)).block_size for low in (20, 400, 4000)]
    assert picked == [8, 32, 128]


def test_a_shared_beginning_that_a_large_block_loses_picks_a_smaller_one() -> None:
    seconds = {**FLAT, 64: 0.8, 128: 0.7}
    assert pick(compare(even(600, 900, 100), seconds)).block_size == 128
    assert pick(compare(even(600, 900, 100, shared=127), seconds)).block_size == 64


def test_the_reason_names_the_cheapest_and_what_all_cost() -> None:
    costs = compare(even(100, 800, 100), FLAT)
    reason = explain(costs)
    assert reason.startswith("blocks of 16 tokens cost within 3% of those of 8, the cheapest, and are the usual ones: ")
    assert "their attention takes 1.00 times as long as the fastest size's, 1.02 slots are held" in reason
    assert reason.endswith(", ".join(f"{cost.block_size}: {cost.total:.2f}" for cost in costs))
    assert explain(compare(even(100, 800, 100), {8: 1.5, 32: 1.0})).startswith("blocks of 32 tokens cost least: ")


def test_sizes_are_measured_in_turn_and_slow_rounds_change_nothing() -> None:
    calls: list[int] = []

    def measure(size: int) -> float:
        calls.append(size)
        return size + (100.0 if len(calls) in (1, 4, 5) else 0.0)

    assert in_turn(measure, (8, 16), 3) == {8: 8.0, 16: 16.0}
    assert calls == [8, 16] * 3


@pytest.mark.parametrize("max_positions", [None, 2, 7, 64, 900])
def test_typical_requests_fit_the_model(max_positions: int | None) -> None:
    workload = Workload.typical(max_positions)
    longest = max(p + o for p, o in zip(workload.prompts, workload.outputs, strict=True))
    assert longest <= (max_positions or 1024)
    assert all(0 <= shared < prompt for shared, prompt in zip(workload.shared, workload.prompts, strict=True))


def test_typical_requests_hold_512_tokens_where_the_model_reaches_as_far() -> None:
    assert Workload.typical().mean_context == pytest.approx(512, abs=1)

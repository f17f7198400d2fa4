"""A study weighs what was measured against what the requests lose, and keeps all of it."""

from __future__ import annotations

import pytest

from paged_backend.block_cost import CANDIDATES, Workload
from paged_backend.errors import ConfigError
from paged_backend.lab.block_size_study import ROUNDS, Study, spread_workload, study, trace_workload
from paged_backend.lab.trace import TraceRequest


class Scripted:
    """Seconds by size: a flat 1 for decodes and chunks and 0.1 for storing, save for those that are given."""

    def __init__(self, decode: dict[int, float] | None = None, prefill: dict[int, float] | None = None) -> None:
        self.decode, self.prefill = decode or {}, prefill or {}
        self.calls: list[tuple[str, int, int, int]] = []

    def decode_seconds(self, block_size: int, context_len: int, num_seqs: int) -> float:
        self.calls.append(("decode", block_size, context_len, num_seqs))
        return self.decode.get(block_size, 1.0)

    def prefill_seconds(self, block_size: int, context_len: int, num_tokens: int) -> float:
        self.calls.append(("prefill", block_size, context_len, num_tokens))
        return self.prefill.get(block_size, 1.0)

    def store_seconds(self, block_size: int, context_len: int, num_tokens: int) -> float:
        self.calls.append(("store", block_size, context_len, num_tokens))
        return 0.1


def run(timing: Scripted, *lengths: int, **options) -> Study:
    return study(timing, spread_workload(*lengths, 100, 0, None), 8, 512, **options)


def test_flat_timings_pick_a_small_block() -> None:
    result = run(Scripted(), 100, 800)
    assert result.picked == 16
    assert [row.cost.block_size for row in result.results] == list(CANDIDATES)
    assert [(row.decode_s, row.prefill_s, row.store_s) for row in result.results] == [(1.0, 1.0, 0.1)] * 6


def test_kernels_twice_as_slow_on_small_blocks_pick_a_larger_one() -> None:
    assert run(Scripted({8: 2.0, 16: 2.0}, {8: 2.0, 16: 2.0}), 100, 800).picked == 32


def test_long_prompts_weigh_the_time_of_prefill_more() -> None:
    prefill = {8: 1.5, 16: 1.5}
    assert run(Scripted(prefill=prefill), 400, 450).picked == 16
    assert run(Scripted(prefill=prefill), 8000, 8050).picked == 32


def test_the_time_of_a_request_is_its_share_of_decodes_and_its_prompt_in_chunks() -> None:
    result = run(Scripted({16: 2.0}, {16: 3.0}), 1024, 1024, sizes=(8, 16))
    # 100 tokens of output in steps of 8 requests, and two chunks of 512.
    assert result.results[1].cost.slowdown == (2.0 / 8 * 100 + 3.0 * 2) / (1.0 / 8 * 100 + 1.0 * 2)


def test_each_size_is_measured_in_turn_at_the_lengths_of_the_requests() -> None:
    timing = Scripted()
    result = run(timing, 300, 500)
    assert (result.num_seqs, result.context_len, result.chunk, result.chunk_end) == (8, 450, 400, 400)
    expected = [("decode", 450, 8), ("prefill", 400, 400), ("store", 400, 400)]
    assert timing.calls == [
        (name, size, length, count) for name, length, count in expected for _ in range(ROUNDS) for size in CANDIDATES
    ]


def test_contexts_too_long_to_be_timed_are_cut_and_chunks_lie_in_the_middle_of_prompts() -> None:
    result = run(Scripted(), 3000, 3000)
    assert (result.context_len, result.chunk, result.chunk_end) == (2048, 512, 1756)
    assert run(Scripted(), 90_000, 90_000).chunk_end == 2048


def test_waste_and_tables_are_those_of_the_requests() -> None:
    workload = Workload([20, 30], [5, 5], [0, 19])
    result = study(Scripted(), workload, 8, 512, windows={0: 1, 4: 1}, sizes=(16,))
    (row,) = result.results
    assert row.lost_share == 3 / 50
    assert row.table_bytes == 2 * 4 * (2 * 5 + 3 * 2 + 2 * 3) / 10
    assert row.unfilled == 1 - 1 / workload.slots_per_token(16, {0: 1, 4: 1})


def test_prompts_are_spread_evenly_and_share_at_most_all_but_their_last_token() -> None:
    workload = spread_workload(2, 4, 7, 3, 11)
    assert (list(workload.prompts), list(workload.outputs), list(workload.shared)) == ([2, 3, 4], [7] * 3, [1, 2, 3])


def test_prompts_beyond_the_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="prompts of up to 4 tokens and 7 of output are beyond the 10 that the model"):
        spread_workload(2, 4, 7, 0, 10)


def test_requests_of_a_trace_count_with_what_they_share() -> None:
    common = list(range(20))
    trace = [TraceRequest(0.0, [*common, n], 3 + n) for n in range(3)]
    workload, num_left_out = trace_workload(trace, 25)
    assert (list(workload.prompts), list(workload.outputs), list(workload.shared)) == ([21, 21], [3, 4], [0, 20])
    assert num_left_out == 1
    assert workload.lost_share(16) == 4 / 42
    assert workload.lost_share(8) == 4 / 42
    assert workload.lost_share(4) == 0


def test_a_trace_of_which_the_model_can_run_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="each of the 1 requests is longer than the 10 tokens"):
        trace_workload([TraceRequest(0.0, range(8), 3)], 10)

"""The benchmark of streams reads every token of every stream."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "kernels" / "bench"))
import bench_streaming


@pytest.fixture(scope="module")
def engine():
    return bench_streaming.make_engine(3)


@pytest.mark.parametrize("read", [bench_streaming.to_tasks, bench_streaming.to_threads])
def test_streams_are_read_to_their_ends(engine, read):
    # A reader that is late finds several tokens in one piece.
    assert 3 <= read(engine, 3, 6) <= 18


@pytest.mark.parametrize("wake", [bench_streaming.waking_a_loop, bench_streaming.waking_threads])
def test_what_wakes_readers_runs_the_same_steps(engine, wake):
    before = engine.stats().num_generated_tokens
    wake(engine, 3, 6)
    assert engine.stats().num_generated_tokens - before == 18


def test_a_stream_that_lost_a_token_is_noticed(engine):
    with pytest.raises(AssertionError):
        bench_streaming._checked([], 1)

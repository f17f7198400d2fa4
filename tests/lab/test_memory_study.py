"""Layouts of keys and values are counted as they would take memory."""

from __future__ import annotations

import json

import pytest

from paged_backend.lab import memory_study
from paged_backend.lab.memory_study import study
from paged_backend.lab.trace import TraceRequest
from paged_backend.lab.traffic import Traffic


@pytest.fixture(scope="module")
def result():
    return study(Traffic(24, shortest=16, longest=300).draw(), 4, 1000)


def of(result, name):
    return next(layout for layout in result.layouts if layout.name == name)


def test_a_preallocated_seat_takes_the_longest_request(result):
    layout = of(result, "preallocated")
    assert layout.peak_reserved == result.budget == 4 * result.longest
    assert layout.largest_batch == 4


def test_the_smaller_the_blocks_the_less_is_reserved_in_vain(result):
    paged = [of(result, f"paged, blocks of {size}") for size in memory_study.BLOCK_SIZES]
    utilisations = [layout.utilisation for layout in paged]
    assert utilisations == sorted(utilisations, reverse=True)
    assert utilisations[0] > 0.95
    assert of(result, "padded").utilisation < of(result, "preallocated").utilisation < utilisations[2]
    batches = [layout.largest_batch for layout in paged]
    assert batches == sorted(batches, reverse=True)
    assert batches[0] > 4


def test_padded_batches_fit_while_their_longest_prompt_and_answer_do():
    requests = [TraceRequest(0.0, range(10), 10), TraceRequest(0.0, range(30), 2), TraceRequest(0.0, range(2), 20)]
    assert memory_study._largest_padded(requests, 80) == 2
    assert memory_study._largest_padded(requests, 79) == 1
    assert memory_study._largest_padded(requests, 150) == 3


def test_what_happens_at_exhaustion_is_counted(result):
    assert "set aside" in of(result, "paged, blocks of 16").at_exhaustion


def test_json_and_table_have_a_row_for_each_layout(result):
    told = json.loads(memory_study.to_json(result, {"model": "m"}))
    assert [layout["name"] for layout in told["layouts"]] == [layout.name for layout in result.layouts]
    shown = memory_study.table(result, "title")
    assert shown.row_count == len(result.layouts)


def test_a_plot_is_drawn(result, tmp_path):
    pytest.importorskip("matplotlib")
    memory_study.plot(result, tmp_path / "memory.svg")
    assert "preallocated, reserved" in (tmp_path / "memory.svg").read_text()

"""A study's numbers stand in a table with the pick marked, in JSON and in a plot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from paged_backend.block_cost import BlockCost
from paged_backend.errors import ConfigError
from paged_backend.lab import block_size_report as report
from paged_backend.lab.block_size_study import SizeResult, Study

STUDY = Study(
    (
        SizeResult(0.002, 0.02, 0.001, 0.01, 0.0, 1400.0, BlockCost(8, 2.0, 1.01, 1.0)),
        SizeResult(0.001, 0.01, 0.0005, 0.2, 0.125, 90.0, BlockCost(64, 1.0, 1.25, 1.1)),
    ),
    num_seqs=8,
    context_len=450,
    chunk=400,
    chunk_end=420,
)


def test_the_table_marks_the_size_that_was_picked() -> None:
    console = Console(width=150)
    with console.capture() as captured:
        console.print(report.table(STUDY, "title"))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in captured.get().splitlines() if "│" in line]
    assert rows == [
        ["8", "2.00", "20.00", "1.00", "1.0%", "0.0%", "1,400", "2.02"],
        ["> 64", "1.00", "10.00", "0.50", "20.0%", "12.5%", "90", "1.38"],
    ]


def test_json_tells_what_was_timed_all_numbers_and_the_pick_with_its_reason() -> None:
    told = json.loads(report.to_json(STUDY, {"model": "m"}))
    assert (told["settings"], told["num_seqs"], told["chunk_end"]) == ({"model": "m"}, 8, 420)
    assert (told["picked"], told["reason"]) == (64, STUDY.reason)
    assert told["sizes"][1] == {
        "block_size": 64,
        "decode_s": 0.001,
        "prefill_s": 0.01,
        "store_s": 0.0005,
        "unfilled": 0.2,
        "lost_share": 0.125,
        "table_bytes": 90.0,
        "slowdown": 1.0,
        "slots_per_token": 1.25,
        "work": 1.1,
        "cost": 1.25 * 1.1,
    }


def test_a_plot_has_a_point_for_each_size_and_a_wrong_kind_of_file_is_refused(tmp_path: Path) -> None:
    report.plot(STUDY, tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    assert "<!-- 8 -->" in text
    assert "<!-- 64 -->" in text
    with pytest.raises(ConfigError, match=r"plot\.xyz cannot be drawn"):
        report.plot(STUDY, tmp_path / "plot.xyz")

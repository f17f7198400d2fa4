"""The numbers of a report are those of the outcomes, and stand in a table, in JSON and in a plot."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from lab_cases import COST, MACHINE, small_trace
from rich.console import Console

from paged_backend.errors import ConfigError
from paged_backend.lab import report
from paged_backend.lab.replay import Policies, replay
from paged_backend.lab.trace import TraceRequest
from paged_backend.lab.usage import Usage


def test_numbers_of_one_request_can_be_reckoned_by_hand() -> None:
    result = replay([TraceRequest(0.0, range(20), 3, deadline_s=0.06)], MACHINE)
    first = COST.seconds(0, 16, 16) + COST.seconds(0, 4, 20)
    latency = first + COST.seconds(1, 0, 21) + COST.seconds(1, 0, 22)
    numbers = report.metrics(result)
    assert numbers["ttft_mean_s"] == numbers["ttft_p99_s"] == pytest.approx(first)
    assert numbers["latency_p50_s"] == numbers["seconds"] == pytest.approx(latency)
    assert numbers["inter_token_mean_s"] == pytest.approx((latency - first) / 2)
    assert (numbers["attainment"], numbers["goodput_per_s"]) == (1.0, pytest.approx(1 / latency))
    assert numbers["tokens_per_s"] == pytest.approx(3 / latency)
    late = report.metrics(replay([TraceRequest(0.0, range(20), 3, deadline_s=0.04)], MACHINE))
    assert (late["attainment"], late["goodput_per_s"], late["num_finished"]) == (0.0, 0.0, 1)


def test_what_there_is_none_of_is_no_number() -> None:
    trace = [replace(request, deadline_s=None) for request in small_trace()]
    numbers = report.metrics(replay(trace, MACHINE))
    assert (numbers["attainment"], numbers["service_gap"]) == (None, None)
    refused = report.metrics(replay([TraceRequest(0.0, range(10_000), 5)], MACHINE))
    assert (refused["latency_mean_s"], refused["prefix_hit_rate"], refused["num_refused"]) == (None, None, 1)


def test_prefixes_preemptions_and_memory_are_counted() -> None:
    numbers = report.metrics(replay(small_trace(), MACHINE))
    assert 0 < numbers["prefix_hit_rate"] < 1
    assert numbers["num_preemptions"] > 0
    assert numbers["num_recomputed_tokens"] > 0
    assert 0 < numbers["kv_mean"] <= numbers["kv_peak"] <= 1
    assert 0 < numbers["kv_waste"] < 1


def test_the_table_has_a_column_for_each_pair_of_policies_and_no_row_of_nothing() -> None:
    pairs = [Policies(scheduler, eviction) for scheduler in ("fifo", "deadline") for eviction in ("lru", "gdsf")]
    shown = report.table([replay(small_trace(), MACHINE, policies) for policies in pairs], "title")
    assert [column.header for column in shown.columns] == [
        "",
        "fifo\nlru",
        "fifo\ngdsf",
        "deadline\nlru",
        "deadline\ngdsf",
    ]
    console = Console(width=150)
    with console.capture() as captured:
        console.print(shown)
    text = captured.get()
    assert "latency, P99 s" in text
    assert "service gap" not in text
    assert "broken contracts" not in text


def test_json_tells_machine_settings_numbers_and_memory_over_time() -> None:
    result = replay(small_trace(), MACHINE)
    told = json.loads(report.to_json([result], MACHINE, {"seed": 3}))
    assert (told["machine"]["num_blocks"], told["settings"], told["machine"]["cost"]["fixed_s"]) == (
        24,
        {"seed": 3},
        0.008,
    )
    (row,) = told["replays"]
    assert (row["scheduler"], row["eviction"]) == ("fifo", "lru")
    assert row["metrics"] == report.metrics(result)
    times = [moment["time"] for moment in row["memory"]]
    assert times == sorted(times)
    assert max(moment["owned_blocks"] for moment in row["memory"]) / 24 == row["metrics"]["kv_peak"]


def test_memory_over_time_stays_bounded_and_spread_out() -> None:
    usage = Usage(10)
    for step in range(10_000):
        usage.record(float(step), step % 7, 0)
    assert 512 <= len(usage.moments) <= 1024
    gaps = {later[0] - earlier[0] for earlier, later in zip(usage.moments, usage.moments[1:], strict=False)}
    assert len(gaps) == 1


def test_a_plot_is_drawn_and_a_wrong_kind_of_file_refused(tmp_path: Path) -> None:
    results = [replay(small_trace(), MACHINE, Policies(name)) for name in ("fifo", "priority")]
    report.plot(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"plot\.xyz cannot be drawn"):
        report.plot(results, tmp_path / "plot.xyz")

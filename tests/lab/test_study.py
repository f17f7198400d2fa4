"""A study sets policies beside yardsticks, and says which share of what could be had they reach."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from lab_cases import MACHINE, small_trace
from rich.console import Console

from paged_backend.errors import ConfigError
from paged_backend.lab.replay import Policies, at_load, replay
from paged_backend.lab.report import metrics
from paged_backend.lab.study import Point, plot, study, tables, to_json

TRACE = [replace(request, deadline_s=None) for request in small_trace()]
POLICIES = [Policies("starvation_aware"), Policies("deadline", scheduler_options={"shed": True})]


@pytest.fixture(scope="module")
def points() -> list[Point]:
    return study(TRACE, MACHINE, POLICIES, [0.9, 1.3], ["tight", "loose"])


def of(points: list[Point], scheduler: str, eviction: str = "lru", load: float = 1.3, deadline: str = "loose") -> Point:
    (point,) = (
        p
        for p in points
        if (p.load, p.deadline) == (load, deadline)
        and p.policies.scheduler == scheduler
        and p.policies.eviction == eviction
    )
    return point


def test_every_load_and_deadline_has_the_policies_and_then_the_yardsticks(points: list[Point]) -> None:
    names = ["starvation_aware", "deadline", "fifo", "oracle_sjf", "fifo_shed", "moore_hodgson", "fifo"]
    assert [point.policies.scheduler for point in points] == names * 4
    assert [point.is_yardstick for point in points[:7]] == [False, False, False, True, True, True, True]
    places = [(point.load, point.deadline) for point in points[::7]]
    assert places == [(0.9, "tight"), (0.9, "loose"), (1.3, "tight"), (1.3, "loose")]


def test_a_point_has_the_numbers_of_a_replay_at_that_load(points: list[Point]) -> None:
    alone = metrics(replay(at_load(TRACE, MACHINE, 1.3), MACHINE, POLICIES[0], deadline="loose"))
    assert alone.items() <= of(points, "starvation_aware").metrics.items()


def test_shares_are_of_what_the_yardsticks_of_the_same_load_and_deadline_reach(points: list[Point]) -> None:
    for load, deadline in ((0.9, "tight"), (1.3, "loose")):
        fifo, sjf, aware, best, belady = (
            of(points, *names, load=load, deadline=deadline).metrics
            for names in (("fifo",), ("oracle_sjf",), ("starvation_aware",), ("moore_hodgson",), ("fifo", "belady"))
        )
        gain = fifo["latency_mean_s"] - sjf["latency_mean_s"]
        assert aware["of_sjf_gain"] == pytest.approx((fifo["latency_mean_s"] - aware["latency_mean_s"]) / gain)
        assert aware["of_moore_hodgson"] == pytest.approx(aware["attainment"] / best["attainment"])
        assert aware["of_belady"] == pytest.approx(aware["prefix_hit_rate"] / belady["prefix_hit_rate"])
        assert (fifo["of_sjf_gain"], sjf["of_sjf_gain"], best["of_moore_hodgson"]) == (0, 1, 1)


def test_the_latency_of_those_who_are_left_when_others_were_given_up_is_no_share() -> None:
    shed = study(TRACE, MACHINE, POLICIES[1:], [3.0], ["0.5"])[0].metrics
    assert shed["num_timed_out"]
    assert shed["of_sjf_gain"] is None


def test_yardsticks_that_tell_nothing_stay_away() -> None:
    machine = replace(MACHINE, enable_prefix_caching=False)
    found = study(TRACE, machine, [Policies("fifo"), Policies("oracle_sjf")], [1.0])
    assert [point.policies.scheduler for point in found] == ["fifo", "oracle_sjf"]
    assert found[0].metrics["of_moore_hodgson"] is None


def test_deadlines_of_the_trace_itself_call_for_their_yardsticks() -> None:
    found = study(small_trace(), MACHINE, [Policies("fifo")], [1.0])
    assert {"fifo_shed", "moore_hodgson"} < {point.policies.scheduler for point in found}


def text_of(points: list[Point]) -> str:
    console = Console(width=120, record=True)
    for table in tables(points, "trace"):
        console.print(table)
    return console.export_text()


def test_a_table_for_each_load_and_deadline_marks_yardsticks(points: list[Point]) -> None:
    text = text_of(points)
    assert text.count("load 1.3, deadlines loose") == 1
    for row in ("│ starvation_aware ", "│ moore_hodgson * ", "│ fifo, belady * ", "│ fifo  "):
        assert text.count(row) == 4
    assert "broken contracts" not in text


def test_evictions_are_named_where_there_are_several() -> None:
    text = text_of(study(TRACE, MACHINE, [Policies(), Policies(eviction="slru")], [1.0]))
    assert all(name in text for name in ("│ fifo, lru ", "│ fifo, slru ", "│ fifo, belady *"))


def test_json_says_everything_and_the_same_each_time(points: list[Point]) -> None:
    again = study(TRACE, MACHINE, POLICIES, [0.9, 1.3], ["tight", "loose"])
    assert to_json(again, MACHINE, {}) == to_json(points, MACHINE, {})
    rows = json.loads(to_json(points, MACHINE, {"seed": 3}))["points"]
    assert [(row["load"], row["policies"]["scheduler"], row["is_yardstick"]) for row in rows[:4:3]] == [
        (0.9, "starvation_aware", False),
        (0.9, "oracle_sjf", True),
    ]
    assert rows[0]["metrics"] == points[0].metrics


def test_a_plot_has_a_line_for_each_policy(points: list[Point], tmp_path: Path) -> None:
    path = tmp_path / "study.svg"
    plot(points, path)
    drawn = path.read_text()
    for label in ("starvation_aware", "moore_hodgson *", "fifo, belady *", "share in time, deadlines tight"):
        assert f"<!-- {label} -->" in drawn
    with pytest.raises(ConfigError, match="cannot be drawn"):
        plot(points, tmp_path / "study.words")

"""Numbers of a bench are of its runs, and stand in a table, JSON and a plot."""

from __future__ import annotations

import json

import pytest

from paged_backend.lab import bench_report
from paged_backend.lab.roofline import Roofline

ROOFLINE = Roofline.of_name("h100:llama-7b")


def test_numbers_are_of_the_runs(simulated):
    continuous = simulated.measured[-1]
    numbers = bench_report.metrics(simulated, continuous)
    latencies = [o.finished - o.arrival for o in continuous.arriving.outcomes]
    assert numbers["latency_mean_s"] == pytest.approx(sum(latencies) / 48)
    assert numbers["requests_per_s"] == pytest.approx(48 / continuous.saturated.seconds)
    assert numbers["kv_utilisation"] == continuous.saturated.kv_utilisation
    needed = sum(
        ROOFLINE.model.cost.of(o.num_prompt_tokens, o.num_output_tokens) for o in continuous.saturated.outcomes
    )
    assert numbers["compute_utilisation"] == pytest.approx(
        needed / ROOFLINE.device.flops / continuous.saturated.seconds
    )
    short = [o for o in continuous.arriving.outcomes if o.num_prompt_tokens + o.num_output_tokens <= 25]
    assert numbers["short_latency_mean_s"] == pytest.approx(sum(o.finished - o.arrival for o in short) / len(short))


def test_brackets_tell_how_many_times_better_the_last_mode_is(simulated):
    rows = dict(bench_report.rows(simulated))
    cells = rows["requests a second"]
    rates = [bench_report.metrics(simulated, measured)["requests_per_s"] for measured in simulated.measured]
    assert [gain for _, gain in cells[:-1]] == pytest.approx([rates[-1] / rate for rate in rates[:-1]])
    assert cells[-1][1] is None
    mean = [bench_report.metrics(simulated, measured)["latency_mean_s"] for measured in simulated.measured]
    assert rows["mean latency, s"][0][1] == pytest.approx(mean[0] / mean[-1])


def test_json_has_every_mode_and_outcome(simulated):
    told = json.loads(bench_report.to_json(simulated, {"model": "simulated"}))
    assert [mode["mode"] for mode in told["modes"]] == [measured.mode.name for measured in simulated.measured]
    assert all(len(mode["arriving"]) == 48 for mode in told["modes"])
    assert told["model"] == "simulated"


def test_a_plot_is_drawn(simulated, tmp_path):
    pytest.importorskip("matplotlib")
    bench_report.plot(simulated, tmp_path / "bench.svg")
    assert "continuous" in (tmp_path / "bench.svg").read_text()

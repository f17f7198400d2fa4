"""A simulated bench runs padded batches and the engine's own scheduler on one clock."""

from __future__ import annotations

import json

import pytest

from paged_backend.errors import ConfigError
from paged_backend.lab import bench_report, claims
from paged_backend.lab.bench import Setting
from paged_backend.lab.bench_page import page
from paged_backend.lab.roofline import Roofline
from paged_backend.lab.simulation import simulate
from paged_backend.lab.traffic import Traffic

ROOFLINE = Roofline.of_name("h100:llama-7b")


@pytest.fixture(scope="module")
def result():
    return simulate(ROOFLINE, Traffic(48, "short", 16, 200), Setting(batch=8, window_ms=50.0))


def of(result, name):
    return next(measured for measured in result.measured if measured.mode.name == name)


def test_every_request_is_answered_in_every_mode(result):
    for measured in result.measured:
        for run in (measured.saturated, measured.arriving):
            assert len(run.outcomes) == 48
            assert all(o.arrival < o.first_token <= o.finished <= run.seconds for o in run.outcomes)


def test_all_modes_serve_the_same_requests(result):
    shapes = {tuple((o.num_prompt_tokens, o.num_output_tokens) for o in m.saturated.outcomes) for m in result.measured}
    arrivals = {tuple(o.arrival for o in m.arriving.outcomes) for m in result.measured}
    assert len(shapes) == len(arrivals) == 1


def test_the_rate_is_what_static_batches_of_stock_can_do(result):
    assert result.rate == pytest.approx(48 / of(result, "stock-static").saturated.seconds)


def test_batches_are_answered_as_a_whole_but_for_the_continuous_mode(result):
    for name in ("stock-static", "static"):
        assert len({o.finished for o in of(result, name).saturated.outcomes}) == 6
    assert len({o.finished for o in of(result, "continuous").saturated.outcomes}) > 20


def test_padding_is_told_from_batching(result):
    assert of(result, "stock-static").saturated.waste > 0.2
    assert of(result, "static").saturated.waste == of(result, "continuous").saturated.waste == 0.0
    static, ours, continuous = (of(result, name).saturated.seconds for name in ("stock-static", "static", "continuous"))
    assert continuous < ours < static


def test_numbers_are_of_the_runs(result):
    continuous = of(result, "continuous")
    numbers = bench_report.metrics(result, continuous)
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


def test_brackets_tell_how_many_times_better_the_last_mode_is(result):
    rows = dict(bench_report.rows(result))
    cells = rows["requests a second"]
    rates = [bench_report.metrics(result, measured)["requests_per_s"] for measured in result.measured]
    assert [gain for _, gain in cells[:-1]] == pytest.approx([rates[-1] / rate for rate in rates[:-1]])
    assert cells[-1][1] is None
    mean = [bench_report.metrics(result, measured)["latency_mean_s"] for measured in result.measured]
    assert rows["mean latency, s"][0][1] == pytest.approx(mean[0] / mean[-1])


def test_json_has_every_mode_and_outcome(result):
    told = json.loads(bench_report.to_json(result, {"model": "simulated"}))
    assert [mode["mode"] for mode in told["modes"]] == [measured.mode.name for measured in result.measured]
    assert all(len(mode["arriving"]) == 48 for mode in told["modes"])
    assert told["model"] == "simulated"


def test_a_plot_is_drawn(result, tmp_path):
    pytest.importorskip("matplotlib")
    bench_report.plot(result, tmp_path / "bench.svg")
    assert "continuous" in (tmp_path / "bench.svg").read_text()


def test_the_page_has_a_bar_for_each_request_and_needs_nothing_else(result):
    text = page(result, "A <title>", ["about & all"])
    assert text.count("<rect") == 2 * 48 * len(result.measured)
    assert "A &lt;title&gt;" in text
    assert "about &amp; all" in text
    assert "src=" not in text
    assert "href=" not in text


def test_claims_stand_beside_what_came_out(result):
    assert claims.can_compare(result)
    shown = claims.table(result)
    assert [column.header for column in shown.columns][1] == "claimed"
    assert shown.row_count == 5
    without = simulate(ROOFLINE, Traffic(4), Setting(("continuous",)))
    assert not claims.can_compare(without)


def test_verdicts_compare_ratios():
    assert claims.verdict([3.4, 2.2], [3.4, 2.2]) == "agrees"
    assert claims.verdict([3.4, 2.2], [3.0, 1.2]) == "less"
    assert claims.verdict([3.4, 2.2], [9.0, 8.0]) == "more"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"modes": ("padded",)}, "choose from stock-static"),
        ({"modes": ()}, "must be different modes"),
        ({"modes": ("static", "static")}, "must be different modes"),
        ({"arrivals": "slow"}, "choose from poisson"),
        ({"batch": 0}, "batch"),
        ({"load": 0}, "load"),
        ({"window_ms": -1}, "window_ms"),
    ],
)
def test_settings_that_cannot_be_are_told(options, told):
    with pytest.raises(ConfigError, match=told):
        Setting(**options)

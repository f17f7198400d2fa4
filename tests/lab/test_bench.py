"""A bench runs every mode on one model, with the same requests."""

from __future__ import annotations

import pytest
from recurrent_models import make_recurrent
from tiny_models import make_tiny

from paged_backend.errors import ConfigError
from paged_backend.lab import bench as lab
from paged_backend.lab.bench import Setting, bench
from paged_backend.lab.bench_report import definitions
from paged_backend.lab.trace import TraceRequest
from paged_backend.lab.traffic import Traffic


class Heard(lab.Progress):
    def __init__(self):
        self.runs: list[list] = []

    def begins(self, text, num_requests):
        self.runs.append([text, num_requests, 0])

    def answered(self, count):
        self.runs[-1][2] += count


@pytest.fixture(scope="module")
def model():
    return make_tiny("llama")


@pytest.fixture(scope="module")
def measured(model):
    patch = pytest.MonkeyPatch()
    patch.setattr("paged_backend.lab.compute._SIZES", (64,))
    patch.setattr("paged_backend.lab.compute._TIMED_S", 0.01)
    heard = Heard()
    setting = Setting(("stock-static", "window", "continuous"), batch=3, window_ms=5.0, load=2.0)
    result = bench(model, Traffic(6, shortest=16, longest=64), setting, scale=0.5, progress=heard)
    patch.undo()
    return result, heard


def test_every_mode_answers_all_requests_both_ways(measured):
    result, heard = measured
    assert [run[0] for run in heard.runs] == [
        f"{name}, {how}"
        for name in ("static, stock", "window, our kernels", "continuous")
        for how in ("all at once", "arriving")
    ]
    assert all(total == answered == 6 for _, total, answered in heard.runs)
    for one in result.measured:
        for run in (one.saturated, one.arriving):
            assert all(o.arrival <= o.first_token <= o.finished for o in run.outcomes)


@pytest.mark.parametrize(("scale", "size"), [(8.0, 16), (1.0, 16), (0.5, 8), (0.3, 4), (1 / 16, 4)])
def test_blocks_shrink_with_the_lengths(scale, size):
    assert lab._block_size(scale) == size


def test_engines_have_the_blocks_that_the_report_tells(measured):
    result, _ = measured
    assert result.setting.engine["block_size"] == 8
    assert "in blocks of 8." in definitions(result)


def test_lengths_are_scaled_and_the_same_in_every_mode(measured):
    result, _ = measured
    assert (result.traffic.shortest, result.traffic.longest) == (8, 32)
    drawn = [(len(request.prompt), request.output_length) for request in result.traffic.draw()]
    for one in result.measured:
        assert [(o.num_prompt_tokens, o.num_output_tokens) for o in one.saturated.outcomes] == drawn


def test_requests_arrive_at_the_load_of_the_first_mode(measured):
    result, _ = measured
    assert result.rate == pytest.approx(2.0 * 6 / result.measured[0].saturated.seconds)


def test_memory_is_well_filled_by_continuous_batching_and_badly_by_padding(measured):
    result, _ = measured
    padded, _, continuous = (one.saturated for one in result.measured)
    assert 0 < padded.kv_utilisation < continuous.kv_utilisation < 1
    assert padded.waste > 0.1


def test_lengths_are_halved_until_they_fit_into_the_time_there_is(model, monkeypatch):
    monkeypatch.setattr(lab, "PATIENCE_S", 0.0)
    assert lab._scale_for(model, Traffic(4, shortest=16, longest=128), 2, lab.Progress()) == 0.25
    monkeypatch.setattr(lab, "PATIENCE_S", 1e9)
    assert lab._scale_for(model, Traffic(4, shortest=16, longest=128), 2, lab.Progress()) == 1.0


def test_seconds_are_expected_of_the_longest_prompt_and_answer_of_each_batch():
    traffic = Traffic(3, "trace", 4, 100, trace=[TraceRequest(0.0, range(10), 5), TraceRequest(1.0, range(4), 20)])
    # Batches of two: 10 and 20, then 10 and 5.
    assert lab._expected_s(traffic, 2, 1.0, 100.0) == 20 + 2500


def test_requests_longer_than_the_model_reaches_are_told(model):
    with pytest.raises(ConfigError, match="longer than the model's"):
        bench(model, Traffic(2, shortest=64, longest=10**6), Setting(), scale=1.0)


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


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next"])
def test_models_with_recurrent_state_have_memory_for_their_states(name, monkeypatch):
    monkeypatch.setattr("paged_backend.lab.compute._SIZES", (64,))
    monkeypatch.setattr("paged_backend.lab.compute._TIMED_S", 0.01)
    traffic, setting = Traffic(3, shortest=8, longest=24), Setting(("continuous",), batch=2)
    result = bench(make_recurrent(name), traffic, setting, scale=1.0)
    assert len(result.measured[0].arriving.outcomes) == 3

"""``paged-backend bench`` compares ways of batching, and says what is wrong."""

from __future__ import annotations

import json

import pytest
from tiny_models import make_tiny
from tiny_tokenizers import byte_tokenizer
from typer.testing import CliRunner, Result

from paged_backend.cli.app import app


def invoke(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, ["bench", *arguments])


SIMULATED = ("--simulate", "h100:llama-7b", "--requests", "24", "--batch", "8", "--longest", "200")


def test_a_simulation_prints_the_table_the_assumptions_and_the_claims():
    result = invoke(*SIMULATED)
    assert result.exit_code == 0, result.output
    shown = " ".join(result.output.split())
    for part in ("h100:llama-7b: 24 requests in batches of 8", "P99 latency, s", "989 TFLOP/s", "ratios claimed"):
        assert part in shown


def test_a_simulation_prints_the_same_bytes_each_time_and_follows_its_flags():
    told = [
        invoke(*SIMULATED, "--json", *more).output
        for more in ((), (), ("--seed", "1"), ("--lengths", "heavy"), ("--load", "0.5"), ("--arrivals", "bursts"))
    ]
    assert told[0] == told[1]
    assert len(set(told)) == 5
    assert [mode["mode"] for mode in json.loads(told[0])["modes"]][-1] == "continuous"


def test_pages_and_plots_are_written(tmp_path):
    pytest.importorskip("matplotlib")
    html, plot = tmp_path / "bench.html", tmp_path / "bench.png"
    result = invoke(*SIMULATED, "--html", str(html), "--plot", str(plot))
    assert result.exit_code == 0, result.output
    assert html.read_text().startswith("<!doctype html>")
    assert plot.stat().st_size > 1000


def test_a_model_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("paged_backend.lab.compute._TIMED_S", 0.01)
    monkeypatch.setattr("paged_backend.lab.compute._SIZES", (64,))
    make_tiny("llama").save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    modes = "stock-static,continuous"
    result = invoke(str(tmp_path), "--requests", "4", "--batch", "2", "--scale", "0.05", "--modes", modes)
    assert result.exit_code == 0, result.output
    assert "4 requests of 4 to 51 tokens" in result.output
    assert "fastest matrix product measured in this run" in " ".join(result.output.split())


def test_memory_is_studied():
    result = invoke("--study", "memory", *SIMULATED)
    assert result.exit_code == 0, result.output
    assert "paged, blocks of 16" in result.output
    assert "24 requests of 64 to 200 tokens" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--simulate", "h100"), "DEVICE:MODEL"),
        (("--simulate", "h100:llama-7b", "--threads", "2"), "leave out MODEL"),
        (("--lengths", "trace"), "need --trace FILE"),
        (("--trace", "some.jsonl"), "give one of them"),
        (("--lengths", "odd"), "choose from uniform"),
        (("--study", "speed"), "choose from batching, memory"),
        ((*SIMULATED, "--study", "memory", "--html", "x.html"), "has no use for --html"),
        ((*SIMULATED, "--scale", "0"), "scale must be"),
        ((*SIMULATED, "--scale", "1e300"), "longest"),
        ((*SIMULATED, "--load", "1e-320"), "later than"),
        ((*SIMULATED, "--scheduler", "nope"), "nope"),
        ((*SIMULATED, "--study", "memory", "--load", "2"), "has no use for --load"),
        (("--modes", "continuous,"), "choose from stock-static"),
        (("no/such/folder",), "no folder"),
        ((*SIMULATED, "--html", "/no/such/folder/x.html"), "cannot be written"),
    ],
)
def test_mistakes_are_told_without_a_traceback(arguments, told):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert told in " ".join(result.output.split())
    assert "Traceback" not in result.output

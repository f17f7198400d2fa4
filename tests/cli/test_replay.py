"""``paged-backend replay`` compares policies in a table or in JSON, the same each time, and says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from paged_backend.cli.app import app


def invoke(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, ["replay", *arguments])


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    rows = [{"arrival": n / 10, "prompt_length": 40 + n % 3, "output_length": 5 + 7 * (n % 4)} for n in range(30)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


SMALL = ("--seats", "4", "--memory", "40", "--device", "cpu-135m")


def test_a_table_compares_schedulers_with_evictions(trace: str) -> None:
    result = invoke(trace, "--scheduler", "fifo,starvation_aware", "--eviction", "lru,gdsf", *SMALL)
    assert result.exit_code == 0, result.output
    title = "trace.jsonl: 30 requests, at their own pace, 4 seats, 40 blocks of 16, lengths: oracle"
    assert title in " ".join(result.output.split())
    assert result.output.count("starvation_aware") == 2
    assert "latency, P99 s" in result.output


def test_json_follows_every_flag_and_is_the_same_each_time(trace: str) -> None:
    flags: dict[str, tuple[str, ...]] = {
        "nothing": (),
        "seats": ("--seats", "3"),
        "memory": ("--memory", "30"),
        "block size": ("--block-size", "8"),
        "budget": ("--max-num-batched-tokens", "32"),
        "limit": ("--limit", "20"),
        "rate": ("--rate-scale", "2"),
        "load": ("--load", "1.5"),
        "deadline": ("--deadline", "loose"),
        "lengths": ("--length-knowledge", "max"),
        "clients": ("--clients", "3"),
        "seed": ("--clients", "3", "--seed", "1"),
        "device": ("--device", "gpu-7b"),
        "caching": ("--no-prefix-caching",),
        "options": ("--scheduler-options", '{"starvation_aware": {"max_overtakes": 1}}'),
    }
    replays = set()
    for name, more in flags.items():
        result = invoke(trace, *SMALL, "--scheduler", "starvation_aware", "--json", *more)
        assert result.exit_code == 0, (name, result.output)
        replays.add(json.dumps(json.loads(result.output)["replays"]))
    assert len(replays) == len(flags)
    again = invoke(trace, *SMALL, "--scheduler", "starvation_aware", "--json", *flags["options"])
    assert again.output == result.output


def test_options_of_a_policy_change_what_it_does(trace: str) -> None:
    def numbers(*more: str) -> dict:
        result = invoke(trace, *SMALL, "--scheduler", "starvation_aware", "--json", *more)
        return json.loads(result.output)["replays"][0]["metrics"]

    never = numbers("--scheduler-options", '{"starvation_aware": {"max_overtakes": 0}}')
    assert never == {**numbers("--scheduler-options", '{"starvation_aware": {"max_wait_s": 0}}')}
    assert never["latency_mean_s"] > numbers()["latency_mean_s"]


def test_costs_and_a_plot_are_written(trace: str, tmp_path: Path) -> None:
    costs, plot = tmp_path / "costs.json", tmp_path / "plot.svg"
    result = invoke(trace, *SMALL, "--save-device", str(costs), "--plot", str(plot))
    assert result.exit_code == 0, result.output
    assert "<svg" in plot.read_text()
    again = invoke(trace, *SMALL[:4], "--device", str(costs))
    assert again.output == invoke(trace, *SMALL).output


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (("--scheduler", "best"), "error: unknown scheduler 'best'; choose one of deadline, fair"),
        (("--eviction", "lru,lru"), "--eviction='lru,lru' must be different names with commas between"),
        (("--device", "abacus"), "device 'abacus' is unknown; choose from gpu-7b, cpu-135m"),
        (("--deadline", "soon"), "deadline='soon' is unknown; choose from tight, loose"),
        (("--length-knowledge", "all"), "length_knowledge='all' is unknown; choose from oracle, max, quantile"),
        (("--load", "1", "--rate-scale", "2"), "both set the pace; give one of them"),
        (("--scheduler-options", '{"fair": {}}'), "'fair': {} must be a JSON object of options for one of fifo"),
        (("--plot", "/nowhere/plot.png"), "/nowhere/plot.png cannot be written"),
        (("--plot", "plot.odd"), "plot.odd cannot be drawn: its name must end in one of"),
        (("--block-size", "5000"), "block_size must be an int from 1 to 4096, got 5000"),
    ],
)
def test_what_cannot_be_is_said_in_words(trace: str, flags: tuple[str, ...], what: str) -> None:
    result = invoke(trace, *SMALL, *flags)
    assert result.exit_code == 2
    assert what in result.output


def test_a_trace_that_is_not_there_is_named(tmp_path: Path) -> None:
    result = invoke(str(tmp_path / "nothing.csv"))
    assert result.exit_code == 2
    assert f"error: the trace {tmp_path / 'nothing.csv'} cannot be read: No such file or directory" in result.output


def test_a_plot_that_cannot_be_written_is_told_before_anything_runs(
    trace: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("paged_backend.lab.trace.read_trace", lambda *args, **kwargs: pytest.fail("it ran"))
    result = invoke(trace, "--plot", str(tmp_path / "missing" / "plot.png"))
    assert result.exit_code == 2
    assert "there is no folder" in " ".join(result.output.split())

"""``paged-backend study`` prints a table for each load, the same each time, and says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from paged_backend.cli.app import app


def invoke(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, ["study", *arguments])


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    rows = [{"arrival": n / 10, "prompt_length": 40 + n % 3, "output_length": 5 + 7 * (n % 4)} for n in range(20)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


SMALL = ("--seats", "4", "--memory", "40", "--device", "cpu-135m", "--loads", "0.8,1.2")


def test_tables_compare_schedulers_with_yardsticks(trace: str) -> None:
    result = invoke(trace, *SMALL, "--scheduler", "starvation_aware", "--deadline", "tight, loose")
    assert result.exit_code == 0, result.output
    title = "trace.jsonl: 20 requests, lengths: oracle, load 1.2, deadlines tight"
    assert " ".join(result.stdout.split()).count(title) == 1
    for name in ("starvation_aware", "oracle_sjf *", "moore_hodgson *", "fifo, belady *"):
        assert result.stdout.count(f"│ {name} ") == 4
    assert (
        invoke(trace, *SMALL, "--scheduler", "starvation_aware", "--deadline", "tight, loose").stdout == result.stdout
    )


def test_json_has_the_settings_and_a_point_for_each_replay(trace: str) -> None:
    result = invoke(trace, *SMALL, "--limit", "15", "--seed", "2", "--clients", "3", "--no-prefix-caching", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["settings"] == {
        "trace": "trace.jsonl",
        "num_requests": 15,
        "length_knowledge": "oracle",
        "clients": 3,
        "seed": 2,
    }
    assert [(point["load"], point["policies"]["scheduler"]) for point in told["points"]] == [
        (0.8, "fifo"),
        (0.8, "oracle_sjf"),
        (1.2, "fifo"),
        (1.2, "oracle_sjf"),
    ]
    assert told["machine"]["seats"] == 4


def test_a_plot_is_written(trace: str, tmp_path: Path) -> None:
    path = tmp_path / "study.svg"
    assert invoke(trace, *SMALL, "--plot", str(path)).exit_code == 0
    assert "<svg" in path.read_text()


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (("--loads", "1,much"), "--loads='1,much' must be numbers with commas between, such as 0.9,1.1"),
        (("--loads", "1,1"), "--loads='1,1' must be different names with commas between"),
        (("--loads", "0"), "load must be"),
        (("--deadline", "soon"), "deadline='soon' is unknown; choose from tight, loose"),
        (("--scheduler", "best"), "error: unknown scheduler 'best'"),
        (("--plot", "/nowhere/plot.png"), "/nowhere/plot.png cannot be written"),
        (("--plot", "plot.odd"), "plot.odd cannot be drawn: its name must end in one of"),
    ],
)
def test_what_cannot_be_is_said_in_words(trace: str, flags: tuple[str, ...], what: str) -> None:
    result = invoke(trace, *SMALL, *flags)
    assert result.exit_code == 2
    assert what in result.output


def test_a_plot_that_cannot_be_written_is_told_before_anything_runs(
    trace: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("paged_backend.lab.trace.read_trace", lambda *args, **kwargs: pytest.fail("it ran"))
    result = invoke(trace, "--plot", str(tmp_path / "missing" / "plot.png"))
    assert result.exit_code == 2
    assert "there is no folder" in " ".join(result.output.split())

"""``paged-backend place`` compares routers in a table, in JSON and in a plot, and says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from paged_backend.cli.app import app

SMALL = ("--seats", "4", "--memory", "40", "--device", "cpu-135m", "--replicas", "3")


def invoke(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, ["place", *arguments])


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    rows = [{"arrival": n / 10, "prompt_length": 40 + n % 3, "output_length": 5 + 7 * (n % 4)} for n in range(30)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_a_table_and_a_plot_compare_routers(trace: str, tmp_path: Path) -> None:
    result = invoke(trace, *SMALL, "--plot", str(tmp_path / "plot.svg"))
    assert result.exit_code == 0, result.output
    for text in ("round_robin", "prefix_affinity", "busiest over mean", "3 replicas of 4 seats and 40 blocks of 16"):
        assert text in " ".join(result.output.split())
    assert "<svg" in (tmp_path / "plot.svg").read_text()


def test_json_follows_its_flags_and_is_the_same_each_time(trace: str) -> None:
    flags = [(), ("--replicas", "2"), ("--load", "2"), ("--router-options", '{"random": {"seed": 4}}')]
    told = [invoke(trace, *SMALL, "--router", "random", "--json", *more).output for more in (*flags, flags[-1])]
    assert len({json.dumps(json.loads(text)["placements"]) for text in told}) == len(flags)
    assert told[-1] == told[-2]


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (("--router", "best"), "error: unknown router 'best'; choose one of least_loaded"),
        (("--router", "random,random"), "--router='random,random' must be different names"),
        (("--router-options", '{"random": {}}'), "'random': {} must be a JSON object of options for one of"),
        (("--load", "1", "--rate-scale", "2"), "both set the pace; give one of them"),
        (("--replicas", "20000"), "replicas must be an int from 1 to 10000, got 20000"),
    ],
)
def test_what_cannot_be_is_said_in_words(trace: str, flags: tuple[str, ...], what: str) -> None:
    result = invoke(trace, *SMALL, *flags)
    assert result.exit_code == 2
    assert what in result.output

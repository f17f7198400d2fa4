"""The kernel benchmarks run, tiny and interpreted, and print what they promise."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paged_backend.kernels.triton import support as triton_support

pytestmark = pytest.mark.skipif(
    not triton_support.interpreted, reason="runs where TRITON_INTERPRET=1 is set, see test_interpreter.py"
)

BENCH = Path(__file__).parents[2] / "kernels" / "bench"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a benchmark in this process, where kernels are interpreted already; returns what it prints."""
    monkeypatch.syspath_prepend(BENCH)

    def run(main: Callable[[], None], *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["benchmark", "--tiny", *arguments])
        main()
        return capsys.readouterr().out

    return run


def columns(table: str, title: str) -> list[list[str]]:
    """The rows below the header that starts with `title`, as cells."""
    lines = table[table.index(f"\n| {title} |") + 1 :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_a_benchmark_prints_a_row_for_every_shape(run, monkeypatch, phase):
    benchmark = importlib.import_module(f"bench_{phase}")
    assert len(benchmark.SHAPES) >= 10
    # Tiny, most are the same, but for the last ones.
    monkeypatch.setattr(benchmark, "SHAPES", benchmark.SHAPES[-3:])
    rows = columns(run(benchmark.main), phase)
    assert len(rows) == 3
    for row in rows:
        assert float(row[1]) > 0
        assert row[4].endswith("x") or row[4].startswith("NotImplementedError")
        assert row[5].endswith("x")


def test_the_report_holds_every_table_and_finds_the_kernels_right(run, tmp_path):
    path = tmp_path / "report.md"
    run(importlib.import_module("gpu_report").main, "--output", str(path))
    report = path.read_text()
    checks = columns(report, "largest difference from the reference")
    assert len(checks) == 2
    assert {row[3] for row in checks} == {"right"}
    for title in ("decode", "prefill", "decode tiles", "prefill tiles"):
        assert len(columns(report, title)) == 1
    assert [row[0].split(",")[0] for row in columns(report, "tokens in bfloat16")] == [
        "store_kv", "rotary_store_kv", "rms_norm", "add_rms_norm", "silu_mul",
    ]  # fmt: skip
    assert [row[0].split(",")[0] for row in columns(report, "states of 16 heads")] == [
        "gated_delta_update", "selective_state_update",
    ]  # fmt: skip

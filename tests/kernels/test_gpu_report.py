"""The report of a GPU is on disk line by line, and stops in time."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "kernels" / "bench"))
import gpu_report


def test_lines_are_there_as_soon_as_they_are_known(tmp_path):
    report = gpu_report.Report(tmp_path / "report.md")

    def rows():
        yield ["1", "2"]
        assert "| 1 | 2 |" in (tmp_path / "report.md").read_text()
        yield ["3", "4"]

    report.table(["a", "b"], rows())
    assert "| 3 | 4 |" in (tmp_path / "report.md").read_text()


def test_a_table_ends_when_time_is_over(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_report, "BUDGET_S", -1)
    report = gpu_report.Report(tmp_path / "report.md")
    report.table(["a"], iter([["first"], ["second"]]))
    text = (tmp_path / "report.md").read_text()
    assert "first" in text
    assert "Out of time." in text
    assert "second" not in text


def test_an_old_report_is_begun_anew(tmp_path):
    (tmp_path / "report.md").write_text("old")
    gpu_report.Report(tmp_path / "report.md").add("new")
    assert (tmp_path / "report.md").read_text() == "new\n"

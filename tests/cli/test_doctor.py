"""``paged-backend doctor`` tells what it found in text and in JSON, and fails where there is a problem."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner, Result

from paged_backend.cli.app import app
from paged_backend.doctor import backends, examination, machine, self_test
from paged_backend.doctor.finding import Finding
from paged_backend.kernels import cpu
from paged_backend.kernels.cpu import loader
from paged_backend.kernels.dispatch import REFERENCE


def invoke(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "40", "TERM": "dumb"}).invoke(app, ["doctor", *arguments])


@pytest.fixture(autouse=True)
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free memory is another at each look, and how busy the machine is decides how long anything takes."""
    monkeypatch.setitem(examination.PROBES, "machine", (machine.system, machine.processor))


def test_text_is_a_line_for_each_finding_of_the_json() -> None:
    text, told = invoke("--seconds", "0"), json.loads(invoke("--seconds", "0", "--json").stdout)
    expected, topic = [], None
    for record in told["findings"]:
        if record["topic"] != topic:
            expected.append([f"{(topic := record['topic'])}:"])
        expected.append(f"{record['state']} {record['name']} {record['words']}".split())
    lines = [line if line.endswith(":") else line.split() for line in text.stdout.splitlines()]
    lines = [[line] if isinstance(line, str) else line for line in lines]
    assert lines == [*expected, ["no", "problem", "was", "found"]]
    assert (text.exit_code, told["problems"]) == (0, [])
    assert text.stderr == ""


def test_a_kernel_that_computes_something_else_is_told_and_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = {
        "rms_norm": lambda *given: 1.01 * REFERENCE.functions["rms_norm"](*given),
        "silent": REFERENCE.functions["rms_norm"],
    }
    monkeypatch.setattr(self_test, "preferred", lambda device: replace(cpu.BACKEND, name="broken", functions=functions))
    result = invoke("--json")
    assert result.exit_code == 1
    told = json.loads(result.stdout)
    assert told["problems"] == ["rms_norm (broken)"]
    (finding,) = [finding for finding in told["findings"] if finding["state"] == "problem"]
    assert finding["topic"] == "kernels against the reference"
    assert finding["words"].startswith("WRONG in ")


def test_a_missing_compiler_is_told_and_fails_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(loader, "library_path", lambda level: tmp_path / "nothing.so")
    monkeypatch.setattr(backends, "device", lambda: backends.torch.device("cpu"))
    result = invoke("--seconds", "0")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "problems: compiler"
    assert "no-such-compiler is not found; the C++ operations for CPUs need one once" in result.stdout


def test_a_probe_that_fails_is_told_and_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def unlucky() -> list[Finding]:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(examination, "PROBES", {"machine": (unlucky,)})
    result = invoke("--seconds", "0")
    assert result.exit_code == 1
    assert "unlucky                      could not be found out: ZeroDivisionError: division by zero" in result.stdout


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1", "soon"])
def test_seconds_that_are_none_are_refused(seconds: str) -> None:
    assert invoke(f"--seconds={seconds}").exit_code == 2

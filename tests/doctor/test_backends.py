"""Which kernels can run, which are taken, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paged_backend.doctor import backends
from paged_backend.doctor.finding import Finding
from paged_backend.kernels import cpu, dispatch
from paged_backend.kernels.cpu import loader
from paged_backend.kernels.triton import support


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on a machine that has never compiled the library, and cannot."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for name in ("load", "library", "is_available"):
        # Unpatched afterwards, the functions remember what was loaded before.
        monkeypatch.setattr(loader, name, getattr(loader, name).__wrapped__)
    monkeypatch.setattr(cpu, "is_available", loader.is_available)
    unavailable = "it is compiled on first use, which failed; install a C++ compiler"
    backend = replace(cpu.BACKEND, unavailable=lambda device: unavailable)
    monkeypatch.setitem(dispatch._backends, "cpu", backend)


def only(probe: Callable[[], Iterator[Finding]]) -> Finding:
    (finding,) = probe()
    return finding


def test_the_compiler_is_named_with_its_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho a compiler 1.2\necho more\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert only(backends.compiler) == Finding("compiler", "ok", f"{compiler}: a compiler 1.2")


@pytest.mark.usefixtures("without_a_compiler")
def test_a_compiler_that_is_missed_is_a_problem_with_its_remedy() -> None:
    finding = only(backends.compiler)
    assert finding.state == "problem"
    assert finding.words.startswith("no-such-compiler is not found")
    assert "apt install g++" in finding.words


def test_a_missing_compiler_is_no_problem_once_the_operations_are_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(loader, "library_path", lambda level: tmp_path)
    assert only(backends.compiler).state == "note"


@pytest.mark.usefixtures("without_a_compiler")
def test_what_runs_without_a_compiler_is_the_reference_and_the_reason_is_told() -> None:
    operations = only(backends.cpu_operations)
    assert operations.state == "problem"
    assert "no-such-compiler is not found" in operations.words
    backend = only(backends.attention_backend)
    assert backend.state == "problem"
    assert "auto takes 'reference'" in backend.words
    assert "'cpu' cannot: it is compiled on first use, which failed" in backend.words
    assert only(backends.swaps).state == "note"


def test_where_the_operations_are_kept_is_told() -> None:
    finding = only(backends.cpu_operations)
    assert finding.state == "ok"
    assert finding.words.endswith(f"kept in {loader.library_path(loader.level()).parent}")
    assert loader.library_path(loader.level()).exists()


def test_the_level_that_runs_and_what_would_be_faster_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "running", lambda: "C++ (avx2)")
    monkeypatch.setattr(cpu, "faster", lambda: ("this", "that"))
    assert only(backends.speed).words == "C++ (avx2) runs; faster are this; that"


@pytest.mark.filterwarnings("ignore::paged_backend.kernels.cpu.UnavailableWarning")
@pytest.mark.usefixtures("without_a_compiler")
def test_without_a_compiler_speed_is_no_second_problem() -> None:
    assert not list(backends.speed())


def test_on_a_cpu_auto_takes_the_compiled_operations_and_tries_every_swap() -> None:
    assert "auto takes 'cpu'" in only(backends.attention_backend).words
    assert "layer, mlp, linear, norm, state" in only(backends.swaps).words


def test_on_a_gpu_a_missing_triton_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(backends.triton_kernels).state == "ok"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(support, "available", False)
    assert only(backends.triton_kernels).state == "problem"
    backend = only(backends.attention_backend)
    assert backend.state == "problem"
    assert "auto takes 'reference' on a GPU" in backend.words
    assert "'triton' cannot: Triton is not installed" in backend.words

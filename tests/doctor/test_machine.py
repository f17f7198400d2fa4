"""What is said of a machine follows what the machine says of itself."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from paged_backend.doctor import machine
from paged_backend.doctor.finding import Finding


def only(probe: Callable[[], Iterator[Finding]]) -> Finding:
    (finding,) = probe()
    return finding


@pytest.mark.parametrize(
    ("cores", "quota", "threads", "state", "remedy"),
    [
        (8, None, 8, "ok", ""),
        (8, 16.0, 8, "ok", ""),
        (2, None, 3, "problem", "set OMP_NUM_THREADS=2"),
        (8, 1.5, 8, "problem", "set OMP_NUM_THREADS=2"),
        (8, 1.5, 2, "ok", ""),
    ],
)
def test_more_threads_than_cores_are_a_problem(
    monkeypatch: pytest.MonkeyPatch, cores: int, quota: float | None, threads: int, state: str, remedy: str
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(machine, "cpu_quota", lambda: quota)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    finding = only(machine.threads)
    assert finding.state == state
    assert f"torch takes {threads}, and the process may use {cores} of 64 cores" in finding.words
    assert remedy in finding.words
    assert ("the time of 1.5" in finding.words) == (quota == 1.5)


def test_a_processor_is_named_with_the_instructions_it_has_and_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = "processor : 0\nmodel name\t: Some: CPU\nflags\t\t: fpu avx2 avx512f amx_bf16\n\n"
    (tmp_path / "cpuinfo").write_text(cores * 2)
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(machine, "level", lambda: "avx512")
    finding = only(machine.processor)
    assert finding.state == "ok"
    assert finding.words.startswith("Some: CPU with AVX2, AVX-512, AMX, without AVX512-BF16; ")
    assert "compiled for 'avx512', which leaves AMX to torch" in finding.words
    monkeypatch.setattr(machine, "level", lambda: "plain")
    assert only(machine.processor).state == "note"


def test_memory_is_what_the_control_group_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text(f"MemTotal: {8 << 20} kB\nMemFree: 1 kB\nMemAvailable: {6 << 20} kB\n")
    monkeypatch.setattr(machine, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "memory_limit", lambda: None)
    assert only(machine.memory) == Finding("memory", "ok", "6.0 of 8.0 GiB free")
    monkeypatch.setattr(machine, "memory_limit", lambda: 1 << 29)
    limited = only(machine.memory)
    assert limited.state == "note"
    assert "the control group allows 0.5 GiB" in limited.words


def test_why_there_is_no_gpu_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(machine, "NVIDIA", tmp_path / "version")
    assert only(machine.gpus).words == "none, and torch is built for CPUs alone; models run on the CPU"
    (tmp_path / "version").touch()
    assert "there is an NVIDIA driver, but this torch is built for CPUs alone" in only(machine.gpus).words
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "none that torch sees, which is built for 13.0" in only(machine.gpus).words


def test_every_gpu_is_told_with_its_memory_and_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 2,
        get_device_capability=lambda index: (9, index),
        mem_get_info=lambda index: (3 << 30, 4 << 30),
        get_device_name=lambda index: f"GPU {index}",
    )
    monkeypatch.setattr(torch, "cuda", stand_in)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert [*machine.gpus()] == [
        Finding(f"cuda:{n}", "ok", f"GPU {n}, capability 9.{n}, 3.0 of 4.0 GiB free, CUDA 13.0") for n in (0, 1)
    ]


def test_another_system_than_linux_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(machine.system).state == "ok"
    monkeypatch.setattr(platform, "system", lambda: "Plan9")
    assert only(machine.system).state == "problem"

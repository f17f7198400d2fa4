"""Which kernels can run here, which the engine would take, and why."""

from __future__ import annotations

import shutil
import subprocess
import time
import warnings
from collections.abc import Iterator

import torch

from paged_backend.config import SWAPS
from paged_backend.doctor.finding import Finding, State
from paged_backend.kernels import backends, cpu, preferred
from paged_backend.kernels.cpu import loader
from paged_backend.kernels.dispatch import REFERENCE
from paged_backend.kernels.triton import support

# A compiler that asks for a licence, say, does not answer.
_COMPILER_TIMEOUT_S = 20


def device() -> torch.device:
    """Where the command line puts a model."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def compiler() -> Iterator[Finding]:
    """The C++ compiler that builds the CPU operations."""
    name = loader.compiler()
    path = shutil.which(name)
    if path is None:
        missed = device().type == "cpu" and not loader.library_path(loader.level()).exists()
        yield Finding(
            "compiler",
            "problem" if missed else "note",
            f"{name} is not found; the C++ operations for CPUs need one once: install it, for instance with `apt "
            "install g++`, or name yours in CXX",
        )
        return
    asked = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_COMPILER_TIMEOUT_S)
    said = (asked.stdout or asked.stderr).strip().splitlines() or ["it says no version"]
    state: State = "ok" if asked.returncode == 0 else "problem"
    yield Finding("compiler", state, f"{path}: {said[0]}")


def cpu_operations() -> Iterator[Finding]:
    """Whether the C++ operations are compiled; on a CPU they are compiled now if they are not."""
    path = loader.library_path(loader.level())
    there = path.exists()
    if not there and device().type != "cpu":
        yield Finding("C++ operations", "note", "not compiled yet; they are when a model first runs on a CPU")
        return
    start = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = cpu.is_available()
    if available:
        how = "compiled before" if there else f"compiled just now, in {time.monotonic() - start:.0f} s, once"
        yield Finding("C++ operations", "ok", f"{how}, and kept in {path.parent}")
    else:
        reason = f"{caught[-1].message}" if caught else "they could not be compiled"
        yield Finding("C++ operations", "problem", _shortened(reason))


def speed() -> Iterator[Finding]:
    """What would be faster on this machine, for models on a CPU."""
    if device().type == "cpu" and cpu.is_available():
        yield Finding("speed", "ok", f"{cpu.running()} runs; faster are {'; '.join(cpu.faster())}")


def triton_kernels() -> Iterator[Finding]:
    """Whether Triton is there, and could run on this device."""
    on = device()
    reason = support.unavailable(on)
    if reason is None:
        yield Finding("Triton", "ok", f"runs on {on} as {support.architecture(on)}")
    elif on.type == "cuda":
        yield Finding("Triton", "problem", f"{reason}, and plain torch, which is slower, runs in its place")
    else:
        yield Finding("Triton", "ok", f"{'installed' if support.available else reason}; it is used on a GPU alone")


def attention_backend() -> Iterator[Finding]:
    """What ``attention_backend="auto"`` is on this device, and why."""
    on = device()
    backend = preferred(on)
    where = torch.cuda.get_device_name(on) if on.type == "cuda" else "a CPU"
    if backend is not REFERENCE:
        yield Finding("attention backend", "ok", f"auto takes {backend.name!r}, the first that can run on {where}")
        return
    reasons = [
        f"{other.name!r} cannot: {other.unavailable(on)}" for other in backends() if on.type in other.devices
    ] or ["no other is for such a device"]
    yield Finding(
        "attention backend",
        "problem",
        f"auto takes 'reference' on {where}, plain torch and several times slower; {'; '.join(reasons)}",
    )


def swaps() -> Iterator[Finding]:
    """What ``optimize="auto"`` would try to replace in a model."""
    on = device()
    if on.type != "cpu":
        yield Finding("optimize", "ok", "auto replaces nothing on a GPU: its replacements are for CPUs")
    elif preferred(on) is not cpu.BACKEND:
        yield Finding("optimize", "note", "auto replaces nothing: the C++ operations are not in use")
    else:
        yield Finding(
            "optimize",
            "ok",
            f"auto tries {', '.join(SWAPS)} in this order, and keeps what computes the same; rearranged weights may "
            "take half of the free memory",
        )


def _shortened(reason: str, longest: int = 600) -> str:
    """A compiler may say thousands of lines; the first and the last tell most."""
    return reason if len(reason) <= longest else f"{reason[: longest // 2]} ... {reason[-longest // 2 :]}"

"""The machine: system, processor, threads, memory and GPUs."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import torch

from paged_backend.doctor.control_group import cpu_quota, memory_limit
from paged_backend.doctor.finding import Finding
from paged_backend.kernels.cpu.loader import level

CPUINFO = Path("/proc/cpuinfo")
MEMINFO = Path("/proc/meminfo")
NVIDIA = Path("/proc/driver/nvidia/version")
GIB = 2**30
# Flags of a processor, and what they are called.
FEATURES = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_bf16": "AVX512-BF16",
    "amx_bf16": "AMX",
    "asimd": "NEON",
    "sve": "SVE",
}
# Those that tell on a processor that lacks them.
_WANTED = {"x86_64": ("AVX2", "AVX-512", "AVX512-BF16", "AMX"), "AMD64": ("AVX2", "AVX-512", "AVX512-BF16", "AMX")}


def system() -> Iterator[Finding]:
    """The operating system, which should be Linux."""
    try:
        name = platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        name = platform.system()
    words = f"{name}, {platform.system()} {platform.release()}, {platform.machine()}"
    if platform.system() == "Linux":
        yield Finding("system", "ok", words)
    else:
        yield Finding("system", "problem", f"{words}; paged_backend is tested on Linux alone")


def processor() -> Iterator[Finding]:
    """What the processor is called, and which vector instructions the C++ operations use of those that it has."""
    lines = dict(line.partition(":")[::2] for line in reversed(CPUINFO.read_text().splitlines()))
    values = {key.strip(): value.strip() for key, value in lines.items()}
    name = values.get("model name") or platform.processor() or "unnamed"
    flags = set(values.get("flags", values.get("Features", "")).split())
    has = [words for flag, words in FEATURES.items() if flag in flags]
    lacks = [words for words in _WANTED.get(platform.machine(), ()) if words not in has]
    words = f"{name} with {', '.join(has) or 'no vector instructions that are known here'}"
    if lacks:
        words += f", without {', '.join(lacks)}"
    words += f"; the C++ operations are compiled for {level()!r}"
    if "AMX" in has:
        words += ", which leaves AMX to torch"
    slow = level() == "plain" and platform.machine() in _WANTED
    yield Finding("processor", "note" if slow else "ok", f"{words}{', which is slow' if slow else ''}")


def threads() -> Iterator[Finding]:
    """The threads that torch takes against the cores that the process may use."""
    in_all, quota = os.cpu_count() or 1, cpu_quota()
    cores = allowed = len(os.sched_getaffinity(0))
    limit = f"{cores} of {in_all} cores"
    if quota is not None and quota < cores:
        allowed = math.ceil(quota)
        limit += f", of which its control group allows the time of {quota:g}"
    taken = torch.get_num_threads()
    words = f"torch takes {taken}, and the process may use {limit}"
    if (said := os.environ.get("OMP_NUM_THREADS")) is not None:
        words += f"; OMP_NUM_THREADS={said}"
    if taken <= allowed:
        yield Finding("threads", "ok", words)
    else:
        yield Finding(
            "threads",
            "problem",
            f"{words}; threads that share a core are slower than one thread: set OMP_NUM_THREADS={allowed}",
        )


def memory() -> Iterator[Finding]:
    """Memory in all and free, and what the process is limited to."""
    lines = dict(line.partition(":")[::2] for line in MEMINFO.read_text().splitlines())
    in_all, free = (int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    words = f"{free / GIB:.1f} of {in_all / GIB:.1f} GiB free"
    limit = memory_limit()
    if limit is not None and limit < in_all:
        words += f", of which the control group allows {limit / GIB:.1f} GiB"
        free = min(free, limit)
    few = free < GIB
    yield Finding("memory", "note" if few else "ok", f"{words}{'; less than most models take' if few else ''}")


def gpus() -> Iterator[Finding]:
    """Every GPU that torch sees, or why there is none."""
    built = torch.version.cuda or torch.version.hip
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(index)
            free, in_all = torch.cuda.mem_get_info(index)
            yield Finding(
                f"cuda:{index}",
                "ok",
                f"{torch.cuda.get_device_name(index)}, capability {major}.{minor}, {free / GIB:.1f} of "
                f"{in_all / GIB:.1f} GiB free, {'ROCm' if torch.version.hip else 'CUDA'} {built}",
            )
    elif built is not None:
        yield Finding("GPU", "note", f"none that torch sees, which is built for {built}; models run on the CPU")
    elif NVIDIA.exists():
        yield Finding(
            "GPU",
            "note",
            "there is an NVIDIA driver, but this torch is built for CPUs alone; to use the GPU, install torch for CUDA",
        )
    else:
        yield Finding("GPU", "ok", "none, and torch is built for CPUs alone; models run on the CPU")

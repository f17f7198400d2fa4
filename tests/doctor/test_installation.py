"""Versions outside of what the package was made for, broken plugins and a missing sample model are told."""

from __future__ import annotations

import sys
from email.message import Message
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

from paged_backend.doctor import installation
from paged_backend.doctor.finding import Finding


def versions(monkeypatch: pytest.MonkeyPatch, **other: str | None) -> dict[str, Finding]:
    """What is said of versions where those of ``other`` are other ones, or none."""
    real = installation.version

    def version(name: str) -> str:
        if name in other:
            if (found := other[name]) is None:
                raise PackageNotFoundError(name)
            return found
        return real(name)

    monkeypatch.setattr(installation, "version", version)
    return {finding.name: finding for finding in installation.versions()}


def test_what_is_installed_here_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    found = versions(monkeypatch)
    assert {"paged-backend", "Python", "torch", "transformers", "accelerate", "pluggy", "typer"} <= found.keys()
    assert "problem" not in {finding.state for finding in found.values()}
    assert "pytest" not in found


def test_a_version_out_of_range_is_a_problem_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    found = versions(monkeypatch, transformers="4.57.1", torch="2.9.0.dev20260101+cu130")
    assert found["transformers"].state == "problem"
    assert found["transformers"].words.startswith("4.57.1 is not in <6,>=5.2")
    assert "pip install 'transformers<6,>=5.2'" in found["transformers"].words
    assert found["torch"].state == "ok"


def test_what_is_needed_and_missing_is_a_problem_and_an_extra_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    found = versions(monkeypatch, pluggy=None, llguidance=None)
    assert found["pluggy"].state == "problem"
    assert "pip install 'pluggy>=1.5'" in found["pluggy"].words
    assert found["extras"].state == "note"
    assert "llguidance (extra 'structured')" in found["extras"].words


def test_an_extra_that_consists_of_others_is_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    requires = ["pluggy>=1.5", "paged-backend[cli]; extra == 'serve'"]
    metadata = Message()
    metadata["Provides-Extra"] = "serve"
    own = SimpleNamespace(version="0.1.0", metadata=metadata, requires=requires)
    monkeypatch.setattr(installation, "distribution", lambda name: own)
    assert [finding.name for finding in installation.versions()] == ["paged-backend", "Python", "pluggy"]


def test_a_broken_plugin_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [*installation.plugins()] == [Finding("plugins", "ok", "the built-in ones alone")]
    (tmp_path / "unlucky.py").write_text("raise ImportError('no such thing')")
    info = tmp_path / "unlucky-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: unlucky\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[paged_backend]\nunlucky-plugin = unlucky\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "unlucky", raising=False)
    (finding,) = installation.plugins()
    assert finding.state == "problem"
    assert "plugin 'unlucky-plugin' (unlucky) cannot be loaded" in finding.words
    assert finding.words.endswith("(unlucky 1.2)")


def test_the_sample_model_is_looked_for_and_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_BACKEND_CACHE", str(tmp_path))
    monkeypatch.setattr(installation.sample, "fetch", None)
    (finding,) = installation.sample_model()
    assert finding.state == "note"
    folder = installation.sample.folder()
    folder.mkdir()
    (folder / "config.json").touch()
    (finding,) = installation.sample_model()
    assert finding.state == "ok"
    assert str(folder) in finding.words

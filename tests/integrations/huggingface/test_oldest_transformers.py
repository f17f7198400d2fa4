"""The oldest transformers that pyproject.toml allows serves the common families as the newest does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import transformers
import version_smoke

ROOT = Path(__file__).parents[3]
SMOKE = Path(version_smoke.__file__)


def oldest_version() -> str:
    """The lower bound of the requirement, as a full version."""
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (bound,) = (re.fullmatch(r"transformers>=(\d+\.\d+),<6", text) for text in requirements if "transformers" in text)
    assert bound is not None
    return f"{bound[1]}.0"


def install(folder: Path, *requirements: str) -> None:
    """Put distributions and nothing they need into a folder; a failure to download fails the test and says so."""
    # Compiling every module takes longer than the few that are imported.
    options = ["--quiet", "--no-deps", "--no-compile", "--target", str(folder)]
    command = [sys.executable, "-m", "pip", "install", *options, *requirements]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        pytest.fail(f"{' '.join(requirements)} could not be downloaded, so nothing was tested: {result.stderr[-600:]}")


def run_smoke(*arguments: str, path: str = "") -> list[str]:
    """The lines that the smoke program prints; ``path`` goes before the installed distributions."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH")]))}
    result = subprocess.run([sys.executable, SMOKE, *arguments], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout.splitlines()


EQUAL = [f"{family} equals stock" for family in version_smoke.FAMILIES]


@pytest.mark.slow
def test_the_oldest_transformers_gives_stocks_tokens(tmp_path: Path) -> None:
    version = oldest_version()
    # With the last versions of what it needs that it accepts; the rest it shares with the newest.
    install(tmp_path, f"transformers=={version}", "huggingface_hub>=1.3,<2", "tokenizers>=0.22,<=0.23.0")
    assert run_smoke(version, "past_key_values", path=str(tmp_path)) == EQUAL


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("5.0.0", "past_key_values"), "found transformers"), ((transformers.__version__, "kv"), "is not called kv")],
)
def test_the_program_says_when_it_finds_another_version_or_spelling(monkeypatch, arguments, said) -> None:
    monkeypatch.setattr(sys, "argv", ["version_smoke.py", *arguments])
    with pytest.raises(AssertionError, match=said):
        version_smoke.main()


def test_the_readme_states_the_oldest_transformers() -> None:
    oldest = oldest_version().removesuffix(".0")
    assert f"transformers {oldest} or newer" in " ".join((ROOT / "README.md").read_text().split())

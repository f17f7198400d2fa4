"""The README's code runs, in its order, and its policy does what it says."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import write_model
from tiny_models import make_tiny, save_tiny

import paged_backend
from paged_backend import Engine, SamplingParams
from paged_backend.policy.plugin_manager import PluginManager

README = (Path(__file__).parents[2] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def policy_block() -> str:
    (block,) = [block for block in blocks("python") if "register_schedulers" in block]
    return block


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny(tmp_path_factory.mktemp("tiny"))
    # Beside it, as the README names them.
    write_model(folder.with_suffix(".gguf"), make_tiny("llama"), {})
    return folder


def test_every_python_block_runs_after_those_before_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "path/to/model" in README
    namespace: dict[str, Any] = {}
    try:
        for block in blocks("python"):
            exec(compile(block.replace("path/to/model", str(folder)), "README.md", "exec"), namespace)
        model, inputs, tokens = namespace["model"], namespace["inputs"], namespace["tokens"]
        assert torch.equal(tokens, model.generate(**inputs, max_new_tokens=32))
    finally:
        paged_backend.uninstall()
    printed = capsys.readouterr().out
    assert len(re.findall(r"^(?:length|stop) ", printed, flags=re.MULTILINE)) == 2
    assert re.search(r"^\d+ \[\d+\]$", printed, flags=re.MULTILINE)


def test_the_policy_starts_short_prompts_first_under_its_installed_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (entry_points,) = blocks("toml")
    points = tomllib.loads(entry_points)["project"]["entry-points"]["paged_backend"]
    info = tmp_path / "shortest_first-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shortest-first\nVersion: 1.0\n")
    lines = [f"{name} = {module}" for name, module in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[paged_backend]", *lines]))
    (tmp_path / "shortest_first.py").write_text(policy_block())
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "shortest_first", raising=False)

    finished = {}
    for scheduler in ("fifo", "shortest_first"):
        with Engine.from_pretrained(str(folder), scheduler=scheduler, max_num_seqs=1) as engine:
            for length in (30, 10, 20):
                engine.add_request([5] * length, SamplingParams(max_tokens=2), request_id=str(length))
            ended = []
            while engine.has_unfinished_requests():
                ended += [output.request_id for output in engine.step() if output.finished]
        finished[scheduler] = ended
    assert finished == {"fifo": ["30", "10", "20"], "shortest_first": ["10", "20", "30"]}


def test_the_policy_takes_twenty_lines_at_most() -> None:
    assert len(policy_block().splitlines()) <= 20


def test_every_scheduler_of_the_table_can_be_named() -> None:
    (table,) = re.findall(r"^\| scheduler \|.*?\n\n", README, flags=re.DOTALL | re.MULTILINE)
    names = set(re.findall(r"^\| `(\w+)`", table, flags=re.MULTILINE))
    assert len(names) >= 5
    assert names <= set(PluginManager(load_entry_points=False).names("scheduler"))


def test_every_file_the_readme_points_to_exists() -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert targets
    for target in targets:
        assert (Path(__file__).parents[2] / target).exists(), target

"""What a model can do, read off its files."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from paged_backend.integrations.langchain.profiles import profile_of


def folder(path: Path, template: str | None = None, **config: int) -> str:
    (path / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
    if template is not None:
        (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return str(path)


def test_a_folder_without_a_model_has_no_profile(tmp_path: Path):
    assert profile_of(str(tmp_path), None, None) is None


@pytest.mark.parametrize("name", ["max_position_embeddings", "n_positions"])
def test_the_length_is_the_models_under_either_name(tmp_path: Path, name: str):
    profile = profile_of(folder(tmp_path, **{name: 77}), None, None)
    assert profile["max_input_tokens"] == profile["max_output_tokens"] == 77


def test_a_length_that_is_not_told_is_left_out(tmp_path: Path):
    assert "max_input_tokens" not in profile_of(folder(tmp_path), None, None)


def test_the_template_tells_of_tools_and_reasoning(tmp_path: Path):
    profile = profile_of(folder(tmp_path, "{{ tools }}</think>"), None, None)
    assert (profile["tool_calling"], profile["reasoning_output"]) == (True, True)
    plain = profile_of(str(tmp_path), "{{ messages }}", None)
    assert (plain["tool_calling"], plain["reasoning_output"]) == (False, False)


def test_a_template_in_a_file_of_its_own_goes_first(tmp_path: Path):
    path = folder(tmp_path, "{{ messages }}")
    (tmp_path / "chat_template.jinja").write_text("{{ tools }}")
    assert profile_of(path, None, None)["tool_calling"] is True


def test_an_engine_that_is_there_is_asked_instead_of_files():
    tokenizer = SimpleNamespace(chat_template="{{ tools }}")
    engine = SimpleNamespace(given_engine=SimpleNamespace(tokenizer=tokenizer, max_model_len=55))
    profile = profile_of("nowhere", None, engine)
    assert (profile["name"], profile["max_input_tokens"], profile["tool_calling"]) == ("nowhere", 55, True)

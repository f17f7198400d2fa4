"""Lines of prompts: each that cannot be used is refused by its number, before anything is answered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from generate_command import generate, records
from tiny_models import save_tiny

from paged_backend.cli.lines import Lines, params_from_json
from paged_backend.errors import ConfigError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), max_positions=128))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("what is this?", "line 1 is not JSON"),
        ('{"text": "a"}', 'line 1 is no JSON object with "prompt"'),
        ('{"prompt": "a", "params": 3}', '"params" of line 1 must be a JSON object'),
        ('{"prompt": "a", "options": []}', '"options" of line 1 must be a JSON object'),
        (
            '{"prompt": "a", "options": {"prompt": 1}}',
            "\"options\" of line 1 has the unknown key 'prompt'; it may have",
        ),
        (
            '{"prompt": "a", "options": {"lockstep": 1}}',
            "'lockstep'; it may have request_id, priority, deadline_s, timeout_s, queue_timeout_s, client_id, "
            "cache_salt, metadata\n",
        ),
    ],
)
def test_json_lines_that_cannot_be_used_are_refused(folder, line, message):
    result = generate(folder, "--jsonl", stdin=line)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "a"}\n\n\xff\n', "line 3 of"),
        (b'{"prompt": "a"}\n\n\xff\n', "prompts.jsonl is not UTF-8: b'\\xff\\n'"),
        (b'{"prompt": "a"}\n\nwhat is this?\n', "line 3 is not JSON"),
        (b"[" * 100_000, "line 1 is not JSON"),
        (b'{"prompt": "a", "id": 1}\n\n{"prompt": "b", "id": 1}\n', "lines 1 and 3 have the same id 1"),
        (b'{"prompt": "a", "id": [1]}\n', '"id" of line 1 must be a text or a whole number'),
        (b'{"prompt": "a", "id": true}\n', '"id" of line 1 must be a text or a whole number'),
        (
            b'{"prompt": "a"}\n{"prompt": "b", "parms": {}}\n',
            "line 2 has the unknown key 'parms'; it may have prompt, params, options, id",
        ),
    ],
)
def test_a_file_with_a_line_that_cannot_be_used_is_refused_before_the_model_is_loaded(tmp_path, content, message):
    path, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    path.write_bytes(content)
    result = generate("no such model", path, "--output", output)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not output.exists()


def test_input_that_turns_out_binary_is_told_in_words(folder):
    result = generate(folder, stdin=b"hello\n" + bytes(range(256)))
    assert result.exit_code == 2
    assert "line 3 of <stdin> is not UTF-8" in result.stderr


@pytest.mark.parametrize("key", ["x", "-1", "1.5", "", "007", "٣", "9" * 5000])
def test_a_key_of_logit_bias_that_is_no_token_id_fails_its_prompt_alone(folder, key):
    lines = [{"prompt": "a", "params": {"logit_bias": {key: 1.0}}}, {"prompt": "b"}]
    result = generate(folder, "--jsonl", stdin="\n".join(map(json.dumps, lines)))
    rows = records(result.stdout)
    assert rows[0]["error"].startswith('logit_bias must map token ids to numbers, as in {"42": -1.5}, got the key')
    assert "text" in rows[1]


@pytest.mark.parametrize("key", ["max_token", "logits_processors"])
def test_a_parameter_that_a_line_cannot_have_fails_its_prompt_alone_and_what_it_can_have_is_listed(folder, key):
    lines = [{"prompt": "a", "params": {key: [1]}}, {"prompt": "b"}]
    result = generate(folder, "--jsonl", stdin="\n".join(map(json.dumps, lines)))
    rows = records(result.stdout)
    assert rows[0]["error"].startswith(f"\"params\" has the unknown key '{key}'; it may have max_tokens, ")
    assert rows[0]["error"].endswith("grammar")
    assert "text" in rows[1]


def read(
    path: Path, content: str | bytes, jsonl: bool | None = None, **params: Any
) -> list[tuple[int, dict[str, Any]]]:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with Lines(path, jsonl, params) as lines:
        assert lines.count() == len(list(lines))
        assert lines.count() is not None
        return list(lines)


@pytest.mark.parametrize(("name", "jsonl", "is_text"), [("a.txt", None, True), ("a.jsonl", None, False)])
def test_the_files_name_tells_whether_lines_are_texts_unless_it_is_said(tmp_path, name, jsonl, is_text):
    line = '{"prompt": "a"}'
    (prompt,) = [prompt["prompt"] for _, prompt in read(tmp_path / name, line)]
    assert prompt == (line if is_text else "a")
    (prompt,) = [prompt["prompt"] for _, prompt in read(tmp_path / name, line, jsonl=is_text)]
    assert prompt == ("a" if is_text else line)


def test_empty_lines_are_passed_over_and_prompts_are_numbered_without_them(tmp_path):
    assert read(tmp_path / "a.txt", "\ufeff one\r\n\n  \ntwo \n") == [
        (0, {"prompt": " one", "params": {}}),
        (1, {"prompt": "two ", "params": {}}),
    ]


def test_params_of_a_line_go_before_those_of_the_command(tmp_path):
    lines = '{"prompt": [5, 6], "params": {"seed": 2}}\n{"prompt": "b", "id": "mine"}'
    assert read(tmp_path / "a.jsonl", lines, seed=1, top_k=3) == [
        (0, {"prompt": [5, 6], "params": {"seed": 2, "top_k": 3}}),
        (1, {"prompt": "b", "id": "mine", "params": {"seed": 1, "top_k": 3}}),
    ]


def test_a_file_that_is_not_there_is_told_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"the prompts .*nothing.txt cannot be read: No such file"):
        Lines(tmp_path / "nothing.txt", None, {})


def test_token_ids_are_read_from_the_keys_of_a_bias():
    assert params_from_json({"logit_bias": {"7": 1.5, "0": -2}, "seed": 3}) == {
        "logit_bias": {7: 1.5, 0: -2},
        "seed": 3,
    }
    assert params_from_json({"logit_bias": 5}) == {"logit_bias": 5}

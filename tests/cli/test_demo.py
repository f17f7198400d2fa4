"""The demo: both ways asked for the same, measured as the table says, and a wrong token never passed over."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.progress import Progress
from tiny_models import save_tiny
from tiny_tokenizers import byte_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel
from typer.testing import CliRunner, Result

import paged_backend
from paged_backend.cli import demo
from paged_backend.cli.app import app
from paged_backend.cli.prompts import PROMPTS

TEXTS = ["Short.", "A prompt that is somewhat longer than the first one.", "Two words"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def model(folder: Path) -> Any:
    yield (model := AutoModelForCausalLM.from_pretrained(folder))
    paged_backend.release(model)
    paged_backend.uninstall()


@pytest.fixture
def inputs() -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.padding_side = "left"
    return tokenizer(TEXTS, return_tensors="pt", padding=True)


def options(model: PreTrainedModel, **more: Any) -> dict[str, Any]:
    return {"do_sample": False, "pad_token_id": model.config.pad_token_id, "max_new_tokens": 9, **more}


def run_command(folder: Path, tmp_path: Path, *more: str) -> Result:
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps(TEXTS))
    arguments = ["demo", "--model", str(folder), "--prompts", str(file), "--max-new-tokens", "12", *more]
    result = CliRunner(env={"COLUMNS": "160"}).invoke(app, arguments)
    paged_backend.uninstall()
    return result


def test_the_command_prints_answers_and_a_comparison_and_succeeds(folder: Path, tmp_path: Path) -> None:
    result = run_command(folder, tmp_path, "--threads", "1")
    assert result.exit_code == 0, result.output
    short, long = (len(f"user: {text}\nassistant:") for text in (min(TEXTS, key=len), max(TEXTS, key=len)))
    assert (
        f"3 prompts of {short} to {long} tokens, up to 12 new tokens each, greedy, float32, on the CPU with 1 threads"
        in result.output
    )
    assert all(f"─ {text} ─" in result.output for text in TEXTS)
    assert re.search(r"Every greedy token agrees: \d+ tokens of 3 prompts", result.output)
    for name in ("tokens a second", "mean time to finish", "P99 time to finish", "KV memory reserved"):
        assert re.search(rf"{name} +│ +[\d.]+ \S+ +│ +[\d.]+ \S+ +│ +[\d.]+ │", result.output), name


def test_json_holds_the_numbers_of_both_and_leaves_the_words_to_standard_error(folder: Path, tmp_path: Path) -> None:
    result = run_command(folder, tmp_path, "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert (told["num_prompts"], told["agree"], told["differences"]) == (3, True, [])
    assert told["stock"].keys() == told["paged"].keys()
    assert told["stock"]["num_tokens"] == told["paged"]["num_tokens"] > 0
    for numbers in (told["stock"], told["paged"]):
        assert numbers["tokens_per_s"] == pytest.approx(numbers["num_tokens"] / numbers["seconds"])
        assert numbers["filled_share"] == pytest.approx(numbers["filled_bytes"] / numbers["reserved_bytes"])
    assert "Every greedy token agrees" in result.stderr


def test_a_token_that_differs_is_told_with_its_margin_and_fails_the_command(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_paged = demo.run_paged

    def with_a_wrong_token(*args: Any) -> demo.Run:
        run = run_paged(*args)
        tokens = run.tokens.clone()
        tokens[1, 3] = (tokens[1, 3] + 1) % 256
        return dataclasses.replace(run, tokens=tokens)

    monkeypatch.setattr(demo, "run_paged", with_a_wrong_token)
    result = run_command(folder, tmp_path)
    assert result.exit_code == 1
    told = json.loads(run_command(folder, tmp_path, "--json").stdout)
    assert not told["agree"]
    assert [(each["prompt"], each["token"]) for each in told["differences"]] == [(1, 3)]
    assert told["differences"][0]["margin"] > 0
    assert re.search(
        r"Prompt 1 differs from new token 3 on, where stock's best logit leads by \d\.\de[-+]\d\d", result.output
    )
    assert "Every greedy token agrees" not in result.output


def test_the_margin_is_that_of_the_position_that_differs(model: PreTrainedModel, inputs: Any) -> None:
    stock = model.generate(**inputs, **options(model), output_logits=True, return_dict_in_generate=True)
    new_tokens = stock.sequences[:, inputs["input_ids"].shape[1] :]
    for row, position in [(0, 0), (2, 5)]:
        best, second = stock.logits[position][row].topk(2).values.tolist()
        assert demo.top_two_margin(model, inputs, new_tokens, row, position) == pytest.approx(best - second, abs=1e-4)


def test_differences_name_the_first_position_of_each_row_that_is_not_equal() -> None:
    stock = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    assert demo.differences(stock, stock.clone()) == {}
    assert demo.differences(stock, torch.tensor([[1, 2, 3], [4, 0, 0], [0, 8, 9]])) == {1: 1, 2: 0}
    assert demo.differences(stock, stock[:, :2]) == {0: 2, 1: 2, 2: 2}


def test_tokens_after_the_end_of_a_row_are_not_counted(model: PreTrainedModel, inputs: Any) -> None:
    free = demo.run_stock(model, inputs, options(model))
    model.generation_config.eos_token_id = int(free.tokens[1, 2])
    run = demo.run_stock(model, inputs, options(model))
    (first, *_), *_ = (run.tokens[1] == free.tokens[1, 2]).nonzero().tolist()
    lengths = [row.tolist().index(free.tokens[1, 2]) + 1 if free.tokens[1, 2] in row else 9 for row in free.tokens]
    assert lengths[1] == first + 1 < 9
    assert run.num_tokens == sum(lengths)


def test_stock_memory_is_the_padded_cache_and_what_of_it_is_no_padding(model: PreTrainedModel, inputs: Any) -> None:
    run = demo.run_stock(model, inputs, options(model, eos_token_id=[]) | {"min_new_tokens": 9})
    rows, width = inputs["input_ids"].shape
    config = model.config
    token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert run.reserved_bytes == rows * (width + 8) * token_bytes
    assert run.filled_bytes == (int(inputs["attention_mask"].sum()) + rows * 8) * token_bytes
    assert run.finish_times == [run.seconds] * rows


def test_the_watcher_sees_every_request_finish_and_the_cache_fill(model: PreTrainedModel, inputs: Any) -> None:
    with Progress(disable=True) as bar:
        watcher = demo.Watcher(bar)
        watcher.expect(len(TEXTS))
        run = demo.run_paged(model, inputs, options(model), watcher)
        (task,) = [task for task in bar.tasks if task.visible]
    assert task.finished
    assert task.fields["tokens"] == run.num_tokens
    assert len(run.finish_times) == len(TEXTS)
    assert all(0 < seconds <= run.seconds for seconds in run.finish_times)
    assert 0 < run.filled_bytes <= run.reserved_bytes


def test_the_prompts_differ_much_in_length() -> None:
    lengths = [len(prompt.split()) for prompt in PROMPTS]
    assert len(set(PROMPTS)) == len(PROMPTS) == 16
    assert max(lengths) > 30 * min(lengths)

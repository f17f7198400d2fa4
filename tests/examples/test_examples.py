"""Every example runs as its users run it, and does what it says."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from server_checks import running
from tiny_models import save_tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

import paged_backend
from paged_backend.integrations.openai_server import create_app

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def run_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., str]]:
    """Run an example's file as a program, in this process, which has imported already what each would import anew."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    yield run
    paged_backend.uninstall()


def constant(name: str, of: str) -> list:
    """A literal of an example, read without running it."""
    for node in ast.parse((EXAMPLES / of).read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise KeyError(name)


def test_generate_prints_what_stock_generate_answers(tiny_folder: str, run_example: Callable[..., str]) -> None:
    prompts = constant("PROMPTS", of="generate.py")
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    expected = []
    for prompt in prompts:
        tokens = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=8, do_sample=False)
        expected.append(tokenizer.decode(tokens[0], skip_special_tokens=True))
    output = run_example("generate.py", "--model", tiny_folder, "--max-new-tokens", "8")
    assert output.split(f"\n{'-' * 40}\n") == [*expected, ""]


def test_engine_loop_serves_requests_that_join_while_others_run(
    tiny_folder: str, run_example: Callable[..., str]
) -> None:
    arrivals = constant("ARRIVALS", of="engine_loop.py")
    output = run_example("engine_loop.py", "--model", tiny_folder, "--max-tokens", "12")
    for step, prompt in arrivals:
        assert f"step {step:3}  request " in output
        assert f"joins: {prompt!r}" in output
    assert output.count(" ends (") == len(arrivals)
    assert output.index("joins: " + repr(arrivals[1][1])) < output.index(" ends (")


def test_map_documents_answers_every_document_in_one_batch(tiny_folder: str, run_example: Callable[..., str]) -> None:
    output = run_example("map_documents.py", "--model", tiny_folder, "--max-tokens", "3").splitlines()
    summary = re.fullmatch(r"50 documents in (\d+) steps, (\d+) at once", output[-1])
    assert summary is not None
    assert int(summary[2]) > 10
    assert int(summary[1]) < 50
    assert sum(" is a town that sells " in line for line in output) == 50


def test_custom_policy_answers_whoever_asks_for_least_first(tiny_folder: str, run_example: Callable[..., str]) -> None:
    output = run_example("custom_policy.py", "--model", tiny_folder)
    assert re.findall(r"^(\d+) tokens: ", output, re.MULTILINE) == ["4", "12", "24"]


def test_langchain_chat_answers_streams_and_reuses_the_first_turn(
    tiny_folder: str, run_example: Callable[..., str]
) -> None:
    questions = constant("QUESTIONS", of="langchain_chat.py")
    output = run_example("langchain_chat.py", "--model", tiny_folder)
    assert all(f"{question} -> " in output for question in questions)
    assert "streamed: " in output
    assert int(re.search(r"(\d+) of them from the prefix cache", output)[1]) >= 16
    assert re.search(r"structured: title=(['\"]).*\1 stars=[1-5]", output, flags=re.DOTALL)


def test_langchain_agent_calls_its_tool_for_every_question(tiny_folder: str, run_example: Callable[..., str]) -> None:
    questions = constant("QUESTIONS", of="langchain_agent.py")
    output = run_example("langchain_agent.py", "--model", tiny_folder, "--force", "--max-tokens", "64")
    for question in questions:
        assert f"user: {question}\n  calls get_weather({{'city': " in output
    assert output.count("  tool: ") == len(questions)


def test_langchain_throughput_prints_both_and_their_ratio(tiny_folder: str, run_example: Callable[..., str]) -> None:
    output = run_example("langchain_throughput.py", "--model", tiny_folder, "--num-chats", "4", "--max-tokens", "8")
    assert re.search(r"ChatPaged.batch .*\nChatHuggingFace.batch .*\nratio \d+\.\d$", output.strip())


def test_openai_client_asks_a_server_in_each_of_the_ways(tiny_folder: str, run_example: Callable[..., str]) -> None:
    questions = constant("QUESTIONS", of="openai_client.py")
    with paged_backend.Engine.from_pretrained(tiny_folder) as engine, running(create_app(engine)) as server:
        output = run_example("openai_client.py", "--base-url", server.url, "--max-tokens", "8")
    assert all(f"{question} -> " in output for question in questions)
    assert "streamed: " in output
    assert re.search(r"calls get_weather\(\{'city': ", output)
    assert re.search(r"structured: title=(['\"]).*\1 stars=[1-5]", output, flags=re.DOTALL)


# Processes of Ray's own start, load everything anew and end.
@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_ray_data_answers_every_row_and_goes_on_where_it_was_stopped(
    tiny_folder: str, run_example: Callable[..., str], tmp_path: Path
) -> None:
    pytest.importorskip("ray.data", reason="Ray Data is not installed (extra ray)")
    arguments = [str(tmp_path), "--model", tiny_folder, "--engines", "1", "--max-tokens", "2", "--rows"]
    assert "4 rows answered, 4 different ones: {'length': 4}" in run_example("ray_data.py", *arguments, "4")
    # What is answered already is left out.
    assert "10 rows answered, 10 different ones: {'length': 10}" in run_example("ray_data.py", *arguments, "10")


def test_every_example_is_run_here() -> None:
    source = Path(__file__).read_text()
    for example in EXAMPLES.glob("*.py"):
        assert f'run_example("{example.name}"' in source

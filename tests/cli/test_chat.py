"""paged-backend chat: a conversation that survives Ctrl-C and grows beyond the model's length."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import save_tiny
from tiny_tokenizers import byte_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from paged_backend import Engine, SamplingParams
from paged_backend.cli.app import app
from paged_backend.cli.chat import Conversation
from paged_backend.service.async_engine import AsyncEngine
from paged_backend.service.handle import Delta, DeltaStream


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), max_positions=256))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, folder: str) -> list[str]:
    """The prompts that reach the engine, as text."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts: list[str] = []
    submit = AsyncEngine.submit

    def noting(self, token_ids, params):
        handle = submit(self, token_ids, params)
        texts.append(tokenizer.decode(token_ids))
        return handle

    monkeypatch.setattr(AsyncEngine, "submit", noting)
    return texts


def chat(folder: str, said: list[str], *arguments: str) -> Result:
    options = ["--model", folder, "--kv-cache-memory", "4MiB", "--temperature", "0", "--threads", "1"]
    runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"})
    return runner.invoke(app, ["chat", *options, *arguments], input="".join(line + "\n" for line in said))


def greedy_answer(folder: str, prompt: str, max_tokens: int) -> str:
    with Engine.from_pretrained(folder, kv_cache_memory="4MiB") as engine:
        params = SamplingParams(max_tokens=max_tokens, stop_token_ids=[engine.tokenizer.eos_token_id])
        (output,) = engine.generate(prompt, params)
        return output.text


def test_an_answer_is_what_the_engine_gives_to_the_chat_template(folder, asked):
    result = chat(folder, ["hello"], "--max-tokens", "6")
    assert result.exit_code == 0, result.output
    assert asked == ["user: hello\nassistant:"]
    # A terminal's carriage returns and control characters aside.
    answer = greedy_answer(folder, asked[0], 6)
    assert re.sub(r"\s", "", answer) in re.sub(r"\s", "", result.output)


def test_an_answer_ends_with_the_token_that_the_template_writes_behind_one(tmp_path: Path, monkeypatch) -> None:
    model = str(save_tiny(tmp_path))
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<pad>{% endfor %}"
    tokenizer.save_pretrained(model)
    params, submit = [], AsyncEngine.submit
    monkeypatch.setattr(AsyncEngine, "submit", lambda *args: (params.append(args[2]), submit(*args))[1])
    assert chat(model, ["hello"], "--max-tokens", "2").exit_code == 0
    assert set(params[0]["stop_token_ids"]) == {tokenizer.eos_token_id, tokenizer.pad_token_id}


def test_the_conversation_goes_into_the_next_question(folder, asked):
    result = chat(folder, ["hello", "and now?"], "--max-tokens", "6", "--system", "be brief")
    assert result.exit_code == 0
    first, second = asked
    assert first == "system: be brief\nuser: hello\nassistant:"
    answer = greedy_answer(folder, first, 6)
    assert second == f"system: be brief\nuser: hello\nassistant: {answer}\nuser: and now?\nassistant:"


def test_ctrl_c_cancels_the_answer_and_keeps_the_chat(folder, asked, monkeypatch):
    following, count, engines = DeltaStream.__next__, [], []

    def interrupted(self):
        count.append(1)
        if len(count) == 4:
            engines.append(self._ticket.outputs[0])
            raise KeyboardInterrupt
        return following(self)

    monkeypatch.setattr(DeltaStream, "__next__", interrupted)
    result = chat(folder, ["hello", "go on"], "--max-tokens", "100")
    assert result.exit_code == 0, result.output
    assert "cancelled" in result.output
    assert len(asked) == 2
    assert asked[1].startswith("user: hello\nassistant: ")
    assert asked[1].endswith("\nuser: go on\nassistant:")
    assert engines[0].finish_reason == "abort"


def test_ctrl_c_before_the_first_token_keeps_the_chat_too(folder, asked, monkeypatch):
    submit, count = AsyncEngine.submit, []

    def interrupted(self, *args):
        count.append(1)
        if len(count) == 1:
            raise KeyboardInterrupt
        return submit(self, *args)

    monkeypatch.setattr(AsyncEngine, "submit", interrupted)
    result = chat(folder, ["hello", "go on"], "--max-tokens", "3")
    assert result.exit_code == 0, result.output
    assert "cancelled" in result.output
    assert len(asked) == 1


def test_the_scheduler_is_the_one_that_was_named(folder, monkeypatch):
    named, loading = [], Engine.from_pretrained

    def noting(*args, **options):
        named.append(options["scheduler"])
        return loading(*args, **options)

    monkeypatch.setattr(Engine, "from_pretrained", noting)
    assert chat(folder, ["hello"], "--max-tokens", "2", "--scheduler", "priority").exit_code == 0
    assert named == ["priority"]


def test_params_that_cannot_be_used_are_refused_before_the_chat(folder):
    result = chat(folder, ["hello"], "--top-p", "0")
    assert result.exit_code == 2
    assert "top_p must be above 0" in result.output


def test_stats_shows_the_last_answer_and_all(folder):
    result = chat(folder, ["hello", "/stats"], "--max-tokens", "6")
    assert result.exit_code == 0
    row = next(line for line in result.output.splitlines() if "│ tokens " in line)
    assert re.findall(r"\d+", row) == ["6", "6"]
    assert "first token, s" in result.output


def test_reset_forgets_and_help_is_no_question(folder, asked):
    result = chat(folder, ["hello", "/reset", "/help", "", "again", "/quit", "never"], "--max-tokens", "3")
    assert result.exit_code == 0
    assert asked == ["user: hello\nassistant:", "user: again\nassistant:"]


def test_the_help_of_the_command_names_every_command_of_the_chat():
    text = " ".join(CliRunner().invoke(app, ["chat", "--help"]).output.split())
    commands = re.findall(r'case "(/\w+)"', inspect.getsource(Conversation.run))
    assert commands == ["/quit", "/stats", "/reset", "/help"]
    assert all(command in text for command in [*commands, "Ctrl-C", "Ctrl-D"])


def test_lines_that_begin_as_a_command_does_but_are_none_are_said(folder, asked):
    result = chat(folder, ["/etc/passwd is a file", "/", "/quit it", "/Reset"], "--max-tokens", "1")
    assert result.exit_code == 0
    said = [text.rpartition("user: ")[2] for text in asked]
    assert said == [f"{line}\nassistant:" for line in ("/etc/passwd is a file", "/", "/quit it", "/Reset")]


def test_a_byte_order_mark_is_not_said(folder, asked):
    chat(folder, ["\ufeffhello"], "--max-tokens", "1")
    assert asked == ["user: hello\nassistant:"]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_that_cannot_write_an_answer_or_a_question_does_not_end_the_chat(folder, monkeypatch, encoding):
    def answer(self):
        said = self._messages[-1]["content"]
        return [Delta(f"{said} is 日本 {said!a}", [1])]

    monkeypatch.setattr(Conversation, "_submit", answer)
    # What is said to be ASCII writes UTF-8 more often than not.
    said = "Größe\nagain\n".encode("latin-1" if encoding == "latin-1" else "utf-8") + b"\xff\n"
    runner = CliRunner(charset=encoding, env={"COLUMNS": "200", "TERM": "dumb"})
    options = ["--model", folder, "--kv-cache-memory", "4MiB", "--threads", "1"]
    result = runner.invoke(app, ["chat", *options], input=said)
    assert result.exit_code == 0, result.output
    assert r"'Gr\xf6\xdfe'" in result.output
    assert "again is ?? 'again'" in result.output


def test_a_template_that_refuses_the_conversation_does_not_end_the_chat(folder, asked, monkeypatch):
    refusing = ["the roles must alternate"]
    apply = PreTrainedTokenizerFast.apply_chat_template

    def refuse_once(self, conversation, *args, **options):
        if refusing and conversation[-1]["content"] == "hello":
            raise ValueError(refusing.pop())
        return apply(self, conversation, *args, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "apply_chat_template", refuse_once)
    result = chat(folder, ["hello", "again"], "--max-tokens", "1")
    assert "the model's chat template refuses the conversation: the roles must alternate" in result.output
    assert asked == ["user: again\nassistant:"]


def test_a_closed_standard_input_is_told_in_words(folder):
    code = "import sys\nsys.stdin = None\nfrom paged_backend.cli.app import run\nrun()"
    result = subprocess.run([sys.executable, "-c", code, "chat", "--model", folder], capture_output=True, text=True)
    assert result.returncode == 2
    assert "error: the standard stream is closed; a chat reads from it" in result.stderr


def test_a_conversation_beyond_the_models_length_loses_its_beginning(folder, asked):
    said = [f"question {n} " + "y" * 60 for n in range(4)]
    result = chat(folder, said, "--max-tokens", "10", "--system", "be brief")
    assert result.exit_code == 0
    assert "the beginning of the conversation is forgotten" in result.output
    assert len(asked) == 4
    assert "question 0" not in asked[-1]
    assert asked[-1].startswith("system: be brief\nuser: ")


def test_a_question_that_is_too_long_by_itself_is_refused_and_the_chat_goes_on(folder, asked):
    result = chat(folder, ["y" * 400, "hello"], "--max-tokens", "3")
    assert result.exit_code == 0
    assert "beyond the 256 positions" in result.output
    assert asked == ["user: hello\nassistant:"]


def test_a_model_without_a_chat_template_is_refused(tmp_path: Path):
    folder = save_tiny(tmp_path / "model", max_positions=256)
    byte_tokenizer(chat_template=None).save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    result = chat(str(folder), ["hello"])
    assert result.exit_code == 2
    assert "no chat template" in result.output

"""What the commands share: flags, streams, and errors told in words."""

from __future__ import annotations

import errno
import inspect
import io
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from generate_command import PROMPTS, generate
from tiny_models import save_tiny

from paged_backend import Engine
from paged_backend.cli.options import BROKEN_PIPE_CODE, Terminal, check_stream, errors_in_words, naming, spread
from paged_backend.errors import ConfigError, RequestRefused


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), max_positions=128))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS) + "\n")
    return path


def test_the_engine_is_given_what_the_flags_name(folder, monkeypatch):
    given, loading = {}, Engine.from_pretrained
    monkeypatch.setattr(
        Engine, "from_pretrained", lambda *args, **options: given.update(options) or loading(*args, **options)
    )
    arguments = ["--scheduler", "static", "--scheduler-options", '{"batch": 2}', "--eviction", "slru"]
    arguments += ["--eviction-options", '{"protected": 0.5}', "--attention-backend", "reference"]
    assert generate(folder, *arguments, stdin="hello").exit_code == 0
    assert given["scheduler"] == "static"
    assert given["scheduler_options"] == {"batch": 2}
    assert given["eviction"] == "slru"
    assert given["eviction_options"] == {"protected": 0.5}
    assert given["attention_backend"] == "reference"


@pytest.mark.parametrize(("closed", "option"), [("stdin", "prompts"), ("stdout", "an --output")])
def test_a_standard_stream_that_is_closed_is_told_in_words(prompts, closed, option):
    code = f"import sys\nsys.{closed} = None\nfrom paged_backend.cli.app import run\nrun()"
    arguments = ["-" if closed == "stdin" else str(prompts), "--model", "/nope"]
    result = subprocess.run([sys.executable, "-c", code, "generate", *arguments], capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr == f"error: the standard stream is closed; name a file for {option}\n"


def test_a_table_that_nobody_reads_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    result = subprocess.run([sys.executable, "-m", "paged_backend", "plugins"], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert result.returncode == 141
    assert result.stderr == b""


@dataclass(frozen=True)
class Flags:
    size: Annotated[int, typer.Option(min=1)] = 4
    name: str = "x"


def test_flags_of_an_object_are_parameters_of_the_command():
    given = []

    @spread
    def command(path: str, flags: Any = Flags(name="y"), loud: bool = False) -> None:
        given.append((path, flags, loud))

    parameters = inspect.signature(command).parameters
    assert {name: parameter.default for name, parameter in parameters.items()} == {
        "path": inspect.Parameter.empty,
        "size": 4,
        "name": "y",
        "loud": False,
    }
    assert "OptionInfo" in str(parameters["size"])
    command(path="a", size=7, name="z", loud=True)
    assert given == [("a", Flags(7, "z"), True)]


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (ConfigError("give more"), 2, "error: give more\n"),
        (RequestRefused("too long"), 2, "error: too long\n"),
        (OSError(errno.ENOSPC, "No space left"), 2, "error: [Errno 28] No space left\n"),
        (BrokenPipeError(), BROKEN_PIPE_CODE, ""),
    ],
    ids=repr,
)
def test_what_the_user_can_mend_is_told_without_a_traceback(capsys, error, code, told):
    with pytest.raises(typer.Exit) as raised, errors_in_words():
        raise error
    assert raised.value.exit_code == code
    assert capsys.readouterr().err == told


def test_an_error_of_ours_is_not_hidden():
    with pytest.raises(ZeroDivisionError), errors_in_words():
        raise ZeroDivisionError


def test_errors_of_the_system_say_what_could_not_be_done_but_for_a_reader_that_went_away():
    with (
        pytest.raises(ConfigError, match=r"^the file a cannot be read: Permission denied$"),
        naming("the file a cannot be read"),
    ):
        raise PermissionError(errno.EACCES, "Permission denied")
    with pytest.raises(BrokenPipeError), naming("the file a cannot be read"):
        raise BrokenPipeError


def test_a_stream_that_is_closed_is_told_with_what_to_name():
    check_stream(io.StringIO(), "name a file")
    with pytest.raises(ConfigError, match="standard stream is closed; name a file"):
        check_stream(None, "name a file")


def test_what_an_encoding_cannot_write_is_shown_as_a_question_mark():
    written = io.BytesIO()
    terminal = Terminal(file=io.TextIOWrapper(written, encoding="ascii"))
    terminal.print("a\u65e5b")
    terminal.file.flush()
    assert written.getvalue() == b"a?b\n"

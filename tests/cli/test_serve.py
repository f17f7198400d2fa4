"""`paged-backend serve`: what it listens on, whom it lets in, and what it tells."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_checks import HI
from service_checks import PATIENCE_S
from starlette.testclient import TestClient
from tiny_models import save_tiny
from typer.testing import CliRunner, Result

from paged_backend.cli.app import app
from paged_backend.integrations import openai_server

Seen = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def run(folder: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Result, Seen]]:
    """Run the command; where it would serve, its application is asked by ``ask`` instead."""

    def command(*arguments: str, ask: Callable[[TestClient], Any] = lambda client: None, env: Any = None) -> Any:
        seen: Seen = {}

        def serve(application: Any, listener: Any, **options: Any) -> None:
            with TestClient(application) as client:
                seen.update(app=application, address=listener.getsockname(), options=options, told=ask(client))

        monkeypatch.setattr(openai_server, "serve", serve)
        variables = {"COLUMNS": "200", "TERM": "dumb", **(env or {})}
        result = CliRunner(env=variables).invoke(app, ["serve", folder, "--port", "0", *arguments])
        return result, seen

    return command


def test_it_listens_on_this_machine_alone_and_says_where(run: Any, folder: str):
    result, seen = run(ask=lambda client: client.get("/v1/models").json())
    assert result.exit_code == 0, result.output
    host, port = seen["address"]
    assert host == "127.0.0.1"
    assert f"serving {folder} on http://127.0.0.1:{port}/v1; Ctrl-C ends it" in result.output
    assert "anybody" not in result.output
    assert [model["id"] for model in seen["told"]["data"]] == [folder]


def test_where_others_may_come_it_says_so_unless_there_is_a_key(run: Any):
    assert "anybody who reaches this address may use it" in run("--host", "0.0.0.0")[0].output
    assert "anybody" not in run("--host", "0.0.0.0", "--api-key", "k")[0].output


def test_keys_come_from_flags_a_file_and_the_environment(run: Any, tmp_path: Path):
    (tmp_path / "keys").write_text("three ann\n")

    def ask(client: TestClient) -> list[int]:
        keys = ("one", "two", "three", "four", "five", "six")
        return [client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code for key in keys]

    flags = ("--api-key", "one", "--api-key", "two", "--api-key-file", str(tmp_path / "keys"))
    result, seen = run(*flags, ask=ask, env={"PAGED_BACKEND_API_KEYS": "four five"})
    assert result.exit_code == 0, result.output
    assert seen["told"] == [200] * 5 + [401]
    assert "one" not in result.output


def test_flags_reach_the_engine_the_application_and_the_server(run: Any, tmp_path: Path):
    (tmp_path / "template").write_text("{{ messages[0].content }} é")
    flags = (
        *("--name", "m", "--name", "n", "--max-num-seqs", "3", "--max-waiting", "5", "--scheduler", "fair"),
        *("--max-body-bytes", "500", "--max-prompt-tokens", "9", "--chat-template", str(tmp_path / "template")),
        *("--tool-parser", "json", "--drain-s", "2", "--access-log"),
    )

    def ask(client: TestClient) -> list[Any]:
        body = {"model": "n", "messages": HI, "max_tokens": 1}
        answer = client.post("/v1/chat/completions", json=body).json()
        long = client.post("/v1/completions", json={"model": "m", "prompt": [5] * 10})
        large = client.post("/v1/completions", json={"model": "m", "prompt": "x" * 500})
        metrics = client.get("/metrics").text
        return [answer["usage"]["prompt_tokens"], long.json()["error"]["message"], large.status_code, metrics]

    result, seen = run(*flags, ask=ask)
    assert result.exit_code == 0, result.output
    config = seen["app"].state.backend.engine.config
    assert (config.max_num_seqs, config.max_waiting, config.scheduler) == (3, 5, "fair")
    num_prompt_tokens, too_long, status, metrics = seen["told"]
    assert num_prompt_tokens == len("hi é".encode())
    assert "this server takes 9" in too_long
    assert status == 413
    assert "paged_backend_requests_total 1.0" in metrics
    options = seen["options"]
    assert (options["drain_s"], options["access_log"]) == (2.0, True)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--tool-parser", "mine"), "tool_parser='mine' is unknown; choose from hermes"),
        (("--api-key", "a b"), "an API key must be"),
        (("--host", "no such host"), "cannot listen on no such host"),
        (("--scheduler", "mine"), "'mine'"),
    ],
)
def test_a_mistake_is_told_in_words(run: Any, flags: tuple[str, ...], why: str):
    result, seen = run(*flags)
    assert (result.exit_code, seen) == (2, {})
    assert why in result.output
    assert "Traceback" not in result.output


def test_a_port_that_is_taken_is_told_before_a_model_is_looked_for():
    with openai_server.listen("127.0.0.1", 0) as taken:
        result = CliRunner().invoke(app, ["serve", "./nothing", "--port", str(taken.getsockname()[1])])
    assert (result.exit_code, "Address already in use" in result.output) == (2, True)


def test_without_its_extra_it_says_what_to_install(run: Any, monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.startswith("paged_backend.integrations.openai_server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("paged_backend.integrations.openai_server")
    monkeypatch.setitem(sys.modules, "fastapi", None)
    result = CliRunner().invoke(app, ["serve", "x"])
    assert result.exit_code == 2
    assert "the server needs the fastapi package: pip install 'paged-backend[serve]'" in result.output.replace(
        "\n", " "
    )


def test_ctrl_c_ends_it_with_nothing_to_complain_of(folder: str, capfd: pytest.CaptureFixture[str]):
    """As it is used, but for the process."""
    answers: list[int] = []

    def ask_and_interrupt() -> None:
        said = ""
        while (found := re.search(r"on (http://\S+)/v1;", said)) is None:
            said += capfd.readouterr().err
        answers.append(httpx.get(f"{found[1]}/health", timeout=PATIENCE_S).status_code)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=ask_and_interrupt)
    thread.start()
    with pytest.raises(SystemExit) as ended:
        app(["serve", folder, "--port", "0"])
    thread.join()
    assert (ended.value.code, answers) == (0, [200])

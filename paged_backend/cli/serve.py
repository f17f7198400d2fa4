"""``paged-backend serve``: a model for clients of OpenAI's API."""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paged_backend import sample_model
from paged_backend.cli.options import EngineFlags, Terminal, errors_in_words, open_engine, spread
from paged_backend.errors import ConfigError

if TYPE_CHECKING:
    from paged_backend.integrations.openai_server import ApiKeys

KEYS_VARIABLE = "PAGED_BACKEND_API_KEYS"


@dataclass(frozen=True)
class ServedModelFlags(EngineFlags):
    """As all commands have them, but for the model, which comes first here."""

    model: Annotated[
        str | None,
        typer.Argument(help="A model folder or hub id; by default SmolLM2-135M-Instruct, fetched once."),
    ] = None


@spread
def serve(
    engine: ServedModelFlags = ServedModelFlags(),
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests that run at once, at most.")] = 64,
    max_waiting: Annotated[
        int, typer.Option(min=1, help="Requests that wait, at most; further ones are sent away with 429.")
    ] = 1024,
    host: Annotated[
        str, typer.Option(help="The address to listen on; 0.0.0.0 is all that this machine has.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0 is any free one.")] = 8000,
    name: Annotated[
        list[str] | None,
        typer.Option(help="What clients may call the model, by default as it is called here; may be given again."),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help=f"A key that clients must send; may be given again. Others see it; {KEYS_VARIABLE} is safer."
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="A file with a key a line and, after a space, its client's name if any."
        ),
    ] = None,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Largest body of a request.")] = 4 * 2**20,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest prompt; by default what the model takes.")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A file with a chat template, in Jinja.")
    ] = None,
    tool_parser: Annotated[
        str | None,
        typer.Option(
            help="How the model writes tool calls: hermes, llama3, mistral or json; by default what its template shows."
        ),
    ] = None,
    drain_s: Annotated[
        float | None, typer.Option(min=0, help="Seconds that Ctrl-C gives to what runs; by default it may end.")
    ] = None,
    access_log: Annotated[bool, typer.Option("--access-log", help="Print a line for every request.")] = False,
) -> None:
    """Serve a model over HTTP to clients of OpenAI's API, from one running batch.

    /v1/chat/completions, /v1/responses and /v1/completions answer, in streams too; /v1/models, /health and /metrics
    (for Prometheus) tell. Keys may also come, with spaces between them, in the environment variable
    PAGED_BACKEND_API_KEYS. Without a key anybody who reaches the address may use it.

    Ctrl-C or SIGTERM ends the server when the requests that run are over, and a second one at once.
    """
    console = Terminal(stderr=True, highlight=False)
    with errors_in_words():
        openai_server = _library()
        keys = _keys(api_key or [], api_key_file, openai_server.ApiKeys)
        with openai_server.listen(host, port) as listener:
            registry, plugins = _metrics()
            with open_engine(engine, console, {}, max_num_seqs, max_waiting=max_waiting, plugins=plugins) as runner:
                app = openai_server.create_app(
                    runner,
                    model_names=name or [engine.model or sample_model.NAME],
                    api_keys=keys,
                    max_body_bytes=max_body_bytes,
                    max_prompt_tokens=max_prompt_tokens,
                    chat_template=None if chat_template is None else chat_template.read_text(encoding="utf-8"),
                    tool_parser=tool_parser,
                    registry=registry,
                )
                address = _address(listener)
                console.print(f"serving {app.state.backend.names[0]} on {address}/v1; Ctrl-C ends it", soft_wrap=True)
                if keys is None and not _is_loopback(listener):
                    console.print("anybody who reaches this address may use it; --api-key-file asks for keys")
                openai_server.serve(
                    app,
                    listener,
                    access_log=access_log,
                    drain_s=drain_s,
                    on_drain=lambda: console.print("finishing what runs; Ctrl-C again ends at once"),
                )


def _library() -> Any:
    try:
        from paged_backend.integrations import openai_server
    except ImportError as error:
        raise ConfigError(f"{error}") from error
    return openai_server


def _keys(given: list[str], file: Path | None, kind: type[ApiKeys]) -> ApiKeys | None:
    keys = kind([*given, *os.environ.get(KEYS_VARIABLE, "").split()])
    if file is not None:
        keys |= kind.from_file(file)
    return keys if len(keys) else None


def _metrics() -> tuple[Any, list[Any]]:
    """A registry, and the plugin that fills it; neither without the extra ``metrics``."""
    try:
        from prometheus_client import CollectorRegistry
    except ImportError:
        return None, []
    from paged_backend.plugins.observers import Prometheus

    registry = CollectorRegistry()
    return registry, [Prometheus(registry)]


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _is_loopback(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback

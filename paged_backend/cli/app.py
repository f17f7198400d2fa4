"""The command line: ``paged-backend`` and its commands."""

from __future__ import annotations

import atexit
import json
import os
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

try:
    import typer
    from rich.table import Column, Table
except ImportError as error:
    sys.exit(f"the command line needs the {error.name} package: pip install 'paged-backend[cli]'")

import paged_backend
from paged_backend.cli.bench import bench
from paged_backend.cli.chat import chat
from paged_backend.cli.doctor import doctor
from paged_backend.cli.generate import generate
from paged_backend.cli.options import AsJson, Model, Terminal, Threads, errors_in_words, start, write_all
from paged_backend.cli.place import place
from paged_backend.cli.replay import replay
from paged_backend.cli.serve import serve
from paged_backend.cli.study import study
from paged_backend.cli.tune import tune

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paged-backend {paged_backend.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Run transformers models unchanged on a paged key-value cache with continuous batching."""


@app.command()
def demo(
    model: Model = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="New tokens per prompt, at most.")] = 128,
    threads: Threads = None,
    prompts: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Your own prompts: a file with a JSON list of texts."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Answer real prompts through the paged engine and through stock generate, and compare.

    Prints some answers, then speed, time to finish and memory of both; with --json
    these go to standard error. Exits with 1 if any greedy token differs.
    """
    texts = _read_prompts(prompts) if prompts else None
    console = Terminal(stderr=as_json)
    with errors_in_words():
        folder = start(model, threads, console, {})
        from paged_backend.cli.demo import run_demo
        from paged_backend.cli.prompts import PROMPTS

        comparison = run_demo(folder, texts or PROMPTS, max_new_tokens, console)
        if as_json:
            typer.echo(comparison.to_json())
    raise typer.Exit(1 if comparison.differences else 0)


app.command()(generate)
app.command()(chat)
app.command()(serve)
app.command()(replay)
app.command()(place)
app.command()(bench)
app.command()(study)
app.command()(tune)
app.command()(doctor)


@app.command()
def plugins(as_json: AsJson = False) -> None:
    """List the policies that can be chosen by name, each with the plugin and the distribution it came from.

    An installed plugin that is broken, or has a name that another one has, stands there with the reason.
    """
    with errors_in_words():
        from paged_backend.policy.plugin_manager import PluginManager

        if as_json:
            typer.echo(json.dumps([asdict(plugin) for plugin in PluginManager(lists=True).describe()], indent=1))
            return
        table = Table("kind", *(Column(name, overflow="fold") for name in ("name", "plugin", "distribution")))
        for plugin in PluginManager(lists=True).describe():
            for kind, names in plugin.names.items():
                for name in names:
                    table.add_row(kind, name, plugin.name, plugin.source)
            if plugin.error is not None:
                table.add_row("broken", plugin.error, plugin.name, plugin.source)
            elif not any(plugin.names.values()):
                table.add_row("no policy", ", ".join(plugin.hooks), plugin.name, plugin.source)
        Terminal().print(table)


def _read_prompts(path: Path) -> list[str]:
    try:
        texts = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"{path} is not JSON: {error}", param_hint="--prompts") from error
    except OSError as error:
        raise typer.BadParameter(f"{error}", param_hint="--prompts") from error
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise typer.BadParameter(f"{path} must hold a JSON list of texts, none of them empty", param_hint="--prompts")
    return texts


def run() -> None:
    """The command as a process of its own.

    At its end the interpreter would look at every object of torch and transformers several times, which takes seconds
    on a busy machine: after all else is done, the process leaves without.
    """
    codes: list[int] = []
    # What is registered first is called last.
    atexit.register(_leave, codes)
    for stream in (sys.stdout, sys.stderr):
        write_all(stream)
    try:
        app(prog_name="paged-backend")
    except SystemExit as end:
        if isinstance(end.code, int):
            codes.append(end.code)
        raise
    except OSError as error:
        # Of what typer itself prints, such as help onto a full disk.
        codes.append(2)
        sys.exit(f"error: {error}")


def _leave(codes: list[int]) -> None:
    for code in codes:
        for stream in (sys.stdout, sys.stderr):
            # None is a stream that was closed before the process began.
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(code)


if __name__ == "__main__":
    run()

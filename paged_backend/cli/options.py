"""What the commands that run an engine share: their options, the engine itself, and errors told in words."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from paged_backend.errors import PagedBackendError

if TYPE_CHECKING:
    from paged_backend.engine.engine import Engine

# More threads than this no machine has the cores for, and the system may refuse to start them.
MAX_THREADS = 1024
# What a shell tells of a command whose reader went away, as head does.
BROKEN_PIPE_CODE = 141


def _check_temperature(value: float) -> float:
    if not 0 <= value < math.inf:
        raise typer.BadParameter(f"temperature must be a number of at least 0, got {value}")
    return value


def _check_top_p(value: float) -> float:
    if not 0 < value <= 1:
        raise typer.BadParameter(f"top_p must be above 0 and at most 1, got {value}")
    return value


Model = Annotated[
    str | None, typer.Option(help="A model folder or hub id; by default SmolLM2-135M-Instruct, fetched once.")
]
MaxTokens = Annotated[int, typer.Option(min=1, help="New tokens per answer, at most.")]
# The ranges are checked by callbacks, for bounds of the option itself call NaN too large.
Temperature = Annotated[
    float, typer.Option(callback=_check_temperature, help="At least 0, which always takes the likeliest token.")
]
TopP = Annotated[
    float,
    typer.Option(
        callback=_check_top_p, help="Share of the probability that tokens are drawn from, above 0 and at most 1."
    ),
]
Seed = Annotated[int | None, typer.Option(help="Makes the drawn tokens repeatable.")]
Scheduler = Annotated[str, typer.Option(help="The scheduling policy; see paged-backend plugins.")]
KVCacheMemory = Annotated[
    str | None, typer.Option(help="Memory for keys and values: a size such as 512MiB, or a share of a GPU such as 0.5.")
]
Threads = Annotated[
    int | None, typer.Option(min=1, max=MAX_THREADS, help="CPU threads; by default all that torch takes.")
]


class Terminal(Console):
    """A console that leaves in silence when nobody reads it any more."""

    def on_broken_pipe(self) -> None:
        """End the command, as the system would."""
        self.quiet = True
        raise BrokenPipeError


@contextmanager
def errors_in_words() -> Iterator[None]:
    """What the user can mend is told without a traceback; a reader that went away ends the command in silence."""
    try:
        yield
    except BrokenPipeError as error:
        raise typer.Exit(BROKEN_PIPE_CODE) from error
    except (PagedBackendError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error


@contextmanager
def open_engine(
    model: str | None, threads: int | None, console: Console, params: dict[str, Any], **options: Any
) -> Iterator[Engine]:
    """An engine for the named model or the sample model, in the dtype that its weights are stored in.

    Raises ConfigError for ``params`` that no request could have, before the model is loaded.
    """
    # On a machine that does other work too, threads that spin while they wait take the time from those they wait for.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with console.status("loading the model") as status:
        # torch and transformers take seconds to import, which --help need not wait for.
        import torch
        from transformers.utils import logging

        from paged_backend import sample_model
        from paged_backend.engine.engine import Engine
        from paged_backend.sampling_params import SamplingParams

        SamplingParams(**params)
        logging.disable_progress_bar()
        if threads is not None:
            torch.set_num_threads(threads)
        if model is None and not sample_model.is_fetched():
            status.update(f"fetching {sample_model.NAME} (93 MB, once)")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        options = {name: value for name, value in options.items() if value is not None}
        if re.fullmatch(r"0?\.\d+", options.get("kv_cache_memory", "")):
            options["kv_cache_memory"] = float(options["kv_cache_memory"])
        folder = model or sample_model.fetch()
        engine = Engine.from_pretrained(folder, model_kwargs={"dtype": "auto", "device_map": device}, **options)
    with engine:
        yield engine

"""What the commands that run an engine share: their options, the engine itself, and errors told in words."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from paged_backend.errors import PagedBackendError

if TYPE_CHECKING:
    from paged_backend.engine import Engine

Model = Annotated[
    str | None, typer.Option(help="A model folder or hub id; by default SmolLM2-135M-Instruct, fetched once.")
]
MaxTokens = Annotated[int, typer.Option(min=1, help="New tokens per answer, at most.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 always takes the likeliest token.")]
TopP = Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of the probability that tokens are drawn from.")]
Seed = Annotated[int | None, typer.Option(help="Makes the drawn tokens repeatable.")]
KVCacheMemory = Annotated[str | None, typer.Option(help="Memory for keys and values, such as 512MiB or 0.5 of a GPU.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; by default all that torch takes.")]


@contextmanager
def errors_in_words() -> Iterator[None]:
    """What the user can mend is told without a traceback."""
    try:
        yield
    except (PagedBackendError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error


@contextmanager
def open_engine(model: str | None, threads: int | None, console: Console, **options: Any) -> Iterator[Engine]:
    """An engine for the named model or the sample model, in the dtype that its weights are stored in."""
    # On a machine that does other work too, threads that spin while they wait take the time from those they wait for.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with console.status("loading the model") as status:
        # torch and transformers take seconds to import, which --help need not wait for.
        import torch
        from transformers.utils import logging

        from paged_backend import sample_model
        from paged_backend.engine import Engine

        logging.disable_progress_bar()
        if threads is not None:
            torch.set_num_threads(threads)
        if model is None and not sample_model.is_fetched():
            status.update(f"fetching {sample_model.NAME} (93 MB, once)")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        options = {name: value for name, value in options.items() if value is not None}
        engine = Engine.from_pretrained(
            model or sample_model.fetch(), model_kwargs={"dtype": "auto", "device_map": device}, **options
        )
    with engine:
        yield engine

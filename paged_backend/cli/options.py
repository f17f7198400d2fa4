"""What the commands share: flags of sampling and of the engine, how they start, and errors told in words."""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from rich.console import Console

from paged_backend.errors import ConfigError, PagedBackendError

if TYPE_CHECKING:
    from paged_backend.engine.engine import Engine

# More threads than this no machine has the cores for, and the system may refuse to start them.
MAX_THREADS = 1024
# What a shell tells of a command whose reader went away, as head does.
BROKEN_PIPE_CODE = 141
# Standard input or output.
DASH = Path("-")

Model = Annotated[
    str | None,
    typer.Option(help="A model folder, hub id or GGUF file; by default SmolLM2-135M-Instruct, fetched once."),
]
Threads = Annotated[
    int | None, typer.Option(min=1, max=MAX_THREADS, help="CPU threads; by default all that torch takes.")
]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def json_object(text: str) -> dict[str, Any]:
    """The JSON object that a flag's text is; BadParameter for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"{text:.80} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise typer.BadParameter(f'{text:.80} is no JSON object; give one such as {{"batch": 4}}')
    return value


@dataclass(frozen=True)
class SamplingFlags:
    """How tokens are chosen; SamplingParams says what may be."""

    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens per answer, at most.")]
    temperature: Annotated[float, typer.Option(help="At least 0, which always takes the likeliest token.")]
    top_p: Annotated[
        float, typer.Option(help="Share of the probability that tokens are drawn from, above 0 and at most 1.")
    ]
    seed: Annotated[int | None, typer.Option(help="Makes the drawn tokens repeatable.")] = None


@dataclass(frozen=True)
class EngineFlags:
    """The model, and how it is run."""

    model: Model = None
    scheduler: Annotated[str, typer.Option(help="The scheduling policy; see paged-backend plugins.")] = "fifo"
    scheduler_options: Annotated[
        dict[str, Any] | None,
        typer.Option(parser=json_object, metavar="JSON", help="Its options, a JSON object."),
    ] = None
    eviction: Annotated[str, typer.Option(help="Which cached block goes first; see paged-backend plugins.")] = "lru"
    eviction_options: Annotated[
        dict[str, Any] | None,
        typer.Option(parser=json_object, metavar="JSON", help="Its options, a JSON object."),
    ] = None
    attention_backend: Annotated[
        str, typer.Option(help="Which kernels attend: triton, cpu, reference, auto, or a plugin's.")
    ] = "auto"
    kv_cache_memory: Annotated[
        str | None,
        typer.Option(help="Memory for keys and values: a size such as 512MiB, or a share of a GPU such as 0.5."),
    ] = None
    quantize: Annotated[
        str | None, typer.Option(help="Round weights to int8 or int4; those of a GGUF file stay as they are otherwise.")
    ] = None
    threads: Threads = None


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` as typer reads it: in place of a parameter whose default is an object of flags, the flags."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        flags = parameter.default
        if is_dataclass(flags):
            groups[parameter.name] = type(flags)
            hints = get_type_hints(type(flags), include_extras=True)
            parameters += [
                parameter.replace(name=field.name, default=getattr(flags, field.name), annotation=hints[field.name])
                for field in fields(flags)
            ]
        else:
            parameters.append(parameter)

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    run.__dict__["__signature__"] = signature.replace(parameters=parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def write_all(stream: Any) -> None:
    """Let a stream show ? for what its encoding cannot write, rather than fail."""
    if isinstance(stream, TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
        stream.reconfigure(errors="replace")


class Terminal(Console):
    """A console that leaves in silence when nobody reads it, and shows ? for what its encoding cannot write."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        write_all(self.file)

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
def naming(what: str) -> Iterator[None]:
    """Errors of the system say ``what`` could not be done; they would name no file themselves."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ConfigError(f"{what}: {error.strerror or error}") from error


def check_target(path: Path | None) -> None:
    """Raise ConfigError, before anything has run, for a file that could not be written afterwards."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{path} cannot be written: permission denied")


def check_plot(path: Path | None) -> None:
    """``check_target`` for a figure, which also needs matplotlib and a name that ends as an image's."""
    if path is not None:
        from paged_backend.lab.figure import check_kind

        check_target(path)
        check_kind(path)


def check_stream(stream: Any, wanted: str) -> None:
    """Raise ConfigError for a standard stream that was closed before the command began."""
    if stream is None:
        raise ConfigError(f"the standard stream is closed; {wanted}")


def start(model: str | None, threads: int | None, console: Console, params: Mapping[str, Any]) -> str:
    """Set the process up, and return the model's name, or the folder of the sample model.

    Raises ConfigError for a model that cannot be, and for ``params`` that no request could have.
    """
    # On a machine that does other work too, threads that spin while they wait take the time from those they wait for.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with console.status("starting") as status:
        # torch and transformers take seconds to import, which --help need not wait for.
        import torch
        from transformers.utils import logging

        from paged_backend import sample_model
        from paged_backend.model.pretrained import check_model_name, named
        from paged_backend.sampling_params import SamplingParams

        SamplingParams(**params)
        logging.disable_progress_bar()
        if threads is not None:
            torch.set_num_threads(threads)
        if model is not None:
            name = os.path.expanduser(model)
            check_model_name(*named(name, {}))
            return name
        if not sample_model.is_fetched():
            status.update(f"fetching {sample_model.NAME} (93 MB, once)")
        with naming(f"the sample model cannot be kept in {sample_model.folder()}"):
            return sample_model.fetch()


@contextmanager
def open_engine(
    flags: EngineFlags, console: Console, params: Mapping[str, Any], max_num_seqs: int, **more: Any
) -> Iterator[Engine]:
    """An engine for the model that is named, in the dtype of its stored weights; raises what ``start`` does.

    more: options of the engine for which there is no flag.
    """
    options = {name: value for name, value in asdict(flags).items() if value is not None} | more
    folder = start(options.pop("model", None), options.pop("threads", None), console, params)
    with console.status("loading the model"):
        import torch

        from paged_backend.engine.engine import Engine

        if re.fullmatch(r"0?\.\d+", options.get("kv_cache_memory", "")):
            options["kv_cache_memory"] = float(options["kv_cache_memory"])
        model_kwargs = {"dtype": "auto", "device_map": "cuda" if torch.cuda.is_available() else "cpu"}
        engine = Engine.from_pretrained(folder, model_kwargs=model_kwargs, max_num_seqs=max_num_seqs, **options)
    with engine:
        yield engine

"""``paged-backend tune``: what block sizes cost a model in time and memory, measured, and which one to take."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paged_backend.cli.options import (
    AsJson,
    EngineFlags,
    Terminal,
    Threads,
    check_plot,
    errors_in_words,
    naming,
    open_engine,
)
from paged_backend.config import MAX_NUM_SEQS, EngineConfig
from paged_backend.errors import ConfigError

if TYPE_CHECKING:
    from paged_backend.block_cost import Workload
    from paged_backend.engine.engine import Engine

# Wall seconds of a measurement, of which there are about a hundred and fifty.
TIME_LIMIT_S = 0.04
# Prompt tokens that are timed at once: a GPU is not filled by fewer, and on a CPU a longer run is seldom undisturbed.
GPU_CHUNK, CPU_CHUNK = 512, 64


def tune(
    model: Annotated[
        str | None,
        typer.Argument(help="A model folder or hub id; by default SmolLM2-135M-Instruct, fetched once."),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="A-B",
            help="Prompts are spread evenly from A to B tokens, such as 100-2000; by default requests are those that "
            "block size auto takes to be typical.",
        ),
    ] = None,
    output_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of an answer, 128 by default; with --lengths.")
    ] = None,
    shared_prefix: Annotated[
        int | None,
        typer.Option(min=0, help="Tokens that all prompts begin with alike, 0 by default; with --lengths."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="Recorded requests, as paged-backend replay reads them; their lengths, and what their prompts share.",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Take only so many of the trace's first requests.")] = None,
    seqs: Annotated[int, typer.Option(min=1, max=MAX_NUM_SEQS, help="Requests of the decode step that is timed.")] = 8,
    attention_backend: Annotated[
        str,
        typer.Option(
            "--attention-backend",
            "--backend",
            help="Which kernels attend: triton, cpu, reference, auto, or a plugin's.",
        ),
    ] = "auto",
    kv_dtype: Annotated[
        str,
        typer.Option(
            help="How keys and values are stored: auto (as the model's), float32, float16, bfloat16, int8 or fp8."
        ),
    ] = "auto",
    threads: Threads = None,
    as_json: AsJson = False,
    plot: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Draw memory overhead against latency to this image file.")
    ] = None,
) -> None:
    """Time a model's attention at block sizes from 8 to 256, add what each wastes, and say which to take.

    A size costs its attention's time over the fastest size's, times the slots held for a
    token, times the tokens computed for one that had to be. Block size auto does the
    same, but times decodes alone.
    """
    console = Terminal()
    with errors_in_words():
        from paged_backend.lab import block_size_report as report
        from paged_backend.lab.block_size_study import study
        from paged_backend.lab.trace import read_trace

        # What is given wrongly is told before a model is loaded.
        check_plot(plot)
        spread = _spread(lengths)
        if spread is not None and trace is not None:
            raise ConfigError(f"--lengths={lengths} and --trace={trace} both say what comes; give one of them")
        for flag, value, needs, there in (
            ("--output-length", output_length, "--lengths", lengths),
            ("--shared-prefix", shared_prefix, "--lengths", lengths),
            ("--limit", limit, "--trace", trace),
        ):
            if value is not None and there is None:
                raise ConfigError(f"{flag}={value} goes with {needs}; give that too, or leave it out")
        EngineConfig(kv_dtype=kv_dtype)
        with naming(f"the trace {trace} cannot be read"):
            requests = [] if trace is None else read_trace(trace, limit=limit)
        flags = EngineFlags(model=model, attention_backend=attention_backend, threads=threads)
        quiet = Terminal(stderr=True)
        # The modules around attention are not timed, so they need no faster equals.
        with open_engine(flags, quiet, {}, 1, kv_dtype=kv_dtype, optimize="none") as engine:
            if not engine.twin.layers:
                raise ConfigError("no layer of this model attends, so the size of blocks costs nothing; leave it at 16")
            workload, words = _workload(engine, spread, output_length or 128, shared_prefix or 0, requests, trace)
            chunk = GPU_CHUNK if engine.twin.device.type == "cuda" else CPU_CHUNK
            with quiet.status("timing attention"):
                result = study(_timing(engine), workload, seqs, chunk, _windows(engine))
            settings = _settings(engine, model)
        if plot is not None:
            with naming(f"{plot} cannot be written"):
                report.plot(result, plot)
        if as_json:
            typer.echo(report.to_json(result, {**settings, "requests": words}), nl=False)
            return
        where = "{model} on {device}, threads={threads}, attention_backend={attention_backend}, kv_dtype={kv_dtype}"
        console.print(report.table(result, f"{where.format(**settings)}: {words}"))
        console.print(f"{result.reason[0].upper()}{result.reason[1:]}.", highlight=False)


def _spread(text: str | None) -> tuple[int, int] | None:
    """The shortest and the longest prompt that ``--lengths`` says."""
    if text is None:
        return None
    match = re.fullmatch(r"([1-9]\d{0,8})(?:-([1-9]\d{0,8}))?", text)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise ConfigError(f"--lengths={text!r:.80} must be two numbers of tokens, the smaller first, such as 100-2000")
    return int(match[1]), int(match[2] or match[1])


def _workload(
    engine: Engine,
    spread: tuple[int, int] | None,
    output_length: int,
    shared_prefix: int,
    requests: list[Any],
    trace: Path | None,
) -> tuple[Workload, str]:
    """The requests to judge by, and what they are in words."""
    from paged_backend.block_cost import Workload
    from paged_backend.lab.block_size_study import spread_workload, trace_workload

    if trace is not None:
        workload, num_left_out = trace_workload(requests, engine.max_model_len)
        left_out = f", {num_left_out:,} longer than the model runs left out" if num_left_out else ""
        return workload, f"{len(workload.prompts):,} requests of {trace.name}{left_out}"
    if spread is None:
        workload = Workload.typical(engine.max_model_len)
        shared = "half of each shared"
    else:
        workload = spread_workload(*spread, output_length, shared_prefix, engine.max_model_len)
        shared = f"the first {shared_prefix:,} shared" if shared_prefix else "nothing shared"
    shortest, longest = min(workload.prompts), max(workload.prompts)
    return workload, f"prompts of {shortest:,} to {longest:,} tokens, {shared}, answers of {workload.outputs[0]:,}"


def _timing(engine: Engine) -> Any:
    from paged_backend.model.attention_timing import AttentionTiming

    backend = engine.runner.context.backend
    return AttentionTiming(engine.twin.layers, engine.config.kv_torch_dtype, backend, time_limit_s=TIME_LIMIT_S)


def _windows(engine: Engine) -> dict[int, int]:
    """Bytes of a token by how many of the latest tokens a layer sees, 0 for all; a chunk counts as such a window."""
    windows: Counter[int] = Counter()
    for layer in engine.twin.layers:
        windows[layer.rule.size] += layer.bytes_per_token(engine.config.kv_torch_dtype)
    return dict(windows)


def _settings(engine: Engine, model: str | None) -> dict[str, Any]:
    import torch

    from paged_backend import sample_model

    device = engine.twin.device
    return {
        "model": Path(model).name if model is not None else sample_model.NAME,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device}",
        "threads": torch.get_num_threads(),
        "attention_backend": engine.runner.context.backend.name,
        "kv_dtype": engine.config.kv_dtype,
    }

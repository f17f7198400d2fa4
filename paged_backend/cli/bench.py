"""``paged-backend bench``: the same requests under static, dynamic-window and continuous batching."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from paged_backend.cli.options import (
    AsJson,
    EngineFlags,
    Terminal,
    Threads,
    check_plot,
    check_target,
    errors_in_words,
    naming,
    open_engine,
    start,
)
from paged_backend.errors import ConfigError


def bench(
    model: Annotated[
        str | None,
        typer.Argument(help="A model folder or hub id; by default SmolLM2-135M-Instruct, fetched once."),
    ] = None,
    modes: Annotated[
        str,
        typer.Option(
            help="What to compare, with commas between: stock-static and stock-window, padded batches through stock "
            "generate; static and window, the same on our kernels; continuous."
        ),
    ] = "stock-static,stock-window,static,window,continuous",
    requests: Annotated[int, typer.Option(min=1, help="How many requests.")] = 32,
    batch: Annotated[int, typer.Option(min=1, help="Requests of a batch, and seats of the continuous one.")] = 8,
    lengths: Annotated[
        str,
        typer.Option(help="Of prompt and output together: uniform, heavy (few are long), short (70 % are), or trace."),
    ] = "uniform",
    shortest: Annotated[int, typer.Option(min=4, help="Tokens of the shortest request.")] = 64,
    longest: Annotated[int, typer.Option(min=4, help="Tokens of the longest request.")] = 1024,
    scale: Annotated[
        float | None,
        typer.Option(help="Multiplies all lengths; by default they are halved until one run takes less than a minute."),
    ] = None,
    arrivals: Annotated[
        str, typer.Option(help="poisson, bursts, at-once, or trace, at the rate that the first mode can do.")
    ] = "poisson",
    load: Annotated[float, typer.Option(help="How much arrives of what the first mode can do, 1 being all.")] = 1.0,
    trace: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Recorded requests, for their lengths and their pace; see replay."),
    ] = None,
    window_ms: Annotated[float, typer.Option(help="How long a window waits for a full batch.")] = 200.0,
    scheduler: Annotated[str, typer.Option(help="Scheduling policy of the continuous mode.")] = "fifo",
    dtype: Annotated[
        str,
        typer.Option(
            help="Of the weights: float32, bfloat16 or float16; auto is float32 on a CPU, where stock is slow in "
            "others, and what is stored elsewhere."
        ),
    ] = "auto",
    threads: Threads = None,
    seed: Annotated[int, typer.Option(help="Where random numbers start.")] = 0,
    as_json: AsJson = False,
    plot: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Draw latencies and memory to this image file.")
    ] = None,
    study: Annotated[
        str,
        typer.Option(
            help="batching; or memory: what keys and values take preallocated, padded and paged, in virtual time."
        ),
    ] = "batching",
    simulate: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE:MODEL",
            help="Run nothing: steps take what the roofline of a device says, such as h100:llama-7b, and the figures "
            "that this project set out from stand beside what comes out.",
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write it all, each request as a bar, to this HTML file.")
    ] = None,
) -> None:
    """Compare ways of batching on your model and machine: latency, throughput, utilisation of compute and memory.

    The same random requests with the same weights and arrivals, first all at once, then at the rate that the first mode
    can just do. Nothing else should run meanwhile; on a CPU, pin it to cores (taskset) and say how many --threads.
    """
    console = Terminal()
    with errors_in_words():
        from paged_backend.lab import bench as lab
        from paged_backend.lab.trace import read_trace
        from paged_backend.lab.traffic import Traffic
        from paged_backend.policy.plugin_manager import PluginManager

        if trace is None and "trace" in (lengths, arrivals):
            raise ConfigError("--lengths=trace and --arrivals=trace need --trace FILE")
        if trace is not None and "trace" not in (lengths, arrivals):
            raise ConfigError("--trace is used by --lengths=trace and --arrivals=trace; give one of them")
        check_plot(plot)
        check_target(html)
        with naming(f"the trace {trace} cannot be read"):
            recorded = read_trace(trace) if trace is not None else []
        traffic = Traffic(requests, lengths, shortest, longest, seed, recorded)
        names = tuple(name.strip() for name in modes.split(","))
        setting = lab.Setting(names, arrivals, batch, window_ms, load, scheduler)
        if study not in ("batching", "memory"):
            raise ConfigError(f"--study={study} is unknown; choose from batching, memory")
        # A misspelt policy is told before anything has run.
        PluginManager().scheduler(scheduler, {})
        if study == "memory":
            unused = {
                "html": html,
                "arrivals": arrivals != "poisson",
                "load": load != 1,
                "scheduler": scheduler != "fifo",
            }
            unused |= {"modes": len(names) != len(lab.MODES), "window-ms": window_ms != 200}
            if given := [f"--{name}" for name, value in unused.items() if value]:
                raise ConfigError(f"--study=memory has no use for {', '.join(given)}; leave them out")
            _study_memory(
                model, simulate, traffic.scaled(1.0 if scale is None else scale), batch, as_json, plot, console
            )
            return
        if simulate is None:
            folder = start(model, threads, console, {})
            name = Path(folder).name
            result, about = _measured(folder, dtype, traffic, setting, scale, recorded, console)
        else:
            if model is not None or threads is not None or dtype != "auto":
                raise ConfigError("--simulate runs no model; leave out MODEL, --threads and --dtype")
            name = simulate
            result, about = _simulated(
                simulate, traffic.scaled(1.0 if scale is None else scale), setting, recorded, console
            )
        _show(name, result, about, as_json, plot, html, console)


def _study_memory(
    model: str | None,
    simulate: str | None,
    traffic: Any,
    batch: int,
    as_json: bool,
    plot: Path | None,
    console: Console,
) -> None:
    from paged_backend.lab import memory_study as lab

    if simulate is not None:
        from paged_backend.lab.roofline import Roofline

        name, bytes_per_token = simulate, Roofline.of_name(simulate).model.bytes_per_token
    else:
        with open_engine(EngineFlags(model=model), console, {}, max_num_seqs=1) as engine:
            bytes_per_token = sum(group.bytes_per_token for group in engine.stats().groups)
        name = "SmolLM2-135M-Instruct" if model is None else Path(model).name
    with console.status("counting"):
        result = lab.study(traffic.draw(), batch, bytes_per_token)
    if plot is not None:
        with naming(f"{plot} cannot be written"):
            lab.plot(result, plot)
    if as_json:
        typer.echo(lab.to_json(result, {"model": name}), nl=False)
        return
    console.print(lab.table(result, f"{name}: {_drawn(traffic)}, {batch} at once"))


def _measured(
    folder: str, dtype: str, traffic: Any, setting: Any, scale: float | None, recorded: Any, console: Console
) -> tuple[Any, list[str]]:
    """The bench of a model on this machine, and what it was measured on."""
    import torch

    from paged_backend.lab.bench import bench
    from paged_backend.model.pretrained import load_pretrained

    with console.status(f"loading {folder}"):
        place = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = "float32" if (dtype, place) == ("auto", "cpu") else dtype
        model, _ = load_pretrained(folder, {"dtype": dtype, "device_map": place})
    with _live() as progress:
        result = bench(model, traffic, setting, scale=scale, progress=progress, arrival_trace=recorded)
    return result, _about(folder, model, result)


def _simulated(name: str, traffic: Any, setting: Any, recorded: Any, console: Console) -> tuple[Any, list[str]]:
    """The bench in virtual time, and what it was about."""
    from paged_backend.lab.roofline import Roofline
    from paged_backend.lab.simulation import simulate

    roofline = Roofline.of_name(name)
    with console.status("simulating"):
        result = simulate(roofline, traffic, setting, recorded)
    return result, [f"{name}, simulated", _requests(result)]


def _show(
    name: str, result: Any, about: list[str], as_json: bool, plot: Path | None, html: Path | None, console: Console
) -> None:
    from paged_backend.lab import bench_report as report
    from paged_backend.lab import claims
    from paged_backend.lab.bench_page import page

    if plot is not None:
        with naming(f"{plot} cannot be written"):
            report.plot(result, plot)
    if html is not None:
        with naming(f"{html} cannot be written"):
            html.write_text(page(result, f"Batching on {name}", about), encoding="utf-8")
    if as_json:
        typer.echo(report.to_json(result, {"model": name, "about": about}), nl=False)
        return
    for line in about:
        console.print(line, soft_wrap=True)
    count, batch = result.traffic.num_requests, result.setting.batch
    console.print(report.table(result, f"{name}: {count} requests in batches of {batch}"))
    if result.assumptions and claims.can_compare(result):
        console.print(claims.table(result))


def _about(folder: str, model: Any, result: Any) -> list[str]:
    """What was measured where."""
    import platform
    from datetime import date

    import torch

    place = f"CPU ({platform.processor() or platform.machine()}), {torch.get_num_threads()} thread(s)"
    if model.device.type == "cuda":
        place = torch.cuda.get_device_name(model.device)
    dtype = str(model.dtype).removeprefix("torch.")
    return [f"{Path(folder).name}, {dtype}, {place}, {date.today().isoformat()}", _requests(result)]


def _requests(result: Any) -> str:
    return f"{_drawn(result.traffic)}, random prompts, greedy"


def _drawn(traffic: Any) -> str:
    if traffic.lengths == "trace":
        return f"{traffic.num_requests} requests of the trace's lengths, cut to {traffic.longest} tokens"
    return (
        f"{traffic.num_requests} requests of {traffic.shortest} to {traffic.longest} tokens, prompt and output "
        f"together ({traffic.lengths}, seed {traffic.seed})"
    )


@contextmanager
def _live() -> Iterator[Any]:
    """Bars of the runs on standard error, which shows them live where it is a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Terminal(file=sys.stderr)) as bars:
        yield Bars(bars)


class Bars:
    """Shows each run of a bench as a bar."""

    def __init__(self, bars: Any) -> None:
        self._bars = bars
        self._task: Any = None

    def begins(self, text: str, num_requests: int) -> None:
        """A run of so many requests begins."""
        self._task = self._bars.add_task(text, total=num_requests)

    def answered(self, count: int) -> None:
        """So many of them were answered."""
        if self._task is not None:
            self._bars.update(self._task, advance=count)

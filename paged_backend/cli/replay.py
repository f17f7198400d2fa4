"""``paged-backend replay``: recorded requests through policies, without a model, in virtual time."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from paged_backend.cli.options import AsJson, Terminal, errors_in_words, json_object, naming, start
from paged_backend.errors import ConfigError


def replay(
    trace: Annotated[
        Path,
        typer.Argument(
            dir_okay=False,
            help="Recorded requests: the Azure traces' CSV, the Mooncake traces' JSON lines, or those that "
            "paged_backend.lab.trace_recorder.TraceRecorder writes.",
        ),
    ],
    scheduler: Annotated[
        str, typer.Option(help="Scheduling policies to compare, with commas between; see paged-backend plugins.")
    ] = "fifo",
    scheduler_options: Annotated[
        dict[str, Any] | None,
        typer.Option(
            parser=json_object, metavar="JSON", help='Options by policy, such as {"deadline": {"shed": true}}.'
        ),
    ] = None,
    eviction: Annotated[
        str, typer.Option(help="Eviction policies to compare each of them with, with commas between.")
    ] = "lru",
    eviction_options: Annotated[
        dict[str, Any] | None, typer.Option(parser=json_object, metavar="JSON", help="Options by policy.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="What steps cost: gpu-7b, cpu-135m, or a JSON file that --save-device wrote.")
    ] = "gpu-7b",
    calibrate: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Time steps of this model on this machine instead; a folder or hub id."),
    ] = None,
    save_device: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write the step costs to this JSON file.")
    ] = None,
    seats: Annotated[int, typer.Option(min=1, help="Requests that run at once, at most.")] = 48,
    memory: Annotated[int, typer.Option(min=1, help="Memory for keys and values, in blocks.")] = 16384,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = 16,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Prompt tokens of a step, at most.")] = 512,
    prefix_caching: Annotated[
        bool, typer.Option(help="Keep the beginnings of prompts for those that begin alike.")
    ] = True,
    limit: Annotated[int | None, typer.Option(min=1, help="Replay only so many of the first requests.")] = None,
    rate_scale: Annotated[float, typer.Option(help="How many times as fast requests arrive.")] = 1.0,
    load: Annotated[
        float | None,
        typer.Option(help="Let so much arrive of what the device can do, 1 being all, whatever the trace's own pace."),
    ] = None,
    deadline: Annotated[
        str | None,
        typer.Option(
            help="Deadlines of requests without: tight (2), loose (5) or any multiple of the time that one takes when "
            "half of the seats are taken, and half a second."
        ),
    ] = None,
    length_knowledge: Annotated[
        str,
        typer.Option(
            help="What policies know of output lengths: oracle (the true ones), max (what was allowed) or quantile "
            "(they learn)."
        ),
    ] = "oracle",
    clients: Annotated[int, typer.Option(min=0, help="Share requests of no client out among so many, at random.")] = 0,
    seed: Annotated[int, typer.Option(help="Where random numbers start.")] = 0,
    as_json: AsJson = False,
    plot: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Draw latencies and memory to this image file.")
    ] = None,
) -> None:
    """Compare policies on recorded requests: who waits how long, in seconds of a virtual clock.

    The scheduler, the cache's books and the policies are those that an engine runs; a model is only needed to
    --calibrate. The same command prints the same bytes.
    """
    console = Terminal()
    with errors_in_words():
        from paged_backend.lab import replay as lab
        from paged_backend.lab import report
        from paged_backend.lab.trace import read_trace

        cost = _cost(device, calibrate, save_device, console)
        machine = lab.Machine(cost, seats, memory, block_size, max_num_batched_tokens, prefix_caching)
        if load is not None and rate_scale != 1:
            raise ConfigError(f"--load={load:g} and --rate-scale={rate_scale:g} both set the pace; give one of them")
        with naming(f"the trace {trace} cannot be read"):
            requests = read_trace(trace, limit=limit, rate_scale=rate_scale, clients=clients, seed=seed)
        schedulers, evictions = _names("--scheduler", scheduler), _names("--eviction", eviction)
        _check_names("--scheduler-options", scheduler_options, schedulers)
        _check_names("--eviction-options", eviction_options, evictions)
        results = []
        with Terminal(stderr=True).status("replaying") as status:
            if load is not None:
                status.update("finding out what the device can do")
                requests = lab.at_load(requests, machine, load)
            for name, other in product(schedulers, evictions):
                status.update(f"replaying {len(requests):,} requests under {name}, {other}")
                policies = lab.Policies(
                    name, other, (scheduler_options or {}).get(name, {}), (eviction_options or {}).get(other, {})
                )
                results.append(
                    lab.replay(requests, machine, policies, length_knowledge=length_knowledge, deadline=deadline)  # type: ignore[arg-type]
                )
        if plot is not None:
            with naming(f"{plot} cannot be written"):
                report.plot(results, plot)
        if as_json:
            settings = {
                "trace": trace.name,
                "num_requests": len(requests),
                "rate_scale": rate_scale,
                "load": load,
                "deadline": deadline,
                "length_knowledge": length_knowledge,
                "clients": clients,
                "seed": seed,
            }
            typer.echo(report.to_json(results, machine, settings), nl=False)
            return
        pace = "at their own pace" if rate_scale == 1 else f"{rate_scale:g} times as fast"
        if load is not None:
            pace = f"load {load:g}"
        console.print(
            report.table(
                results,
                f"{trace.name}: {len(requests):,} requests, {pace}, {seats} seats, {memory:,} blocks of {block_size}, "
                f"lengths: {length_knowledge}",
            )
        )


def _names(flag: str, text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise ConfigError(f"{flag}={text!r:.200} must be different names with commas between")
    return names


def _check_names(flag: str, options: dict[str, Any] | None, names: list[str]) -> None:
    """Options of a policy that is not replayed, or that are no object, are a slip."""
    for name, value in (options or {}).items():
        if name not in names or not isinstance(value, dict):
            raise ConfigError(
                f"{flag}: {name!r:.80}: {value!r:.80} must be a JSON object of options for one of {', '.join(names)}"
            )


def _cost(device: str, model: str | None, path: Path | None, console: Console) -> Any:
    """The step costs that the flags name, written to ``path`` if there is one."""
    from paged_backend.lab.step_cost import step_cost

    if model is None:
        cost = step_cost(device)
    else:
        folder = start(model, None, console, {})
        with console.status("timing steps"):
            from paged_backend.lab.calibration import calibrate
            from paged_backend.model.pretrained import load_pretrained

            cost = calibrate(*load_pretrained(folder, {"dtype": "auto"}))
    if path is not None:
        with naming(f"{path} cannot be written"):
            path.write_text(cost.to_json(), encoding="utf-8")
    return cost

"""ReplayFlags: what ``replay``, ``place`` and ``study`` share."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from paged_backend.cli.options import AsJson, check_target, json_object, naming, start
from paged_backend.errors import ConfigError

if TYPE_CHECKING:
    from paged_backend.lab.replay import Machine, Policies
    from paged_backend.lab.trace import TraceRequest

Trace = Annotated[
    Path,
    typer.Argument(
        dir_okay=False,
        help="Recorded requests: the Azure traces' CSV, the Mooncake traces' JSON lines, or those that "
        "paged_backend.lab.trace_recorder.TraceRecorder writes.",
    ),
]


@dataclass(frozen=True)
class ReplayFlags:
    """The policies, the machine, and what is taken of the trace."""

    scheduler: Annotated[
        str, typer.Option(help="Scheduling policies to compare, with commas between; see paged-backend plugins.")
    ] = "fifo"
    scheduler_options: Annotated[
        dict[str, Any] | None,
        typer.Option(
            parser=json_object, metavar="JSON", help='Options by policy, such as {"deadline": {"shed": true}}.'
        ),
    ] = None
    eviction: Annotated[
        str, typer.Option(help="Eviction policies to compare each of them with, with commas between.")
    ] = "lru"
    eviction_options: Annotated[
        dict[str, Any] | None, typer.Option(parser=json_object, metavar="JSON", help="Options by policy.")
    ] = None
    device: Annotated[
        str, typer.Option(help="What steps cost: gpu-7b, cpu-135m, or a JSON file that --save-device wrote.")
    ] = "gpu-7b"
    calibrate: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Time steps of this model on this machine instead; a folder or hub id."),
    ] = None
    save_device: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write the step costs to this JSON file.")
    ] = None
    seats: Annotated[int, typer.Option(min=1, help="Requests that run at once, at most.")] = 48
    memory: Annotated[int, typer.Option(min=1, help="Memory for keys and values, in blocks.")] = 16384
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = 16
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Prompt tokens of a step, at most.")] = 512
    prefix_caching: Annotated[bool, typer.Option(help="Keep the beginnings of prompts for those that begin alike.")] = (
        True
    )
    limit: Annotated[int | None, typer.Option(min=1, help="Replay only so many of the first requests.")] = None
    length_knowledge: Annotated[
        str,
        typer.Option(
            help="What policies know of output lengths: oracle (the true ones), max (what was allowed) or quantile "
            "(they learn)."
        ),
    ] = "oracle"
    clients: Annotated[int, typer.Option(min=0, help="Share requests of no client out among so many, at random.")] = 0
    seed: Annotated[int, typer.Option(help="Where random numbers start.")] = 0
    as_json: AsJson = False

    def machine(self, console: Console) -> Machine:
        """What requests run on, whose step costs are written down if they are to be."""
        from paged_backend.lab.replay import Machine

        cost = _cost(self.device, self.calibrate, self.save_device, console)
        return Machine(cost, self.seats, self.memory, self.block_size, self.max_num_batched_tokens, self.prefix_caching)

    def policies(self) -> list[Policies]:
        """Each scheduler with each eviction. Raises ConfigError for what names none, or the same twice."""
        from paged_backend.lab.replay import Policies

        schedulers, evictions = names("--scheduler", self.scheduler), names("--eviction", self.eviction)
        scheduler_options, eviction_options = self.scheduler_options or {}, self.eviction_options or {}
        check_options("--scheduler-options", scheduler_options, schedulers)
        check_options("--eviction-options", eviction_options, evictions)
        return [
            Policies(one, other, scheduler_options.get(one, {}), eviction_options.get(other, {}))
            for one, other in product(schedulers, evictions)
        ]


def paced_requests(trace: Path, flags: ReplayFlags, rate_scale: float, load: float | None) -> list[TraceRequest]:
    """The requests of a trace, so many times as fast. Raises ConfigError where a load is to set the pace as well."""
    from paged_backend.lab.trace import read_trace

    if load is not None and rate_scale != 1:
        raise ConfigError(f"--load={load:g} and --rate-scale={rate_scale:g} both set the pace; give one of them")
    with naming(f"the trace {trace} cannot be read"):
        return read_trace(trace, limit=flags.limit, rate_scale=rate_scale, clients=flags.clients, seed=flags.seed)


def names(flag: str, text: str) -> list[str]:
    """What stands between the commas of a flag's text; ConfigError if any is empty or there twice."""
    found = [name.strip() for name in text.split(",")]
    if not all(found) or len(set(found)) < len(found):
        raise ConfigError(f"{flag}={text!r:.200} must be different names with commas between")
    return found


def check_options(flag: str, options: dict[str, Any], known: list[str]) -> None:
    """Options of a policy that is not replayed, or that are no object, are a slip."""
    for name, value in options.items():
        if name not in known or not isinstance(value, dict):
            raise ConfigError(
                f"{flag}: {name!r:.80}: {value!r:.80} must be a JSON object of options for one of {', '.join(known)}"
            )


def _cost(device: str, model: str | None, path: Path | None, console: Console) -> Any:
    """The step costs that the flags name, written to ``path`` if there is one."""
    from paged_backend.lab.step_cost import step_cost

    check_target(path)
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

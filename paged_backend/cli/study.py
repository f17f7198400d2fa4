"""``paged-backend study``: policies at several loads, beside yardsticks that know what is to come."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paged_backend.cli.options import Terminal, check_plot, errors_in_words, naming, spread
from paged_backend.cli.replay_flags import ReplayFlags, Trace, names
from paged_backend.errors import ConfigError


@spread
def study(
    trace: Trace,
    flags: ReplayFlags = ReplayFlags(),  # noqa: B008
    loads: Annotated[
        str,
        typer.Option(help="How much arrives of what the device can do, 1 being all; numbers with commas between."),
    ] = "0.7,0.9,1.1,1.3",
    deadline: Annotated[
        str | None,
        typer.Option(
            help="Deadlines of requests without, one study for each: tight, loose or a multiple, as for replay, with "
            "commas between."
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Draw the share in time and P99 latency against load to this image file."),
    ] = None,
) -> None:
    """Compare policies at several loads, and with yardsticks: how much of what could be had they reach.

    Yardsticks have a star. oracle_sjf, moore_hodgson and belady know the trace, which no engine can; fifo_shed gives up
    what deadline with shed would, and is fifo else. The same command prints the same bytes.
    """
    console = Terminal()
    with errors_in_words():
        from paged_backend.lab import study as lab
        from paged_backend.lab.trace import read_trace

        check_plot(plot)
        machine, policies = flags.machine(console), flags.policies()
        deadlines = [] if deadline is None else names("--deadline", deadline)
        with naming(f"the trace {trace} cannot be read"):
            requests = read_trace(trace, limit=flags.limit, clients=flags.clients, seed=flags.seed)
        with Terminal(stderr=True).status("replaying") as status:
            points = lab.study(
                requests,
                machine,
                policies,
                _numbers(loads),
                deadlines,
                length_knowledge=flags.length_knowledge,  # type: ignore[arg-type]
                on_replay=status.update,
            )
        if plot is not None:
            with naming(f"{plot} cannot be written"):
                lab.plot(points, plot)
        if flags.as_json:
            settings = {
                "trace": trace.name,
                "num_requests": len(requests),
                "length_knowledge": flags.length_knowledge,
                "clients": flags.clients,
                "seed": flags.seed,
            }
            typer.echo(lab.to_json(points, machine, settings), nl=False)
            return
        title = f"{trace.name}: {len(requests):,} requests, lengths: {flags.length_knowledge}"
        for table in lab.tables(points, title):
            console.print(table)


def _numbers(text: str) -> list[float]:
    numbers = names("--loads", text)
    try:
        return [float(number) for number in numbers]
    except ValueError as error:
        raise ConfigError(f"--loads={text!r:.200} must be numbers with commas between, such as 0.9,1.1") from error

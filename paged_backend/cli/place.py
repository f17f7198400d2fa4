"""``paged-backend place``: recorded requests over several engines, without a model, in virtual time."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from paged_backend.cli.options import Terminal, check_plot, errors_in_words, json_object, naming, spread
from paged_backend.cli.replay_flags import ReplayFlags, Trace, check_options, names, paced_requests


@spread
def place(
    trace: Trace,
    flags: ReplayFlags = ReplayFlags(),  # noqa: B008
    replicas: Annotated[int, typer.Option(min=1, help="How many engines there are, all alike.")] = 8,
    router: Annotated[
        str, typer.Option(help="Routing policies to compare, with commas between; see paged-backend plugins.")
    ] = "round_robin,prefix_affinity",
    router_options: Annotated[
        dict[str, Any] | None,
        typer.Option(
            parser=json_object, metavar="JSON", help='Options by policy, such as {"prefix_affinity": {"factor": 2}}.'
        ),
    ] = None,
    rate_scale: Annotated[float, typer.Option(help="How many times as fast requests arrive.")] = 1.0,
    load: Annotated[
        float | None,
        typer.Option(help="Let so much arrive of what all replicas can do, 1 being all, whatever the trace's pace."),
    ] = None,
    deadline: Annotated[
        str | None, typer.Option(help="Deadlines of requests without: tight, loose or a multiple, as for replay.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Draw first tokens and loads to this image file.")
    ] = None,
) -> None:
    """Compare ways to share recorded requests out among several engines, in seconds of a virtual clock.

    Each replica is what replay runs, with a prefix cache of its own. The same command prints the same bytes.
    """
    console = Terminal()
    with errors_in_words():
        from paged_backend.lab import placement as lab
        from paged_backend.lab import placement_report as report

        check_plot(plot)
        machine = flags.machine(console)
        routers, options = names("--router", router), router_options or {}
        check_options("--router-options", options, routers)
        requests = paced_requests(trace, flags, rate_scale, load)
        results = []
        with Terminal(stderr=True).status("placing") as status:
            compared = list(product(routers, flags.policies()))
            if load is not None:
                status.update("finding out what the replicas can do")
                requests = lab.at_load(requests, machine, replicas, load)
            for name, policies in compared:
                status.update(f"placing {len(requests):,} requests by {name}")
                results.append(
                    lab.place(
                        requests,
                        machine,
                        replicas,
                        lab.Routing(name, options.get(name, {})),
                        policies,
                        length_knowledge=flags.length_knowledge,  # type: ignore[arg-type]
                        deadline=deadline,
                    )
                )
        if plot is not None:
            with naming(f"{plot} cannot be written"):
                report.plot(results, plot)
        if flags.as_json:
            settings = {
                "trace": trace.name,
                "num_requests": len(requests),
                "replicas": replicas,
                "rate_scale": rate_scale,
                "load": load,
                "deadline": deadline,
                "length_knowledge": flags.length_knowledge,
                "clients": flags.clients,
                "seed": flags.seed,
            }
            typer.echo(report.to_json(results, machine, settings), nl=False)
            return
        pace = f"load {load:g}" if load is not None else f"{rate_scale:g} times as fast"
        console.print(
            report.table(
                results,
                f"{trace.name}: {len(requests):,} requests, {pace}, {replicas:,} replicas of {flags.seats} seats and "
                f"{flags.memory:,} blocks of {flags.block_size}, lengths: {flags.length_knowledge}",
            )
        )

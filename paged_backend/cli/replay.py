"""``paged-backend replay``: recorded requests through policies, without a model, in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paged_backend.cli.options import Terminal, check_plot, errors_in_words, naming, spread
from paged_backend.cli.replay_flags import ReplayFlags, Trace, paced_requests


@spread
def replay(
    trace: Trace,
    flags: ReplayFlags = ReplayFlags(),  # noqa: B008
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

        check_plot(plot)
        machine = flags.machine(console)
        requests = paced_requests(trace, flags, rate_scale, load)
        results = []
        with Terminal(stderr=True).status("replaying") as status:
            compared = flags.policies()
            if load is not None:
                status.update("finding out what the device can do")
                requests = lab.at_load(requests, machine, load)
            for policies in compared:
                status.update(f"replaying {len(requests):,} requests under {policies.scheduler}, {policies.eviction}")
                results.append(
                    lab.replay(
                        requests,
                        machine,
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
                "rate_scale": rate_scale,
                "load": load,
                "deadline": deadline,
                "length_knowledge": flags.length_knowledge,
                "clients": flags.clients,
                "seed": flags.seed,
            }
            typer.echo(report.to_json(results, machine, settings), nl=False)
            return
        pace = "at their own pace" if rate_scale == 1 else f"{rate_scale:g} times as fast"
        if load is not None:
            pace = f"load {load:g}"
        console.print(
            report.table(
                results,
                f"{trace.name}: {len(requests):,} requests, {pace}, {flags.seats} seats, {flags.memory:,} blocks of "
                f"{flags.block_size}, lengths: {flags.length_knowledge}",
            )
        )

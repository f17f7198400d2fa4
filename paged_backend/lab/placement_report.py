"""Placement report: what placements came to, in numbers, as a table and as a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paged_backend.lab.figure import new_figure, save
from paged_backend.lab.placement import Placed
from paged_backend.lab.replay import Machine
from paged_backend.lab.report import numbers, side_by_side

if TYPE_CHECKING:
    from rich.table import Table

# The numbers in the order in which they are shown: what each is called, and how it is written.
_ROWS = (
    ("num_finished", "finished", "{:,}"),
    ("num_timed_out", "given up", "{:,}"),
    ("num_refused", "refused", "{:,}"),
    ("seconds", "seconds in all", "{:.1f}"),
    ("ttft_mean_s", "first token, mean s", "{:.2f}"),
    ("ttft_p99_s", "first token, P99 s", "{:.2f}"),
    ("latency_mean_s", "latency, mean s", "{:.2f}"),
    ("latency_p99_s", "latency, P99 s", "{:.2f}"),
    ("attainment", "deadlines met", "{:.1%}"),
    ("tokens_per_s", "output tokens per s", "{:.1f}"),
    ("num_preemptions", "preemptions", "{:,}"),
    ("prefix_hit_rate", "prompt tokens cached", "{:.1%}"),
    ("load_imbalance", "busiest over mean", "{:.2f}"),
    ("kv_peak", "memory held, peak", "{:.1%}"),
    ("policy_errors", "broken contracts", "{:,}"),
)


def metrics(placed: Placed) -> dict[str, float | None]:
    """What ``report.metrics`` tells, of all replicas together, and ``load_imbalance``.

    load_imbalance: tokens that the busiest replica computed, prompts and answers, over the mean of all. service_gap is
    the largest of any replica.
    """
    engines = [replayed.stats for replayed in placed.replicas]
    gaps = [replayed.service_gap for replayed in placed.replicas if replayed.service_gap is not None]
    found = numbers(placed.outcomes, placed.seconds, engines, max(gaps, default=None))
    work = [stats.num_prefill_tokens + stats.num_generated_tokens for stats in engines]
    found["load_imbalance"] = max(work) * len(work) / sum(work) if any(work) else None
    found["policy_errors"] = (found["policy_errors"] or 0) + sum(placed.policy_errors.values())
    return found


def to_json(results: Sequence[Placed], machine: Machine, settings: dict[str, Any]) -> str:
    """One JSON object: the machine, the settings, and for each placement its policies and numbers."""
    rows = [
        {
            "router": result.routing.router,
            "router_options": dict(result.routing.options),
            **asdict(result.policies),
            "num_replicas": len(result.replicas),
            "metrics": metrics(result),
            "requests_of_replicas": [len(replayed.outcomes) for replayed in result.replicas],
            "policy_errors": result.policy_errors,
        }
        for result in results
    ]
    return json.dumps({"machine": asdict(machine), "settings": settings, "placements": rows}, indent=1) + "\n"


def table(results: Sequence[Placed], title: str) -> Table:
    """A column for each placement, a row for each number that any of them has; what is 0 in all is left out."""
    return side_by_side([(_label(result, results), metrics(result)) for result in results], _ROWS, title)


def _label(placed: Placed, results: Sequence[Placed]) -> str:
    """The names that tell a placement from the others."""
    names = [placed.routing.router]
    for name in ("scheduler", "eviction"):
        if len({getattr(result.policies, name) for result in results}) > 1:
            names.append(getattr(placed.policies, name))
    return "\n".join(names)


def plot(results: Sequence[Placed], path: Path) -> None:
    """Draw times to the first token as a cumulative share, and what each replica computed, to an image file.

    Raises ConfigError without matplotlib, or for a kind of file that it cannot write.
    """
    figure = new_figure(11, 4.5)
    left, right = figure.subplots(1, 2)
    for result in results:
        label = _label(result, results).replace("\n", ", ")
        waits = sorted(o.first_token - o.arrival for o in result.outcomes if o.first_token is not None)
        left.plot(waits, np.arange(1, len(waits) + 1) / max(1, len(waits)), label=label)
        work = [r.stats.num_prefill_tokens + r.stats.num_generated_tokens for r in result.replicas]
        right.plot(range(1, len(work) + 1), sorted(work, reverse=True), label=label)
    left.set(xlabel="time to the first token, s", ylabel="share of requests", ylim=(0, 1), xscale="log")
    right.set(xlabel="replicas, busiest first", ylabel="tokens computed", ylim=(0, None))
    left.legend()
    save(figure, path)

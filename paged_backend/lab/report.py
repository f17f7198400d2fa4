"""Report: what replays came to, in numbers, as a table and as a plot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paged_backend.lab.figure import new_figure, save
from paged_backend.lab.replay import Machine, Outcome, Policies, Replayed
from paged_backend.stats import EngineStats

if TYPE_CHECKING:
    from rich.table import Table

# The numbers in the order in which they are shown: what each is called, and how it is written.
_ROWS = (
    ("num_finished", "finished", "{:,}"),
    ("num_timed_out", "given up", "{:,}"),
    ("num_refused", "refused", "{:,}"),
    ("seconds", "seconds in all", "{:.1f}"),
    ("ttft_mean_s", "first token, mean s", "{:.2f}"),
    ("ttft_p50_s", "first token, P50 s", "{:.2f}"),
    ("ttft_p99_s", "first token, P99 s", "{:.2f}"),
    ("latency_mean_s", "latency, mean s", "{:.2f}"),
    ("latency_p50_s", "latency, P50 s", "{:.2f}"),
    ("latency_p99_s", "latency, P99 s", "{:.2f}"),
    ("inter_token_mean_s", "between tokens, mean s", "{:.4f}"),
    ("inter_token_p50_s", "between tokens, P50 s", "{:.4f}"),
    ("inter_token_p99_s", "between tokens, P99 s", "{:.4f}"),
    ("attainment", "deadlines met", "{:.1%}"),
    ("goodput_per_s", "in time, per s", "{:.3f}"),
    ("tokens_per_s", "output tokens per s", "{:.1f}"),
    ("service_gap", "service gap of clients", "{:,.0f}"),
    ("num_preemptions", "preemptions", "{:,}"),
    ("num_recomputed_tokens", "recomputed tokens", "{:,}"),
    ("prefix_hit_rate", "prompt tokens cached", "{:.1%}"),
    ("kv_mean", "memory held, mean", "{:.1%}"),
    ("kv_peak", "memory held, peak", "{:.1%}"),
    ("kv_waste", "of it unfilled", "{:.1%}"),
    ("policy_errors", "broken contracts", "{:,}"),
)


def metrics(replayed: Replayed) -> dict[str, float | None]:
    """Numbers by name; None for what there is none of, such as deadlines.

    ttft, latency: seconds from arrival to the first token and to the end, of requests that came to their own end.
    inter_token: of each, the mean time between its tokens. attainment: the share of requests with a deadline that met
    it. goodput_per_s: requests a second that met it, or have none and ended. prefix_hit_rate: of all prompt tokens.
    kv: shares of the blocks of memory, over time.
    """
    return numbers(replayed.outcomes, replayed.seconds, [replayed.stats], replayed.service_gap)


def numbers(
    outcomes: Sequence[Outcome], seconds: float, engines: Sequence[EngineStats], service_gap: float | None
) -> dict[str, float | None]:
    """What ``metrics`` tells, of requests that ran on any number of engines.

    kv_mean and kv_waste are of the memory of all engines, kv_peak is that of the one where it was highest.
    """
    ended = [outcome for outcome in outcomes if outcome.reason in ("stop", "length")]
    due = [outcome for outcome in outcomes if outcome.deadline is not None or outcome.reason == "refused"]
    in_time = [outcome for outcome in ended if _is_in_time(outcome)]
    with_deadline = any(outcome.deadline is not None for outcome in outcomes)
    groups = [group for stats in engines for group in stats.groups]
    num_prompt_tokens = sum(stats.num_prompt_tokens for stats in engines)
    num_generated_tokens = sum(stats.num_generated_tokens for stats in engines)
    allocated = sum(group.mean_allocated_slots for group in groups)
    return {
        "num_finished": len(ended),
        "num_timed_out": sum(outcome.reason == "timeout" for outcome in outcomes),
        "num_refused": sum(outcome.reason == "refused" for outcome in outcomes),
        "seconds": seconds,
        **spread("ttft", [o.first_token - o.arrival for o in ended if o.first_token is not None]),
        **spread("latency", [o.finished - o.arrival for o in ended if o.finished is not None]),
        **spread("inter_token", [gap for o in ended if (gap := inter_token(o)) is not None]),
        "attainment": sum(o.deadline is not None for o in in_time) / len(due) if with_deadline else None,
        "goodput_per_s": len(in_time) / seconds if seconds else None,
        "tokens_per_s": num_generated_tokens / seconds if seconds else None,
        "service_gap": service_gap,
        "num_preemptions": sum(stats.num_preemptions for stats in engines),
        "num_recomputed_tokens": sum(stats.num_recomputed_tokens for stats in engines),
        "prefix_hit_rate": sum(stats.num_cached_tokens for stats in engines) / num_prompt_tokens
        if num_prompt_tokens
        else None,
        "kv_mean": allocated / sum(group.num_reserved_slots for group in groups),
        "kv_peak": max(group.peak_allocated_slots / group.num_reserved_slots for group in groups),
        "kv_waste": sum(group.mean_wasted_slots for group in groups) / allocated if allocated else 0.0,
        "policy_errors": sum(sum(stats.policy_errors.values()) for stats in engines),
    }


def _is_in_time(outcome: Outcome) -> bool:
    return outcome.deadline is None or (outcome.finished is not None and outcome.finished <= outcome.deadline)


def inter_token(outcome: Outcome) -> float | None:
    """The mean seconds between an outcome's tokens; None with fewer than two."""
    if outcome.first_token is None or outcome.finished is None or outcome.num_output_tokens < 2:
        return None
    return (outcome.finished - outcome.first_token) / (outcome.num_output_tokens - 1)


def spread(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """Mean, median and 99th percentile of ``seconds`` under names that begin with ``name``; None of nothing."""
    if not seconds:
        return dict.fromkeys((f"{name}_mean_s", f"{name}_p50_s", f"{name}_p99_s"))
    p50, p99 = np.percentile(seconds, (50, 99)).tolist()
    return {f"{name}_mean_s": sum(seconds) / len(seconds), f"{name}_p50_s": p50, f"{name}_p99_s": p99}


def to_json(results: Sequence[Replayed], machine: Machine, settings: dict[str, Any]) -> str:
    """One JSON object: the machine, the settings, and for each replay its policies, numbers and memory over time."""
    rows = [
        {
            **asdict(result.policies),
            "metrics": metrics(result),
            "policy_errors": result.stats.policy_errors,
            "memory": [
                {"time": time, "owned_blocks": owned, "cached_blocks": cached}
                for time, owned, cached in result.usage.moments
            ],
        }
        for result in results
    ]
    return json.dumps({"machine": asdict(machine), "settings": settings, "replays": rows}, indent=1) + "\n"


def table(results: Sequence[Replayed], title: str) -> Table:
    """A column for each replay, a row for each number that any of them has; numbers that are 0 in all are left out."""
    columns = [(_label(result.policies, results), metrics(result)) for result in results]
    return side_by_side(columns, _ROWS, title)


def side_by_side(
    columns: Sequence[tuple[str, Mapping[str, float | None]]], rows: Sequence[tuple[str, str, str]], title: str
) -> Table:
    """A table of columns, each a heading and numbers by name.

    rows: of each number the name, the words and the form. One that is 0 or nothing in all columns is left out.
    """
    from rich.table import Column, Table

    shown = Table("", *(Column(heading, justify="right") for heading, _ in columns), title=title)
    for name, text, form in rows:
        values = [found[name] for _, found in columns]
        if any(values):
            shown.add_row(text, *("" if value is None else form.format(value) for value in values))
    return shown


def _label(policies: Policies, results: Sequence[Replayed]) -> str:
    """The names that tell a replay from the others."""
    several = len({result.policies.eviction for result in results}) > 1
    return f"{policies.scheduler}\n{policies.eviction}" if several else policies.scheduler


def plot(results: Sequence[Replayed], path: Path) -> None:
    """Draw latencies as a cumulative share, and memory over time, to an image file.

    Raises ConfigError without matplotlib, or for a kind of file that it cannot write.
    """
    figure = new_figure(11, 4.5)
    left, right = figure.subplots(1, 2)
    for result in results:
        label = _label(result.policies, results).replace("\n", ", ")
        latencies = sorted(
            outcome.finished - outcome.arrival
            for outcome in result.outcomes
            if outcome.finished is not None and outcome.reason in ("stop", "length")
        )
        left.plot(latencies, np.arange(1, len(latencies) + 1) / max(1, len(latencies)), label=label)
        times, owned, _ = zip(*result.usage.moments, strict=True) if result.usage.moments else ((), (), ())
        right.plot(times, np.array(owned) / result.usage.num_blocks, label=label, linewidth=0.8)
    left.set(xlabel="latency, s", ylabel="share of requests", ylim=(0, 1), xscale="log")
    right.set(xlabel="time, s", ylabel="share of memory held", ylim=(0, 1))
    left.legend()
    save(figure, path)

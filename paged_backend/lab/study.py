"""Study: policies on one trace at several loads, beside yardsticks that tell how much better they could be."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paged_backend.lab.figure import new_figure, save
from paged_backend.lab.replay import LengthKnowledge, Machine, Policies, at_loads, replay
from paged_backend.lab.report import metrics
from paged_backend.lab.trace import TraceRequest
from paged_backend.lab.yardsticks import EVICTIONS, SCHEDULERS

if TYPE_CHECKING:
    from rich.table import Table

# The columns in the order in which they are shown: what each is called, and how it is written.
_COLUMNS = (
    ("latency_mean_s", "mean s", "{:.2f}"),
    ("latency_p99_s", "P99 s", "{:.2f}"),
    ("num_timed_out", "given up", "{:,}"),
    ("of_sjf_gain", "of SJF's gain", "{:.1%}"),
    ("attainment", "in time", "{:.1%}"),
    ("of_moore_hodgson", "of Moore-Hodgson", "{:.1%}"),
    ("prefix_hit_rate", "cached", "{:.1%}"),
    ("of_belady", "of Belady", "{:.1%}"),
    ("policy_errors", "broken contracts", "{:,}"),
)


@dataclass(frozen=True)
class Point:
    """One replay of a study.

    deadline: of requests that have none in the trace, see ``replay``. metrics: see ``report.metrics``, and shares of
    what yardsticks of the same load and deadline reach: ``of_sjf_gain`` of the mean latency that ``oracle_sjf`` takes
    off that of ``fifo``, ``of_moore_hodgson`` of its attainment, ``of_belady`` of its hits; None where they tell
    nothing, such as the latency of those who are left when others were given up.
    """

    load: float
    deadline: str | None
    policies: Policies
    metrics: dict[str, float | None]

    @property
    def is_yardstick(self) -> bool:
        """Whether it knows what no engine can, or stands for the plainest way."""
        return self.policies.scheduler in SCHEDULERS or self.policies.eviction in EVICTIONS


def study(
    trace: Sequence[TraceRequest],
    machine: Machine,
    policies: Sequence[Policies],
    loads: Sequence[float],
    deadlines: Sequence[str] = (),
    *,
    length_knowledge: LengthKnowledge = "oracle",
    on_replay: Callable[[str], None] = lambda text: None,
) -> list[Point]:
    """Replay ``trace`` under ``policies`` and the yardsticks, at each of ``loads`` and ``deadlines``.

    ``fifo`` and ``oracle_sjf`` come along always, ``fifo_shed`` and ``moore_hodgson`` where there are deadlines,
    ``belady`` where prefixes are cached. on_replay: told what begins. Raises what ``replay`` and ``at_load`` do.
    """
    compared = [*policies]
    eviction = replace(policies[0], scheduler="fifo", scheduler_options={})
    compared += [eviction, replace(eviction, scheduler="oracle_sjf")]
    if deadlines or any(request.deadline_s is not None for request in trace):
        compared += [replace(eviction, scheduler=name) for name in ("fifo_shed", "moore_hodgson")]
    if machine.enable_prefix_caching:
        compared.append(Policies(eviction="belady"))
    compared = [one for place, one in enumerate(compared) if one not in compared[:place]]
    on_replay("finding out what the device can do")
    points = []
    for load, requests in zip(loads, at_loads(trace, machine, loads), strict=True):
        for deadline in deadlines or (None,):
            here = []
            for chosen in compared:
                on_replay(f"load {load:g}, deadlines {deadline}: {chosen.scheduler}, {chosen.eviction}")
                replayed = replay(requests, machine, chosen, length_knowledge=length_knowledge, deadline=deadline)
                here.append(Point(load, deadline, chosen, metrics(replayed)))
            points += _with_shares(here)
    return points


def _with_shares(points: Sequence[Point]) -> list[Point]:
    """The points of one load and deadline, with what they reach of the yardsticks."""

    def of(name: str, metric: str) -> float | None:
        found = next((p for p in points if name in (p.policies.scheduler, p.policies.eviction)), None)
        return None if found is None else found.metrics[metric]

    fifo_s, sjf_s = of("fifo", "latency_mean_s"), of("oracle_sjf", "latency_mean_s")
    gain_s = None if fifo_s is None or sjf_s is None else fifo_s - sjf_s
    most, hits = of("moore_hodgson", "attainment"), of("belady", "prefix_hit_rate")
    found = []
    for point in points:
        numbers = dict(point.metrics)
        mean_s = None if numbers["num_timed_out"] or fifo_s is None else numbers["latency_mean_s"]
        numbers["of_sjf_gain"] = None if mean_s is None or fifo_s is None else _share(fifo_s - mean_s, gain_s)
        numbers["of_moore_hodgson"] = _share(numbers["attainment"], most)
        numbers["of_belady"] = _share(numbers["prefix_hit_rate"], hits)
        found.append(replace(point, metrics=numbers))
    return found


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or whole is None or whole <= 0 else part / whole


def tables(points: Sequence[Point], title: str) -> list[Table]:
    """A table for each load and deadline, a row for each replay; columns that are 0 or missing in all are left out."""
    from rich.table import Column, Table

    shown = []
    columns = [column for column in _COLUMNS if any(point.metrics[column[0]] for point in points)]
    for load, deadline in dict.fromkeys((point.load, point.deadline) for point in points):
        here = f"{title}, load {load:g}" if deadline is None else f"{title}, load {load:g}, deadlines {deadline}"
        table = Table(Column(no_wrap=True), *(Column(text, justify="right") for _, text, _ in columns), title=here)
        for point, label in zip(points, _labels(points), strict=True):
            if (point.load, point.deadline) == (load, deadline):
                values = ((point.metrics[name], form) for name, _, form in columns)
                table.add_row(label, *("" if value is None else form.format(value) for value, form in values))
        shown.append(table)
    return shown


def _labels(points: Sequence[Point]) -> list[str]:
    """Of each point the names that tell it from the others; yardsticks have a star."""
    several = len({point.policies.eviction for point in points if not point.is_yardstick}) > 1
    names = []
    for point in points:
        scheduler, eviction = point.policies.scheduler, point.policies.eviction
        name = f"{scheduler}, {eviction}" if several or eviction in EVICTIONS else scheduler
        names.append(f"{name} *" if point.is_yardstick else name)
    return names


def to_json(points: Sequence[Point], machine: Machine, settings: dict[str, Any]) -> str:
    """One JSON object: the machine, the settings, and the points."""
    rows = [{**asdict(point), "is_yardstick": point.is_yardstick} for point in points]
    return json.dumps({"machine": asdict(machine), "settings": settings, "points": rows}, indent=1) + "\n"


def plot(points: Sequence[Point], path: Path) -> None:
    """Draw the share in time and P99 latency against load, a line for each policy, a row of plots for each deadline.

    Yardsticks are dashed. Raises ConfigError without matplotlib, or for a kind of file that it cannot write.
    """
    deadlines = list(dict.fromkeys(point.deadline for point in points))
    drawn = new_figure(11, 4.5 * len(deadlines))
    rows = drawn.subplots(len(deadlines), 2, squeeze=False)
    for (left, right), deadline in zip(rows, deadlines, strict=True):
        lines: dict[str, list[Point]] = {}
        for point, label in zip(points, _labels(points), strict=True):
            if point.deadline == deadline:
                lines.setdefault(label, []).append(point)
        for label, line in lines.items():
            style = {"label": label, "marker": ".", "linestyle": "--" if line[0].is_yardstick else "-"}
            for axes, name in ((left, "attainment"), (right, "latency_p99_s")):
                # A number that there is none of leaves a hole.
                values = [float("nan") if (value := point.metrics[name]) is None else value for point in line]
                axes.plot([point.load for point in line], values, **style)
        suffix = "" if deadline is None else f", deadlines {deadline}"
        left.set(xlabel="load", ylabel=f"share in time{suffix}", ylim=(0, 1.02))
        right.set(xlabel="load", ylabel=f"P99 latency, s{suffix}", yscale="log")
        right.legend(fontsize="small")
    save(drawn, path)

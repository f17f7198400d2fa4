"""Bench report: what ways of batching came to, as numbers, a table and a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paged_backend.lab.bench import POOL_SHARE, Bench, Measured
from paged_backend.lab.figure import new_figure, save
from paged_backend.lab.report import inter_token, spread
from paged_backend.lab.run import Run

if TYPE_CHECKING:
    from rich.table import Table

# The numbers in the order in which they are shown: what each is called, how it is written, and whether less is better;
# None for what is compared with nothing.
_ROWS: tuple[tuple[str, str, str, bool | None], ...] = (
    ("latency_mean_s", "mean latency, s", "{:.2f}", True),
    ("latency_p99_s", "P99 latency, s", "{:.2f}", True),
    ("compute_utilisation", "compute utilisation", "{:.1%}", False),
    ("kv_utilisation", "KV memory utilisation", "{:.1%}", False),
    ("requests_per_s", "requests a second", "{:.2f}", False),
    ("short_latency_mean_s", "mean latency of short ones, s", "{:.2f}", True),
    ("ttft_mean_s", "first token, mean s", "{:.2f}", True),
    ("ttft_p99_s", "first token, P99 s", "{:.2f}", True),
    ("inter_token_p50_s", "between tokens, P50 s", "{:.4f}", True),
    ("inter_token_p99_s", "between tokens, P99 s", "{:.4f}", True),
    ("tokens_per_s", "output tokens a second", "{:.1f}", False),
    ("waste", "positions computed in vain", "{:.1%}", None),
    ("num_preemptions", "preemptions", "{:,}", None),
    ("prefix_hit_rate", "prompt tokens cached", "{:.1%}", None),
)


def metrics(bench: Bench, measured: Measured) -> dict[str, float | None]:
    """Numbers of one mode by name.

    Of the run whose requests arrive at their times: latency and ttft, seconds from when a request was due to its answer
    and to its first token; inter_token, of each request the mean seconds between its tokens; short_latency, of short
    ones in traffic that has them. Of the run in which all were there at once: compute_utilisation, the operations that
    the requests needed over those that the machine could have done; kv_utilisation, filled over allocated slots,
    weighted by time; requests and tokens per second; waste, the share of positions computed that were padding or had
    been computed before.
    """
    arriving, saturated = measured.arriving, measured.saturated
    pairs = zip(arriving.outcomes, bench.traffic.draw(), strict=True)
    short = [outcome for outcome, request in pairs if bench.traffic.is_short(request)]
    num_prompt_tokens = sum(outcome.num_prompt_tokens for outcome in saturated.outcomes)
    return {
        **spread("latency", latencies(arriving)),
        **spread("short_latency", _since_arrival(short) if bench.traffic.lengths == "short" else []),
        **spread("ttft", [o.first_token - o.arrival for o in arriving.outcomes if o.first_token is not None]),
        **spread("inter_token", [gap for o in arriving.outcomes if (gap := inter_token(o)) is not None]),
        "compute_utilisation": bench.compute_utilisation(saturated),
        "kv_utilisation": saturated.kv_utilisation,
        "requests_per_s": len(saturated.outcomes) / saturated.seconds,
        "tokens_per_s": sum(outcome.num_output_tokens for outcome in saturated.outcomes) / saturated.seconds,
        "waste": saturated.waste,
        "num_preemptions": saturated.num_preemptions + arriving.num_preemptions,
        "prefix_hit_rate": saturated.num_cached_tokens / num_prompt_tokens,
    }


def latencies(run: Run) -> list[float]:
    """Seconds from when each request was due to its answer."""
    return _since_arrival(run.outcomes)


def _since_arrival(outcomes: Sequence[Any]) -> list[float]:
    return [outcome.finished - outcome.arrival for outcome in outcomes]


def rows(bench: Bench) -> list[tuple[str, list[tuple[str, float | None]]]]:
    """What the table shows: of each number its name, and for each mode what it is and how many times better the last
    mode is, None where that says nothing. Numbers that no mode has are left out."""
    columns = [metrics(bench, measured) for measured in bench.measured]
    shown = []
    for name, text, form, less_is_better in _ROWS:
        values = [column[name] for column in columns]
        if any(values):
            gains = [_gain(value, values[-1], less_is_better) for value in values[:-1]]
            cells = ["" if value is None else form.format(value) for value in values]
            shown.append((text, list(zip(cells, [*gains, None], strict=True))))
    return shown


def table(bench: Bench, title: str) -> Table:
    """A column for each mode, and for each but the last how many times better the last one is."""
    from rich.table import Column, Table

    headings = [Column(measured.mode.text.replace(", ", "\n"), justify="right") for measured in bench.measured]
    shown = Table("", *headings, title=title, caption=definitions(bench), caption_justify="left")
    for text, cells in rows(bench):
        shown.add_row(text, *(cell if gain is None else f"{cell} ({gain:.1f}x)" for cell, gain in cells))
    return shown


def _gain(value: float | None, last: float | None, less_is_better: bool | None) -> float | None:
    """How many times better ``last`` is than ``value``; None where that says nothing."""
    if less_is_better is None or not value or not last:
        return None
    return value / last if less_is_better else last / value


def definitions(bench: Bench) -> str:
    """What the numbers mean, in words."""
    last = bench.measured[-1].mode.text
    when = f"requests arrive at {bench.rate:.2f} a second ({bench.setting.arrivals})"
    if bench.setting.arrivals == "at-once":
        when = "all requests are there at once"
    ceiling = f"{bench.ceiling / 1e12:,.0f} TFLOP/s, the device's peak"
    pool = "our pool is all that the weights leave"
    if not bench.assumptions:
        ceiling = f"{bench.ceiling / 1e9:,.0f} GFLOP/s, the fastest matrix product measured in this run"
        pool = f"our pool is {POOL_SHARE:.0%} of what the longest batch would need"
    if "block_size" in bench.setting.engine:
        pool += f", in blocks of {bench.setting.engine['block_size']}"
    lines = [
        f"In brackets: how many times better {last} is.",
        f"Latencies: {when}; a batch is answered as a whole, a continuous request at its own last token. First tokens "
        "count when they are computed; between tokens is the time from then to the answer, for each further token.",
        "Utilisation and throughput: all requests are there at once.",
        f"Compute utilisation: what the requests' tokens needed, of {ceiling}.",
        "KV memory utilisation: slots that hold a token of an unfinished request, of those allocated, over time; "
        f"{pool}.",
    ]
    return "\n".join([*lines, bench.assumptions] if bench.assumptions else lines)


def to_json(bench: Bench, about: dict[str, Any]) -> str:
    """One JSON object: about, the setting, the traffic, and for each mode its numbers and outcomes."""
    modes = [
        {
            "mode": measured.mode.name,
            "metrics": metrics(bench, measured),
            "arriving": [asdict(outcome) for outcome in measured.arriving.outcomes],
            "saturated": [asdict(outcome) for outcome in measured.saturated.outcomes],
        }
        for measured in bench.measured
    ]
    traffic = {name: value for name, value in asdict(bench.traffic).items() if name != "trace"}
    setting = {**asdict(bench.setting), "engine": {name: str(value) for name, value in bench.setting.engine.items()}}
    numbers = {"rate_per_s": bench.rate, "ceiling_flops": bench.ceiling, **asdict(bench.cost)}
    return json.dumps({**about, "traffic": traffic, "setting": setting, **numbers, "modes": modes}, indent=1) + "\n"


def plot(bench: Bench, path: Path) -> None:
    """Draw latencies as a cumulative share, and the use of KV memory over time, to an image file.

    Raises ConfigError without matplotlib, or for a kind of file that it cannot write.
    """
    figure = new_figure(11, 4.5)
    left, right = figure.subplots(1, 2)
    for measured in bench.measured:
        ordered = sorted(latencies(measured.arriving))
        left.step(
            ordered, [(n + 1) / len(ordered) for n in range(len(ordered))], label=measured.mode.text, where="post"
        )
        memory = measured.saturated.memory
        shares = [moment.filled / moment.allocated if moment.allocated else 0.0 for moment in memory]
        right.step([moment.time for moment in memory], shares, linewidth=0.8, where="post")
    left.set(xlabel="latency, s", ylabel="share of requests", ylim=(0, 1))
    right.set(xlabel="time, s, all at once", ylabel="allocated slots that are filled", ylim=(0, 1))
    left.legend()
    save(figure, path)

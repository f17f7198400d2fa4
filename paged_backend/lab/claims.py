"""Claims: the figures that this project set out from, beside what a bench came to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paged_backend.lab.bench import Bench
from paged_backend.lab.bench_report import metrics

if TYPE_CHECKING:
    from rich.table import Table

# Said of a model with 7 billion weights, batches of 32, and random lengths from 64 to 1024: static, window, continuous.
_CLAIMS: tuple[tuple[str, str, str, tuple[float, float, float]], ...] = (
    ("latency_mean_s", "mean latency, ms", "{:.0f}", (0.320, 0.210, 0.095)),
    ("latency_p99_s", "P99 latency, ms", "{:.0f}", (0.850, 0.490, 0.180)),
    ("compute_utilisation", "compute utilisation, %", "{:.0f}", (0.62, 0.78, 0.94)),
    ("kv_utilisation", "KV memory utilisation, %", "{:.0f}", (0.55, 0.68, 0.91)),
    ("requests_per_s", "requests a second", "{:.0f}", (12.0, 18.0, 38.0)),
)
_UNITS = {"latency_mean_s": 1000.0, "latency_p99_s": 1000.0, "compute_utilisation": 100.0, "kv_utilisation": 100.0}
_MODES = ("stock-static", "stock-window", "continuous")
# A ratio within this factor of the claimed one agrees with it.
AGREES = 1.25


def table(bench: Bench) -> Table:
    """Each claim with what ``bench`` came to, as numbers and as the ratio of continuous to static and to window."""
    from rich.table import Column, Table

    measured = {one.mode.name: metrics(bench, one) for one in bench.measured}
    columns = [Column(name, justify="right") for name in ("claimed", "here", "ratios claimed", "ratios here")]
    shown = Table("static, window, continuous", *columns, "")
    for name, text, form, claimed in _CLAIMS:
        here = [measured[mode][name] or 0.0 for mode in _MODES]
        unit = _UNITS.get(name, 1.0)
        cells = [", ".join(form.format(value * unit) for value in values) for values in (claimed, here)]
        said, got = ratios(claimed), ratios(here)
        cells += [", ".join(f"{ratio:.1f}x" for ratio in values) for values in (said, got)]
        shown.add_row(text, *cells, verdict(said, got))
    return shown


def ratios(values: tuple[float, ...] | list[float]) -> list[float]:
    """How far the last is from each of the others, as a factor of at least 1 where it is better or worse alike."""
    return [max(value, values[-1]) / min(value, values[-1]) if min(value, values[-1]) else 0.0 for value in values[:-1]]


def verdict(claimed: list[float], here: list[float]) -> str:
    """Of each ratio whether what was found is less than claimed, agrees or is more."""
    words = []
    for said, found in zip(claimed, here, strict=True):
        words.append("less" if found < said / AGREES else "more" if found > said * AGREES else "agrees")
    return ", ".join(words)


def can_compare(bench: Bench) -> bool:
    """Whether the modes that the claims speak of were run."""
    return {*_MODES} <= {one.mode.name for one in bench.measured}

"""What a block-size study came to, as a table, as JSON and as a plot."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paged_backend.lab.block_size_study import Study
from paged_backend.lab.figure import new_figure, save

if TYPE_CHECKING:
    from rich.table import Table


def table(study: Study, title: str) -> Table:
    """A row for each size, the picked one marked."""
    from rich.table import Column, Table

    names = (
        "block\nsize",
        "decode\nms",
        "prefill\nms",
        "storing\nms",
        "slots\nunfilled",
        "not\nshared",
        "table\nbytes",
        "cost",
    )
    caption = (
        f"{study.num_seqs} decodes of {study.context_len:,} tokens each; a chunk of {study.chunk} tokens of a prompt "
        f"that ends at {study.chunk_end:,}, storing it included"
    )
    shown = Table(*(Column(name, justify="right") for name in names), title=title, caption=caption)
    for result in study.results:
        is_picked = result.cost.block_size == study.picked
        shown.add_row(
            f"{'> ' if is_picked else ''}{result.cost.block_size}",
            f"{result.decode_s * 1000:.2f}",
            f"{result.prefill_s * 1000:.2f}",
            f"{result.store_s * 1000:.2f}",
            f"{result.unfilled:.1%}",
            f"{result.lost_share:.1%}",
            f"{result.table_bytes:,.0f}",
            f"{result.cost.total:.2f}",
            style="bold" if is_picked else None,
        )
    return shown


def to_json(study: Study, settings: dict[str, Any]) -> str:
    """One JSON object: the settings, what was timed, the pick and why, and the numbers of each size."""
    numbers = asdict(study)
    results = []
    for result, row in zip(study.results, numbers.pop("results"), strict=True):
        cost = row.pop("cost")
        results.append({"block_size": cost.pop("block_size"), **row, **cost, "cost": result.cost.total})
    told = {"settings": settings, **numbers, "picked": study.picked, "reason": study.reason, "sizes": results}
    return json.dumps(told, indent=1) + "\n"


def plot(study: Study, path: Path) -> None:
    """Draw memory overhead against the attention's time of a decode step, a point for each size, to an image file.

    Raises ConfigError without matplotlib, or for a kind of file that it cannot write.
    """
    figure = new_figure(6, 4.5)
    axes = figure.subplots()
    for result in study.results:
        at = (result.decode_s * 1000, (result.cost.slots_per_token - 1) * 100)
        is_picked = result.cost.block_size == study.picked
        axes.plot(*at, "o", color="tab:red" if is_picked else "tab:blue")
        axes.annotate(f"{result.cost.block_size}", at, textcoords="offset points", xytext=(6, 4))
    axes.set(
        xlabel=f"attention of a decode step of {study.num_seqs} requests of {study.context_len} tokens, ms",
        ylabel="slots held beyond those with tokens, %",
    )
    axes.set_ylim(bottom=0)
    save(figure, path)

"""``paged-backend doctor``: what would run here and why, and whether it computes what it should."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from paged_backend.cli.options import AsJson, Terminal, errors_in_words

if TYPE_CHECKING:
    from paged_backend.doctor.finding import Finding

# What the longest names of findings take, those of operations with their backend.
NAME_WIDTH = 28
COLOURS = {"ok": "green", "note": "yellow", "problem": "bold red"}


def doctor(
    seconds: Annotated[
        float,
        typer.Option(
            min=0, help="Seconds to try the kernels for, at most, beside compiling them once; 0 leaves it out."
        ),
    ] = 5.0,
    as_json: AsJson = False,
) -> None:
    """Tell which kernels would run here and why, and compare them with the reference; for a bug report.

    Versions, machine, backends and plugins are looked at, and every operation is
    tried on small cases. Nothing personal is printed, and nothing is fetched.
    Exits with 1 if anything is wrong.
    """
    if not math.isfinite(seconds):
        raise typer.BadParameter(f"{seconds} is no number of seconds", param_hint="--seconds")
    console = Terminal(highlight=False)
    records: list[dict[str, str]] = []
    with errors_in_words():
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        from paged_backend.doctor.examination import examine

        for topic, findings in examine(seconds):
            # Line by line as it is found: should a kernel end the process, what was found before is there.
            if not as_json:
                console.print(f"{topic}:", soft_wrap=True)
            for finding in findings:
                records.append({"topic": topic, **asdict(finding)})
                if not as_json:
                    console.print(line(finding), soft_wrap=True)
        problems = [record["name"] for record in records if record["state"] == "problem"]
        if as_json:
            typer.echo(json.dumps({"problems": problems, "findings": records}, indent=2))
        else:
            told = f"problems: {', '.join(problems)}" if problems else "no problem was found"
            console.print(told, soft_wrap=True)
    raise typer.Exit(1 if problems else 0)


def line(finding: Finding) -> Text:
    """A finding as a line of text, which is not wrapped, so that it can be pasted."""
    state = Text(f"  {finding.state:<9}", style=COLOURS[finding.state])
    return state.append(f"{finding.name:<{NAME_WIDTH}} {finding.words}", style="none")

"""The generate command as tests run it, and what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner, Result

from paged_backend.cli.app import app

PROMPTS = ["hello", "a longer prompt than that", "x", "two words", "the fifth of them"]


def generate(folder: str, *arguments: str | Path, stdin: str | bytes | None = None) -> Result:
    options = ["--model", folder, "--kv-cache-memory", "4MiB", "--max-tokens", "8", "--threads", "1"]
    runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"})
    return runner.invoke(app, ["generate", *map(str, arguments), *options], input=stdin)


def records(text: str) -> dict[int, dict]:
    rows = [json.loads(line) for line in text.splitlines()]
    assert len({row["index"] for row in rows}) == len(rows)
    return {row["index"]: row for row in rows}


def texts(rows: dict[int, dict]) -> list[str]:
    return [rows[index]["text"] for index in range(len(rows))]

"""Trace: requests as they once arrived, read from a file."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any

from paged_backend.checks import checked_amount, checked_int, describe
from paged_backend.errors import ConfigError
from paged_backend.lab.block_tokens import SPAN, BlockTokens
from paged_backend.sampling_params import MAX_COUNT

# Prompts that nothing is known of but their length get ids from here on, each its own.
_FIRST_UNKNOWN = 2**40
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_FORMS = (
    f"a CSV file with the columns {', '.join(_AZURE)} (as the Azure traces), or JSON lines with timestamp in ms, "
    "input_length, output_length and hash_ids (as the Mooncake traces), or with arrival in s, prompt_length or prompt, "
    "and output_length (as TraceRecorder writes them)"
)


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request as it was: what came, when, and how much was generated.

    arrival: seconds since the trace began. prompt: token ids, perhaps made as they are asked for; equal ones stand for
    equal tokens. output_length: tokens that were generated. deadline_s: seconds from arrival. max_tokens: the most that
    its caller allowed, None where nobody knows.
    """

    arrival: float
    prompt: Sequence[int]
    output_length: int
    client_id: str | None = None
    priority: int = 0
    deadline_s: float | None = None
    max_tokens: int | None = None
    cache_salt: str | None = None


# Seconds; a trace that takes longer has no use, and its times lose their fractions.
LATEST = 1e12


def checked_time(arrival: float) -> float:
    """``arrival`` in seconds. Raises ConfigError for what is too far away, as a very low load or rate makes it."""
    if not arrival <= LATEST:
        raise ConfigError(
            f"a request would arrive after {arrival:g} s, later than {LATEST:g}; give a higher load or rate"
        )
    return arrival


def read_trace(
    path: Path, *, limit: int | None = None, rate_scale: float = 1.0, clients: int = 0, seed: int = 0
) -> list[TraceRequest]:
    """The requests of a trace in order of arrival, the first of which arrives at 0.

    path: a CSV file of Azure's, or JSON lines of Mooncake's or of this project's ``TraceRecorder``. limit: only so many
    of the first. rate_scale: how many times as fast they arrive. clients: how many clients those belong to that name
    none, each to one drawn from ``seed``; 0 leaves them without.

    Raises ConfigError that names file, line, value and what is allowed; OSError for what cannot be read.
    """
    rate_scale = checked_amount("rate_scale", rate_scale, positive=True)
    limit = None if limit is None else checked_int("limit", limit, 1)
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            requests = sorted(_parsed(path, file), key=lambda request: request.arrival)
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is no UTF-8 text ({error}); a trace is {_FORMS}") from error
    requests = requests[:limit]
    if not requests:
        raise ConfigError(f"{path} holds no request; a trace is {_FORMS}")
    draw, first = random.Random(seed), requests[0].arrival
    return [
        replace(
            request,
            arrival=checked_time((request.arrival - first) / rate_scale),
            client_id=f"client {draw.randrange(clients)}" if clients and not request.client_id else request.client_id,
        )
        for request in requests
    ]


def _parsed(path: Path, lines: Iterable[str]) -> Iterator[TraceRequest]:
    """The requests as they stand in the file; prompts of which only the length is known share no token with others."""
    numbered = ((f"{path}, line {number}", line) for number, line in enumerate(lines, 1) if line.strip())
    first = next(numbered, None)
    if first is None:
        return
    is_json, next_id = first[1].lstrip().startswith("{"), _FIRST_UNKNOWN
    for request in _json_requests(chain([first], numbered)) if is_json else _csv_requests(first, numbered):
        if isinstance(request.prompt, range):
            end = next_id + len(request.prompt)
            yield replace(request, prompt=range(next_id, end))
            next_id = end
        else:
            yield request


def _json_requests(lines: Iterable[tuple[str, str]]) -> Iterator[TraceRequest]:
    read: Callable[[str, Any], TraceRequest] | None = None
    for where, line in lines:
        row = _json_object(where, line)
        if read is None:
            read = _mooncake if "timestamp" in row else _own
        yield read(where, row)


def _csv_requests(header: tuple[str, str], lines: Iterable[tuple[str, str]]) -> Iterator[TraceRequest]:
    columns = next(csv.reader([header[1]]))
    if missing := [name for name in _AZURE if name not in columns]:
        raise ConfigError(f"{header[0]}: no column {missing[0]!r} in {header[1].strip()!r:.200}; a trace is {_FORMS}")
    for where, line in lines:
        cells = next(csv.reader([line]))
        if len(cells) != len(columns):
            raise ConfigError(f"{where}: {len(cells)} values for the {len(columns)} columns, in {line.strip()!r:.200}")
        yield _azure(where, dict(zip(columns, cells, strict=True)))


def _azure(where: str, row: Mapping[str, str]) -> TraceRequest:
    try:
        arrival = datetime.fromisoformat(row["TIMESTAMP"]).timestamp()
    except ValueError as error:
        raise ConfigError(
            f"{where}: TIMESTAMP must be a time such as 2023-11-16 18:15:46.68, got {row['TIMESTAMP']!r:.200}"
        ) from error
    lengths = []
    for name in _AZURE[1:]:
        text = row[name].strip()
        lengths.append(_count(where, name, int(text) if text.isdecimal() else row[name]))
    return TraceRequest(arrival, range(lengths[0]), lengths[1])


def _mooncake(where: str, row: Mapping[str, Any]) -> TraceRequest:
    length, ids = _count(where, "input_length", row.get("input_length")), row.get("hash_ids")
    if not isinstance(ids, list) or not all(type(id) is int and id >= 0 for id in ids) or len(ids) * SPAN < length:
        raise ConfigError(
            f"{where}: hash_ids must list an int of at least 0 for each {SPAN} of the {length} tokens, got "
            f"{describe(ids)}"
        )
    arrival = checked_amount(f"{where}: timestamp", row.get("timestamp")) / 1000
    return TraceRequest(arrival, BlockTokens(ids, length), _count(where, "output_length", row.get("output_length")))


_OPTIONAL = ("client_id", "priority", "deadline_s", "max_tokens", "cache_salt")


def _own(where: str, row: Mapping[str, Any]) -> TraceRequest:
    known = ("arrival", "prompt", "prompt_length", "output_length", *_OPTIONAL)
    if unknown := sorted(row.keys() - set(known)):
        raise ConfigError(f"{where}: unknown field {unknown[0]!r}; choose from {', '.join(known)}")
    for name in ("client_id", "cache_salt"):
        if not isinstance(row.get(name), (str, type(None))):
            raise ConfigError(f"{where}: {name} must be a text or null, got {describe(row[name])}")
    deadline_s, max_tokens = row.get("deadline_s"), row.get("max_tokens")
    return TraceRequest(
        checked_amount(f"{where}: arrival", row.get("arrival")),
        _own_prompt(where, row),
        _count(where, "output_length", row.get("output_length")),
        row.get("client_id"),
        checked_int(f"{where}: priority", row.get("priority", 0), -(2**63), 2**63 - 1),
        None if deadline_s is None else checked_amount(f"{where}: deadline_s", deadline_s, positive=True),
        None if max_tokens is None else _count(where, "max_tokens", max_tokens),
        row.get("cache_salt"),
    )


def _own_prompt(where: str, row: Mapping[str, Any]) -> Sequence[int]:
    if ("prompt" in row) == ("prompt_length" in row):
        raise ConfigError(f"{where}: give either prompt, a list of token ids, or prompt_length")
    if "prompt" not in row:
        return range(_count(where, "prompt_length", row["prompt_length"]))
    prompt = row["prompt"]
    if not isinstance(prompt, list) or not prompt or not all(type(token) is int and token >= 0 for token in prompt):
        raise ConfigError(f"{where}: prompt must be a list of token ids, ints of at least 0, got {describe(prompt)}")
    return prompt


def _json_object(where: str, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON ({error}): {line.strip()!r:.200}; a trace is {_FORMS}") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: not a JSON object: {line.strip()!r:.200}; a trace is {_FORMS}")
    return row


def _count(where: str, name: str, value: Any) -> int:
    return checked_int(f"{where}: {name}", value, 1, MAX_COUNT)

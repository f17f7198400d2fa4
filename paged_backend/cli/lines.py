"""Lines: the prompts of a file, one a line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import IO, Any

from paged_backend.cli.options import DASH, check_stream, naming
from paged_backend.errors import ConfigError
from paged_backend.sampling_params import SamplingParams

# Options of a request, and sampling parameters, that JSON cannot write.
OBJECTS = frozenset({"stop_condition", "lockstep", "prompt_embeds", "logits_processors"})
# What a line of prompts may hold.
KEYS = ("prompt", "params", "options", "id")


class Lines:
    """The prompts of a file, each with its index: an object with "prompt", and the "params" to run it with.

    jsonl: whether lines are such objects, or texts; None is told by the file's name. params: what holds for all of
    them but for what a line itself says.

    Raises ConfigError at the first line that cannot be used; it names the line's number in the file, from 1.
    """

    def __init__(self, path: Path, jsonl: bool | None, params: Mapping[str, Any]) -> None:
        self._jsonl = path.suffix == ".jsonl" if jsonl is None else jsonl
        self._params = params
        self._problem = f"the prompts {path} cannot be read"
        if path == DASH:
            check_stream(sys.stdin, "name a file for prompts")
            self._source: IO[bytes] = sys.stdin.buffer
        else:
            with naming(self._problem):
                self._source = path.open("rb")
        self._is_file = path != DASH and self._source.seekable()

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._source is not getattr(sys.stdin, "buffer", None):
            self._source.close()

    def count(self) -> int | None:
        """How many prompts a file has, all of which can be used; None for what can be read but once.

        A line that cannot be used is told now, rather than after hours of answering.
        """
        if not self._is_file:
            return None
        total = sum(1 for _ in self)
        self._source.seek(0)
        return total

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        index, ids = 0, dict[str | int, int]()
        with naming(self._problem):
            for number, line in enumerate(self._source, 1):
                text = self._decode(number, line)
                if not text.strip():
                    continue
                prompt: dict[str, Any] = _read(number, text) if self._jsonl else {"prompt": text.rstrip("\r\n")}
                if (name := prompt.get("id")) is not None and ids.setdefault(name, number) != number:
                    raise ConfigError(f"lines {ids[name]} and {number} have the same id {name!r:.80}")
                yield index, {**prompt, "params": {**self._params, **prompt.get("params", {})}}
                index += 1

    def _decode(self, number: int, line: bytes) -> str:
        try:
            # A file may begin with the mark of its byte order, which is no part of the first prompt.
            return line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            name = getattr(self._source, "name", "<stdin>")
            raise ConfigError(f"line {number} of {name} is not UTF-8: {line[:40]!r}") from error


def _read(number: int, line: str) -> dict[str, Any]:
    try:
        prompt = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"line {number} is not JSON ({error}): {line.strip():.80}") from error
    if not isinstance(prompt, dict) or not isinstance(prompt.get("prompt"), (str, list)):
        raise ConfigError(f'line {number} is no JSON object with "prompt", a text or token ids: {line.strip():.80}')
    _check_keys(f"line {number}", prompt, KEYS)
    for key in ("params", "options"):
        if not isinstance(prompt.get(key, {}), dict):
            raise ConfigError(f'"{key}" of line {number} must be a JSON object, got {prompt[key]!r:.80}')
    if "options" in prompt:
        # It takes torch along, which --help need not wait for.
        from paged_backend.request.options import RequestOptions

        known = [name for name in RequestOptions.__annotations__ if name not in OBJECTS]
        _check_keys(f'"options" of line {number}', prompt["options"], known)
    if isinstance(name := prompt.get("id"), bool) or not isinstance(name, (str, int, type(None))):
        raise ConfigError(f'"id" of line {number} must be a text or a whole number, got {name!r:.80}')
    return prompt


def _check_keys(what: str, value: Mapping[str, Any], known: Any) -> None:
    if unknown := sorted(value.keys() - set(known)):
        raise ConfigError(f"{what} has the unknown key {unknown[0]!r:.80}; it may have {', '.join(known)}")


def params_from_json(params: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of SamplingParams as JSON has them, which knows texts as keys only.

    Raises ConfigError for one that there is not, or that JSON cannot write, and for a key that is no token id.
    """
    _check_keys('"params"', params, [f.name for f in fields(SamplingParams) if f.name not in OBJECTS])
    bias = params.get("logit_bias")
    if not isinstance(bias, Mapping):
        return dict(params)
    for key in bias:
        if not (key.isascii() and key.isdecimal() and f"{int(key[:20])}" == key):
            raise ConfigError(
                f'logit_bias must map token ids to numbers, as in {{"42": -1.5}}, got the key {key!r:.80}'
            )
    return {**params, "logit_bias": {int(key): value for key, value in bias.items()}}

"""Answers: where the answers go, and which are there already."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

from paged_backend.cli.options import DASH, check_stream, naming
from paged_backend.errors import ConfigError

# How every answer begins.
_BEGINNING = '{"index": '


class Answers:
    """A file of answers that goes on where it was, or standard output.

    there: index and prompt (as JSON) of the answers that the file holds already. Raises ConfigError, which names the
    file, for one that cannot be written, when it is opened or later, and BrokenPipeError when its reader goes away.
    """

    def __init__(self, path: Path) -> None:
        self.is_file = path != DASH
        self.there: dict[int, str] = {}
        self._problem = f"the output {path} cannot be written" if self.is_file else "standard output cannot be written"
        if self.is_file:
            with naming(self._problem):
                self._target, self.there = open_output(path)
        else:
            check_stream(sys.stdout, "name a file for an --output")
            self._target = sys.stdout

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.is_file:
            with naming(self._problem):
                self._target.close()

    def write(self, record: dict[str, Any]) -> None:
        """Add a line."""
        line = json.dumps(record, ensure_ascii=False) + "\n"
        try:
            line.encode(self._target.encoding)
        except UnicodeEncodeError:
            # Half a surrogate pair, or an output in another encoding than UTF-8.
            line = json.dumps(record) + "\n"
        with naming(self._problem):
            self._target.write(line)
            self._target.flush()


def open_output(output: Path) -> tuple[TextIO, dict[int, str]]:
    """The file to append answers to, and index and prompt (as JSON) of those it holds.

    Answers that failed or are cut off are taken out. The file is locked until it is closed or the process ends, so that
    no two runs write to it. Raises ConfigError, and leaves the file alone, if it is locked or holds anything else. What
    is no file, such as a pipe, has no answers and is not locked.
    """
    # A link stays one.
    output = output.resolve()
    target = _open_locked(output)
    if not output.is_file():
        return target, {}
    keep = output.with_name(output.name + ".resuming")
    try:
        # What a killed run left.
        keep.unlink(missing_ok=True)
        kept = keep.open("a", encoding="utf-8")
        try:
            # Before it takes the other's place, so that nobody finds it unlocked.
            _lock(kept, output)
            done = _copy_answers(output, kept)
            kept.flush()
            os.replace(keep, output)
        except BaseException:
            kept.close()
            raise
    finally:
        # The lock goes last: once it is gone, the next run may have such a file.
        keep.unlink(missing_ok=True)
        target.close()
    return kept, done


def _open_locked(output: Path) -> TextIO:
    while True:
        target = output.open("a", encoding="utf-8")
        try:
            if not output.is_file():
                return target
            _lock(target, output)
            # A run that has just let go of the lock may have put another file in its place.
            if os.path.samestat(os.fstat(target.fileno()), output.stat()):
                return target
        except BaseException:
            target.close()
            raise
        target.close()


def _lock(target: TextIO, output: Path) -> None:
    try:
        fcntl.flock(target, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            f"another run is writing to the output {output}; wait until it is done, or name another --output"
        ) from error
    except OSError:
        # A file system without locks cannot tell who else writes.
        return


def _copy_answers(output: Path, kept: TextIO) -> dict[int, str]:
    done: dict[int, str] = {}
    with output.open(encoding="utf-8-sig", errors="replace") as lines:
        for line in lines:
            # The last line of a run that was killed may be cut off.
            if not line.endswith("\n") and line.startswith(_BEGINNING):
                continue
            try:
                record = json.loads(line)
                index, prompt = record["index"], json.dumps(record["prompt"])
                is_answer = "text" in record or "samples" in record
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(
                    f"{output} holds something else than answers ({line.strip():.80}); name another --output"
                ) from error
            if is_answer:
                done[index] = prompt
                kept.write(line)
    return done

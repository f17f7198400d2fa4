"""TraceRecorder: writes the requests of a live engine down, for replays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paged_backend.hookspecs import ObservedEngine, hookimpl
from paged_backend.outputs import RequestOutput
from paged_backend.request.view import RequestView


class TraceRecorder:
    """A plugin that appends a JSON line to a file for each request that came to its own end, as ``read_trace`` reads.

    prompts: whether token ids of prompts are written, which tell what they share but can be read by anybody who has the
    file; else only their lengths are. The samples of ``n`` above 1 are written as a request each. A file that is there
    goes on, as from a new engine.

    Raises OSError when the file cannot be opened.
    """

    def __init__(self, path: str | Path, *, prompts: bool = True) -> None:
        self.prompts = prompts
        # It stays open for as long as engines run.
        self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115

    @hookimpl
    def request_finished(self, request: RequestView, output: RequestOutput) -> None:
        """One line; what was aborted, timed out or failed is left out, for nobody knows its length."""
        if output.finish_reason not in ("stop", "length"):
            return
        row: dict[str, Any] = {"arrival": request.arrival_time}
        if self.prompts:
            row["prompt"] = list(output.prompt_token_ids)
        else:
            row["prompt_length"] = request.num_prompt_tokens
        row["output_length"] = len(output.token_ids)
        row["max_tokens"] = request.params.max_tokens
        if request.priority:
            row["priority"] = request.priority
        if request.deadline is not None:
            row["deadline_s"] = request.deadline - request.arrival_time
        for name in ("client_id", "cache_salt"):
            if getattr(request, name) is not None:
                row[name] = getattr(request, name)
        self._file.write(json.dumps(row) + "\n")

    @hookimpl
    def engine_stopped(self, engine: ObservedEngine) -> None:
        """All is on the disk; another engine may go on."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

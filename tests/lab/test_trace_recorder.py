"""What a recorder writes of the requests that came to their own end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paged_backend.lab.trace import read_trace
from paged_backend.lab.trace_recorder import TraceRecorder
from paged_backend.request.request import Request
from paged_backend.sampling_params import SamplingParams


def ended(reason: str = "length", **options: Any) -> Request:
    request = Request("0", [5, 6, 7], SamplingParams(max_tokens=8), 2.0, 0, **options)
    request.output.token_ids += [1, 2]
    request.output.finish_reason = reason
    return request


def rows(path: Path, *requests: Request, **options: bool) -> list[dict[str, Any]]:
    recorder = TraceRecorder(path, **options)
    for request in requests:
        recorder.request_finished(request, request.output)
    recorder.close()
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_request_is_written_with_its_prompt_and_lengths(tmp_path: Path):
    expected = {"arrival": 2.0, "prompt": [5, 6, 7], "output_length": 2, "max_tokens": 8}
    assert rows(tmp_path / "trace.jsonl", ended("stop")) == [expected]


def test_without_prompts_only_their_lengths_are_written(tmp_path: Path):
    (row,) = rows(tmp_path / "trace.jsonl", ended(), prompts=False)
    assert row["prompt_length"] == 3
    assert "prompt" not in row


def test_a_deadline_counts_from_the_arrival(tmp_path: Path):
    (row,) = rows(tmp_path / "trace.jsonl", ended(deadline=3.5, priority=4, client_id="a", cache_salt="b"))
    assert (row["deadline_s"], row["priority"], row["client_id"], row["cache_salt"]) == (1.5, 4, "a", "b")


@pytest.mark.parametrize("reason", ["abort", "timeout", "error"])
def test_what_did_not_come_to_its_own_end_is_left_out(tmp_path: Path, reason: str):
    assert rows(tmp_path / "trace.jsonl", ended(reason)) == []


def test_a_file_that_is_there_goes_on(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    rows(path, ended())
    assert len(rows(path, ended())) == 2


def test_what_was_written_is_on_the_disk_when_its_engine_stops(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    recorder = TraceRecorder(path)
    request = ended()
    recorder.request_finished(request, request.output)
    recorder.engine_stopped(None)
    assert [known.output_length for known in read_trace(path)] == [2]
    recorder.close()


def test_a_file_that_cannot_be_opened_is_told(tmp_path: Path):
    with pytest.raises(OSError, match=r"trace\.jsonl"):
        TraceRecorder(tmp_path / "none" / "trace.jsonl")

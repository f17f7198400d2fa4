"""Traces of every form are read, and what cannot be is named with its file, line and value."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paged_backend.errors import ConfigError
from paged_backend.lab.block_tokens import SPAN, BlockTokens
from paged_backend.lab.trace import read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.1805900,396,109
2023-11-16 18:15:48.6805900,879,55
"""


def written(folder: Path, *rows: object, name: str = "trace.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_a_csv_of_azure_is_read_in_order_of_arrival_from_0(tmp_path: Path) -> None:
    requests = read_trace(written(tmp_path, AZURE, name="trace.csv"))
    assert [(r.arrival, len(r.prompt), r.output_length) for r in requests] == [
        (0.0, 374, 44),
        (pytest.approx(2.0), 879, 55),
        (pytest.approx(3.5), 396, 109),
    ]
    tokens = [token for request in requests for token in request.prompt]
    assert len(set(tokens)) == len(tokens)


def test_equal_blocks_of_mooncake_are_equal_tokens(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1000, "input_length": 700, "output_length": 5, "hash_ids": [7, 8]},
        {"timestamp": 3500, "input_length": 1100, "output_length": 6, "hash_ids": [7, 9, 10]},
    ]
    first, second = read_trace(written(tmp_path, *rows))
    assert (first.arrival, second.arrival) == (0.0, 2.5)
    assert list(first.prompt[:SPAN]) == list(second.prompt[:SPAN])
    assert not set(first.prompt[SPAN:]) & set(second.prompt)
    assert (len(first.prompt), len(second.prompt)) == (700, 1100)


def test_tokens_of_blocks_are_those_of_the_list_they_stand_for() -> None:
    tokens = BlockTokens([4, 2, 9], 2 * SPAN + 100)
    listed = [token for id in (4, 2, 9) for token in range(id * SPAN, (id + 1) * SPAN)][: len(tokens)]
    assert list(tokens) == listed
    for piece in (slice(0, 16), slice(500, 530), slice(0, None), slice(-5, None), slice(3, 2000, 7), slice(9, 9)):
        assert list(tokens[piece]) == listed[piece]
    assert (tokens[-1], tokens[SPAN]) == (listed[-1], 2 * SPAN)
    with pytest.raises(IndexError):
        tokens[len(tokens)]


def test_own_lines_tell_all_of_a_request(tmp_path: Path) -> None:
    rows = [
        {"arrival": 5.0, "prompt_length": 3, "output_length": 2},
        {
            "arrival": 7.0, "prompt": [4, 5], "output_length": 9, "client_id": "a", "priority": -1,
            "deadline_s": 2.5, "max_tokens": 20, "cache_salt": "s",
        },
    ]  # fmt: skip
    plain, full = read_trace(written(tmp_path, *rows, ""))
    assert (plain.arrival, len(plain.prompt), plain.client_id, plain.priority, plain.deadline_s) == (
        0,
        3,
        None,
        0,
        None,
    )
    assert (full.arrival, full.prompt, full.output_length, full.client_id) == (2.0, [4, 5], 9, "a")
    assert (full.priority, full.deadline_s, full.max_tokens, full.cache_salt) == (-1, 2.5, 20, "s")


def test_a_trace_can_be_cut_short_and_sped_up(tmp_path: Path) -> None:
    requests = read_trace(written(tmp_path, AZURE), limit=2, rate_scale=4.0)
    assert [request.arrival for request in requests] == [0.0, pytest.approx(0.5)]
    assert len(read_trace(written(tmp_path, AZURE), limit=10**30)) == len(read_trace(written(tmp_path, AZURE)))
    with pytest.raises(ConfigError, match="limit must be an int of at least 1, got -1"):
        read_trace(written(tmp_path, AZURE), limit=-1)


def test_clients_are_drawn_from_a_seed_for_requests_that_name_none(tmp_path: Path) -> None:
    rows = [{"arrival": n, "prompt_length": 3, "output_length": 2} for n in range(20)]
    path = written(tmp_path, {**rows[0], "client_id": "mine"}, *rows)
    drawn = [[r.client_id for r in read_trace(path, clients=3, seed=seed)] for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert set(drawn[0]) == {"mine", "client 0", "client 1", "client 2"}


OWN = {"arrival": 0, "prompt_length": 3, "output_length": 2}
MOONCAKE = {"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        ([""], "holds no request; a trace is a CSV file with the columns TIMESTAMP"),
        (["a,b", "1,2"], r"line 1: no column 'TIMESTAMP' in 'a,b'"),
        ([AZURE.splitlines()[0], "2023-11-16 18:15:46,374"], "line 2: 2 values for the 3 columns"),
        ([AZURE.splitlines()[0], "", "noon,374,4"], "line 3: TIMESTAMP must be a time such as .* got 'noon'"),
        ([AZURE.splitlines()[0], "2023-11-16 18:15:46,-3,4"], "ContextTokens must be an int from 1 .* got '-3'"),
        ([AZURE.splitlines()[0], "2023-11-16 18:15:46,3,0"], "GeneratedTokens must be an int from 1 .* got 0"),
        ([OWN, "{oops"], r"line 2: not JSON \(.*\): '{oops'"),
        ([OWN, "3"], "line 2: not a JSON object: '3'"),
        ([{**OWN, "arrival": "x"}], "line 1: arrival must be a finite number of at least 0, got 'x'"),
        ([{**OWN, "colour": 1}], "unknown field 'colour'; choose from arrival, prompt"),
        ([{**OWN, "prompt": [1]}], "give either prompt, a list of token ids, or prompt_length"),
        ([{"arrival": 0, "output_length": 2, "prompt": [1.5]}], r"prompt must be a list of token ids, .* got \[1.5\]"),
        ([{**OWN, "client_id": 3}], "client_id must be a text or null, got 3"),
        ([{**OWN, "priority": 0.5}], "priority must be an int from .* got 0.5"),
        ([{**OWN, "deadline_s": 0}], "deadline_s must be a finite number above 0, got 0"),
        ([{**OWN, "max_tokens": 0}], "max_tokens must be an int from 1 .* got 0"),
        ([{**MOONCAKE, "hash_ids": [1]}], r"hash_ids must list an int .* each 512 of the 600 tokens, got \[1\]"),
        ([{**MOONCAKE, "timestamp": None}], "timestamp must be a finite number of at least 0, got None"),
        ([MOONCAKE, OWN], "line 2: input_length must be an int from 1 .* got None"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, rows: list[object], what: str) -> None:
    path = written(tmp_path, *rows)
    with pytest.raises(ConfigError, match=what) as error:
        read_trace(path)
    assert str(path) in f"{error.value}"


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.bin"
    path.write_bytes(b"\xff\xfe{")
    with pytest.raises(ConfigError, match="is no UTF-8 text"):
        read_trace(path)

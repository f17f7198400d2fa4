"""``paged-backend tune`` tells what block sizes cost in a table, JSON and a plot, and says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recurrent_models import make_recurrent
from tiny_models import save_tiny
from tiny_tokenizers import byte_tokenizer
from typer.testing import CliRunner, Result

from paged_backend.block_cost import CANDIDATES
from paged_backend.cli import tune
from paged_backend.cli.app import app
from paged_backend.model import attention_timing


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), max_positions=256))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time for more than one run that counts."""
    monkeypatch.setattr(tune, "TIME_LIMIT_S", 0)


def invoke(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, ["tune", *arguments])


def numbers(*arguments: str) -> dict:
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_table_marks_the_pick_and_a_sentence_says_why(folder: str) -> None:
    result = invoke(folder)
    assert result.exit_code == 0, result.output
    assert "prompts of 32 to 160 tokens, half of each shared, answers of 64" in " ".join(result.output.split())
    rows = [line.split("│")[1].strip() for line in result.output.splitlines() if "│" in line]
    (picked,) = [row.removeprefix("> ") for row in rows if row.startswith(">")]
    assert [int(row.removeprefix("> ")) for row in rows] == list(CANDIDATES)
    assert f"\nBlocks of {picked} tokens cost " in result.output


def test_json_follows_the_requests(folder: str) -> None:
    told = numbers(folder, "--lengths", "10-20", "--output-length", "5", "--shared-prefix", "9", "--seqs", "3")
    assert (told["num_seqs"], told["context_len"], told["chunk"]) == (3, 17, 15)
    assert [size["block_size"] for size in told["sizes"]] == list(CANDIDATES)
    assert [round(size["lost_share"], 4) for size in told["sizes"]] == [round(1 / 15, 4), *[round(9 / 15, 4)] * 5]
    assert told["settings"]["requests"] == "prompts of 10 to 20 tokens, the first 9 shared, answers of 5"


def test_the_flags_of_the_cache_and_the_kernels_are_followed(folder: str) -> None:
    told = numbers(folder, "--lengths", "30", "--kv-dtype", "int8", "--backend", "reference")["settings"]
    assert (told["kv_dtype"], told["attention_backend"]) == ("int8", "reference")


def test_a_trace_counts_with_what_its_prompts_share_and_without_what_is_too_long(folder: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"arrival": n, "prompt": [5] * 20 + [n], "output_length": 5} for n in range(3)]
    trace.write_text("\n".join(map(json.dumps, [*rows, {"arrival": 9, "prompt_length": 900, "output_length": 5}])))
    told = numbers(folder, "--trace", str(trace))
    assert told["settings"]["requests"] == "3 requests of trace.jsonl, 1 longer than the model runs left out"
    assert told["sizes"][1]["lost_share"] == pytest.approx(8 / 63)
    assert numbers(folder, "--trace", str(trace), "--limit", "1")["sizes"][1]["lost_share"] == 0


def test_a_plot_is_drawn(folder: str, tmp_path: Path) -> None:
    result = invoke(folder, "--plot", str(tmp_path / "plot.svg"))
    assert result.exit_code == 0, result.output
    assert "<svg" in (tmp_path / "plot.svg").read_text()


def test_layers_that_see_a_window_hold_less(tmp_path: Path) -> None:
    windowed = str(save_tiny(tmp_path, "mistral"))
    told = numbers(windowed, "--lengths", "100")
    # It sees 8 tokens, which lie in two blocks of 8 at most times.
    assert 0.4 < told["sizes"][0]["unfilled"] < 0.5


def test_a_model_without_attention_has_nothing_to_tune(tmp_path: Path) -> None:
    make_recurrent("mamba2").save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    result = invoke(str(tmp_path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "no layer of this model attends, so the size of blocks costs nothing" in result.stderr


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (("--lengths", "20-10"), "--lengths='20-10' must be two numbers of tokens, the smaller first, such as"),
        (("--lengths", "some"), "--lengths='some' must be two numbers of tokens"),
        (("--lengths", "200-300"), "prompts of up to 300 tokens and 128 of output are beyond the 256"),
        (("--trace", "/nowhere/trace.csv"), "/nowhere/trace.csv"),
        (("--trace", "README.md", "--lengths", "10-20"), "both say what comes; give one of them"),
        (("--shared-prefix", "9"), "--shared-prefix=9 goes with --lengths; give that too, or leave it out"),
        (("--limit", "9", "--lengths", "10"), "--limit=9 goes with --trace"),
        (("--kv-dtype", "int3"), "kv_dtype='int3' is unknown; choose from auto, float32"),
        (("--backend", "abacus"), "unknown attention_backend 'abacus'; choose one of"),
        (("--seqs", "0"), "Invalid value for '--seqs'"),
        (("--seqs", "16384", "--lengths", "120"), "too many to be timed; time fewer or shorter requests"),
        (("--plot", "/nowhere/plot.png"), "/nowhere/plot.png cannot be written"),
    ],
)
def test_what_cannot_be_is_said_in_words(
    folder: str, flags: tuple[str, ...], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_timing, "MEMORY_SHARE", 2**-8)
    result = invoke(folder, *flags)
    assert result.exit_code == 2
    assert what in result.output


def test_a_trace_that_is_not_there_is_named(tmp_path: Path) -> None:
    result = invoke("--trace", str(tmp_path / "nothing.csv"))
    assert result.exit_code == 2
    assert f"error: the trace {tmp_path / 'nothing.csv'} cannot be read: No such file or directory" in result.output

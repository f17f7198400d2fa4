"""The comparison with other engines runs them in processes of their own, and counts what they give."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tiny_models import save_tiny
from transformers import GenerationMixin
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from paged_backend.kernels.triton import support as triton_support

if triton_support.interpreted:
    pytest.skip("has nothing to do with kernels that are interpreted", allow_module_level=True)

sys.path.append(str(Path(__file__).parents[2] / "kernels" / "bench"))
import bench_engines
import engines

WORK = {
    "ragged": [{"prompt": [5, 6, 7], "max_new_tokens": 6}, {"prompt": [8, 9, 10, 11, 12], "max_new_tokens": 3}],
    "single": [{"prompt": [13, 14], "max_new_tokens": 4}],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engines")
    save_tiny(folder / "smollm2")
    return folder


def run_on_a_core(engine, folder, work):
    return bench_engines.run(engine, folder, work, cores="0", threads=1, dtype="float32")


@pytest.fixture
def small_continuous_batching(monkeypatch):
    """transformers' manager with a cache of a few blocks, where it would take most of the memory; stopped after it."""
    managers = []
    make = GenerationMixin.init_continuous_batching

    def small(model, generation_config):
        limits = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
        managers.append(make(model, generation_config, limits))
        return managers[-1]

    monkeypatch.setattr(GenerationMixin, "init_continuous_batching", small)
    yield
    for manager in managers:
        manager.stop()


@pytest.mark.slow
@pytest.mark.usefixtures("small_continuous_batching")
def test_every_engine_of_this_environment_gives_the_tokens_that_stock_gives(folder):
    results = run_on_a_core("stock", folder, WORK)
    assert all(result["first_s"] > 0 and result["seconds"] > 0 for result in results.values())
    expected = {name: result["tokens"] for name, result in results.items()}
    assert [len(row) for row in expected["ragged"]] == [6, 3]
    for engine in (engines.paged, engines.continuous):
        run = engine(str(bench_engines.model_of("stock", folder)), 1, "float32", 32)
        assert {name: run(work) for name, work in WORK.items()} == expected


def test_an_engine_that_fails_ends_the_comparison_with_what_it_said(tmp_path):
    with pytest.raises(SystemExit, match=r"nosuch failed with 1(.|\n)*KeyError: 'nosuch'"):
        run_on_a_core("nosuch", tmp_path, WORK)


def test_decode_rates_leave_out_the_first_tokens_and_their_time():
    result = {"first_s": 2.0, "seconds": 4.0, "tokens": [[1] * 5, [1] * 5]}
    assert bench_engines.rates(result) == {"whole": 2.5, "decode": 4.0}


def test_the_table_gives_medians_and_ratios_of_the_same_round(monkeypatch, capsys):
    seconds = iter([1.0, 4.0, 2.0, 2.0, 1.0, 8.0])

    def run(engine, folder, workloads, *pinned):
        return {"single": {"first_s": 0.0, "seconds": next(seconds), "tokens": [[1, 2, 3, 4]]}}

    monkeypatch.setattr(bench_engines, "run", run)
    monkeypatch.setattr(sys, "argv", ["bench_engines.py", "x", "--engines", "paged", "stock", "--workloads", "single"])
    bench_engines.main()
    assert "| single | stock | whole 1.0 (4.00x) | decode 0.8 (4.00x) | 100% of" in capsys.readouterr().out

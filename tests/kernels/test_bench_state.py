"""The benchmark of recurrent states runs on tiny ones, and its rows hold together."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from paged_backend.kernels import cpu
from paged_backend.kernels.triton import support as triton_support

if triton_support.interpreted or not cpu.is_available():
    pytest.skip("has nothing to do with kernels that are interpreted, and needs a compiler", allow_module_level=True)

sys.path.append(str(Path(__file__).parents[2] / "kernels" / "bench"))
import bench_state


def test_each_operation_stands_beside_the_copy_the_reference_and_transformers(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_state.py", "--tiny", "--rounds", "1"])
    threads = torch.get_num_threads()
    try:
        bench_state.main()
    finally:
        torch.set_num_threads(threads)
    *_, delta, selective = capsys.readouterr().out.strip().splitlines()
    for row, name in ((delta, "gated_delta_update"), (selective, "selective_state_update")):
        shape, ms, rate, share, *times = [cell.strip() for cell in row.strip("|").split("|")]
        assert shape == f"{name}, 2 x 4 x 16 x 16"
        # A state is read and written.
        assert float(rate) == pytest.approx(2 * 4 * 2 * 4 * 16 * 16 / float(ms) / 1e6, rel=0.1, abs=0.06)
        assert share.endswith("%")
        assert len(times) == 2
        assert all(float(time.removesuffix("x")) > 0 for time in times)


def test_all_that_are_compared_compute_the_same():
    for draw, shape in (
        (bench_state.gated_delta_calls, (2, 4, 2, 16, 16)),
        (bench_state.selective_calls, (2, 4, 2, 8, 16)),
    ):
        batch, heads, _, *dims = shape
        slots = torch.arange(2 * batch)
        pool = torch.randn(2 * batch, heads, *dims)
        results = {
            who: call(pool.clone(), slots[:batch], slots[batch:]) for who, call in draw(*shape, torch.float32).items()
        }
        theirs = results.pop("theirs")
        theirs = theirs[0][:, 0] if isinstance(theirs, tuple) else theirs
        for result in results.values():
            torch.testing.assert_close(result, theirs, atol=1e-4, rtol=1e-4)

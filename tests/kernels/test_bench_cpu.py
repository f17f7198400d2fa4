"""The CPU benchmark runs on a tiny model and prints what it promises; its floors are sums that can be checked."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_models import make_tiny

from paged_backend.kernels import cpu
from paged_backend.kernels.triton import support as triton_support

if triton_support.interpreted or not cpu.is_available():
    pytest.skip("has nothing to do with kernels that are interpreted, and needs a compiler", allow_module_level=True)

sys.path.append(str(Path(__file__).parents[2] / "kernels" / "bench"))
import bench_cpu


@pytest.fixture
def small_memory(monkeypatch):
    monkeypatch.setattr(bench_cpu, "_MEMORY_BYTES", 4 << 20)


def run(monkeypatch, capsys, folder, *options):
    monkeypatch.setattr(sys, "argv", ["bench_cpu.py", str(folder), "--tiny", "--rounds", "1", *options])
    threads = torch.get_num_threads()
    try:
        bench_cpu.main()
    finally:
        torch.set_num_threads(threads)
    return capsys.readouterr().out


def figures(pattern, text):
    match = re.search(pattern, text)
    assert match, text
    return [float(figure) for figure in match.groups()]


def test_a_workload_and_the_split_of_its_steps_stand_beside_the_ceilings(monkeypatch, capsys, small_memory, tmp_path):
    make_tiny("llama").save_pretrained(tmp_path)
    printed = run(monkeypatch, capsys, tmp_path, "--dtype", "float32", "--stock")
    gflops, gbs = figures(r"at best (\d+) GFLOP/s and ([\d.]+) GB/s", printed)
    assert gflops > 0
    assert gbs > 0
    assert f"{cpu.running()}: at best" in printed
    shares = figures(r"by rows: 1: (\d+)%, 4: (\d+)%, 8: (\d+)%, 32: (\d+)%, 128: (\d+)%", printed)
    assert all(share > 0 for share in shares)
    assert "swapped {'layer': 3, 'linear': 1, 'norm': 1}" in printed
    assert all(rate > 0 for rate in figures(r"ragged: ([\d.]+) tokens/s, ([\d.]+) in steps of decodes", printed))
    assert len(re.findall(r"decodes at 8: .* at least", printed)) == 3
    assert len(re.findall(r"attention [\d.]+ ms: [\d.]+ GB/s", printed)) == 3
    assert figures(r"common beginning (\d+)%", printed) == [100]


def test_steps_of_modules_that_were_not_swapped_are_not_split(monkeypatch, capsys, small_memory, tmp_path):
    make_tiny("llama").save_pretrained(tmp_path)
    printed = run(monkeypatch, capsys, tmp_path, "--dtype", "float32", "--optimize", "none")
    assert "no whole layers were swapped" in printed
    assert "decodes at" not in printed


def test_a_floor_is_the_products_of_the_steps_and_the_attention_of_the_requests():
    weight = cpu.pack(torch.randn(64, 32))
    best = bench_cpu.Ceilings(2.0, 1e-3, [weight, weight], [weight])
    # 3 tokens in the layers, 1 row in the head; then memory, which is the slower of the two.
    assert best.operations(3, 1) == 2 * 64 * 32 * (2 * 3 + 1)
    assert best.products_s(3, 1) == pytest.approx(3 * 64 * 32 * 4 / 1e6)
    spec = SimpleNamespace(num_heads=2, key_dim=4, value_dim=4, bytes_per_token=lambda: 16)
    engine = SimpleNamespace(twin=SimpleNamespace(layers=[spec]))
    step = SimpleNamespace(num_decodes=0, num_prefill_tokens=3, num_new_tokens=1)
    # A prompt of 3 and 3 new tokens: the second and third are decoded after 4 and 5 tokens.
    least = best.workload_s(engine, SimpleNamespace(stats=[step]), [{"prompt": [1, 2, 3], "max_new_tokens": 3}])
    assert least == pytest.approx(best.products_s(3, 1) + 16 * (4 + 5) / 1e6 + 6 * 2 * 2 * 8 / 2e9)

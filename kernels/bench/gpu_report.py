"""What a few minutes on a GPU can tell, as markdown: correctness, both benchmarks, which tiles are best.

python kernels/bench/gpu_report.py --output gpu_report.md            # under eight minutes on one GPU
TRITON_INTERPRET=1 python kernels/bench/gpu_report.py --tiny --output gpu_report.md    # that it runs
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from unittest import mock

import bench_decode
import bench_prefill
import torch
from measure import Shape, copy_rate, describe, make_inputs, markdown, product_rate, seconds
from peers import PEERS, SLOW_TO_START

from paged_backend.kernels import (
    FULL,
    LayerCache,
    MaskRule,
    add_rms_norm,
    decode_attention,
    gated_delta_update,
    prefill_attention,
    rms_norm,
    rotary_store_kv,
    selective_state_update,
    silu_mul,
    store_kv,
)
from paged_backend.kernels.triton.tuning import Tiles

BUDGET_S = 450
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}


class Report:
    """Lines that are on disk as soon as they are known, so that a run that is cut short loses nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start = time.monotonic()
        path.write_text("")

    @property
    def seconds_left(self) -> float:
        return BUDGET_S - (time.monotonic() - self._start)

    def add(self, text: str) -> None:
        print(text, flush=True)
        with self._path.open("a") as file:
            file.write(text + "\n")

    def table(self, header: list[str], rows: Iterator[list[str]]) -> None:
        """A table, row by row, for as long as there is time."""
        self.add(markdown(header, []))
        for row in rows:
            self.add("| " + " | ".join(row) + " |")
            if self.seconds_left < 0:
                self.add("\nOut of time.")
                return
        self.add("")


def correctness(device: torch.device, context: int) -> Iterator[list[str]]:
    """Both phases against the reference on the same device; each feature at least twice, not all with all."""
    masks = [FULL, MaskRule("window", 70), MaskRule("chunk", 64)]
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    caches = [None, torch.int8, torch.float8_e4m3fn]
    for number, (dtype, cache, head_dim) in enumerate(itertools.product(dtypes, caches, (64, 80))):
        mask = masks[number % len(masks)]
        worst = []
        for query_len in (1, context // 4):
            shape = Shape(3, context, query_len, 14, 2, head_dim, dtype=dtype, cache_dtype=cache)
            inputs = make_inputs(shape, device)
            run = decode_attention if query_len == 1 else prefill_attention
            variant = inputs.variant._replace(mask=mask, softcap=20.0, sinks=torch.randn(14, device=device))
            arguments = (inputs.query, inputs.cache, inputs.sequences, variant)
            actual, expected = (run(*arguments, backend=name).float() for name in ("triton", "reference"))
            worst.append((actual - expected).abs().max().item())
        cached = str(cache or dtype).removeprefix("torch.")
        yield [
            f"{str(dtype).removeprefix('torch.')}, cache {cached}, {mask}, dim {head_dim}",
            *(f"{value:.1e}" for value in worst),
            "right" if max(worst) <= TOLERANCE[dtype] else "WRONG",
        ]


def small_operations(device: torch.device, copied: float, num_tokens: int) -> Iterator[list[str]]:
    """Bytes per second of what moves memory and computes little."""
    hidden, up = torch.randn(2, num_tokens, 8192, device=device).to(torch.bfloat16)
    weight = torch.ones(8192, device=device, dtype=torch.bfloat16)
    tokens = torch.randn(3, num_tokens, 8, 128, device=device).to(torch.bfloat16)
    cos, sin = torch.randn(2, num_tokens, 128, device=device)
    cache = LayerCache(*torch.zeros(2, -(-num_tokens // 16), 8, 16, 128, device=device).to(torch.bfloat16))
    slots = torch.randperm(num_tokens, device=device)
    calls: dict[str, tuple[Callable[[], object], int]] = {
        "store_kv": (lambda: store_kv(tokens[1], tokens[2], cache, slots, backend="triton"), 4 * tokens[0].nbytes),
        "rotary_store_kv": (
            lambda: rotary_store_kv(*tokens, cos, sin, cache, slots, backend="triton"),
            6 * tokens[0].nbytes + 2 * cos.nbytes,
        ),
        "rms_norm": (lambda: rms_norm(hidden, weight, eps=1e-6, backend="triton"), 2 * hidden.nbytes),
        "add_rms_norm": (lambda: add_rms_norm(hidden, up, weight, eps=1e-6, backend="triton"), 4 * hidden.nbytes),
        "silu_mul": (lambda: silu_mul(hidden, up, backend="triton"), 3 * hidden.nbytes),
    }
    for name, (call, moved) in calls.items():
        taken = seconds(call, device)
        yield [
            f"{name}, {num_tokens} tokens",
            f"{taken * 1e6:.1f}",
            f"{moved / taken / 1e9:.0f}",
            f"{moved / taken / copied:.0%}",
        ]


def state_operations(device: torch.device, copied: float, num_seqs: int, dim: int) -> Iterator[list[str]]:
    """Bytes per second of the states that a step of decodes reads and writes, in models of eight key heads."""
    states = torch.zeros(2 * num_seqs, 16, dim, dim, device=device)
    here, there = torch.randperm(2 * num_seqs, device=device).view(2, num_seqs)
    query, key = torch.randn(2, num_seqs, 8, dim, device=device).to(torch.bfloat16)
    value, z = torch.randn(2, num_seqs, 16, dim, device=device).to(torch.bfloat16)
    numbers, heads = -torch.rand(num_seqs, 16, device=device), -torch.rand(16, device=device)
    delta = (query, key, value, numbers, -numbers, states, here, there)
    selective = (states, value, numbers, heads, query, key, heads, z, heads, here, there)
    for name, call in (
        ("gated_delta_update", lambda: gated_delta_update(*delta, normalises=True, backend="triton")),
        ("selective_state_update", lambda: selective_state_update(*selective, softplus=True, backend="triton")),
    ):
        taken = seconds(call, device)
        moved = states.nbytes / taken
        yield [f"{name}, {num_seqs} x {dim}", f"{taken * 1e6:.1f}", f"{moved / 1e9:.0f}", f"{moved / copied:.0%}"]


def tilings(shape: Shape, device: torch.device, candidates: list[Tiles]) -> Iterator[list[str]]:
    """How each tiling does on a shape, to choose from."""
    phase = "decode" if shape.query_len == 1 else "prefill"
    module = sys.modules[f"paged_backend.kernels.triton.{phase}_attention"]
    bench, yardstick = (
        (bench_decode, copy_rate(device)) if phase == "decode" else (bench_prefill, product_rate(device, shape.dtype))
    )
    for tiles in candidates:
        with mock.patch.object(module, f"{phase}_tiles", lambda *_, tiles=tiles: tiles):
            try:
                row = bench.measure(shape, device, yardstick, without=tuple(PEERS))[:4]
            except Exception as error:
                row = [str(shape), type(error).__name__, "", ""]
        yield [f"{tiles.block_m} x {tiles.block_n}, {tiles.num_warps} warps, {tiles.num_stages} stages", *row]


DECODE_TILES = [Tiles(32, n, warps, stages) for n in (32, 64, 128) for warps in (2, 4, 8) for stages in (1, 2, 3, 5)]
PREFILL_TILES = [
    Tiles(m, n, warps, stages)
    for m, n, warps in ((128, 128, 8), (128, 64, 8), (128, 64, 4), (64, 64, 4), (128, 32, 8))
    for stages in (2, 3, 4)
]


def main() -> None:
    """Write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the markdown file to write")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU, under TRITON_INTERPRET=1")
    arguments = parser.parse_args()
    tiny = arguments.tiny
    device = torch.device("cpu" if tiny else "cuda")
    report = Report(arguments.output)

    copied, multiplied = copy_rate(device), product_rate(device, torch.bfloat16)
    report.add(
        f"{datetime.now(UTC):%Y-%m-%d}, {describe(device)}; copy {copied / 1e9:.0f} GB/s, "
        f"bfloat16 product {multiplied / 1e12:.3g} TFLOP/s\n"
    )

    def rows(bench: ModuleType, shapes: list[Shape], yardstick: float) -> Iterator[list[str]]:
        for shape in shapes:
            yield bench.measure(shape, device, yardstick, without=SLOW_TO_START if shape != shapes[0] else ())

    checks = correctness(device, context=20 if tiny else 300)
    report.table(
        ["largest difference from the reference", "decode", "prefill", ""],
        itertools.islice(checks, 2) if tiny else checks,
    )
    decodes, prefills = (
        [shape.tiny() for shape in shapes[:1]] if tiny else shapes
        for shapes in (bench_decode.SHAPES, bench_prefill.SHAPES)
    )
    report.table(bench_decode.HEADER, rows(bench_decode, decodes, copied))
    report.table(bench_prefill.HEADER, rows(bench_prefill, prefills, multiplied))
    header = ["tokens in bfloat16", "us", "GB/s", "of a copy"]
    report.table(header, small_operations(device, copied, num_tokens=5 if tiny else 16384))
    header = ["states of 16 heads", "us", "GB/s", "of a copy"]
    report.table(header, state_operations(device, copied, *((1, 16) if tiny else (256, 128))))
    header = ["decode tiles", *bench_decode.HEADER[:4]]
    report.table(header, tilings(decodes[0], device, DECODE_TILES[:1] if tiny else DECODE_TILES))
    header = ["prefill tiles", *bench_prefill.HEADER[:4]]
    report.table(header, tilings(prefills[0], device, PREFILL_TILES[:1] if tiny else PREFILL_TILES))


if __name__ == "__main__":
    main()

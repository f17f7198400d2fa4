"""What the engine reaches on a CPU, against ceilings of the same machine in the same run and against stock generate.

    taskset -c 1 python kernels/bench/bench_cpu.py MODEL [--threads 1] [--dtype bfloat16] [--quantize int8] [--stock]

MODEL is a folder or hub id. Prints the fastest product and the fastest read of memory that the machine shows, then
tokens a second of four workloads, then where the time of a step of decodes goes. --stock adds one padded batch of
stock generate, --perplexity what int8 weights cost on text.txt. Pin the process: on a busy machine, threads that wait
for each other are slower than one alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from bench_generate import agreement, draw_workload, run_engine, run_stock
from transformers import AutoModelForCausalLM, AutoTokenizer

from paged_backend import Engine, hookimpl
from paged_backend.batch import build_batch
from paged_backend.fused import FusedLayer
from paged_backend.kernels import cpu, decode_attention

_TEXT = Path(__file__).with_name("text.txt")
_MEMORY_BYTES = 256 << 20


def best_seconds(run: Callable[[], object], repeats: int = 7) -> float:
    """The least time of several runs, after one that is not counted."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def product_ceiling(dtype: torch.dtype) -> float:
    """GFLOP/s of the fastest product seen, by torch or by C++, whose operands fit the second-level cache."""
    best = 0.0
    for rows, size in ((96, 256), (256, 512), (512, 1024)):
        x, weight = torch.randn(rows, size).to(dtype), torch.randn(size, size).to(dtype)
        packed = cpu.pack(weight)
        seconds = min(
            best_seconds(partial(torch.nn.functional.linear, x, weight)),
            best_seconds(partial(packed, x)),
        )
        best = max(best, 2 * rows * size * size / seconds / 1e9)
    return best


def memory_ceiling() -> float:
    """GB/s of the fastest read of memory seen, from large pages and far beyond every cache."""
    memory = cpu.reserve(_MEMORY_BYTES)
    numbers = memory.view(torch.float32).zero_().view(-1, 32, 1024)
    x = torch.ones(1, numbers.shape[1] * 1024 // 32)
    # One row times a weight that is read once is as plain a read as a program does.
    weight = cpu.PackedLinear(memory.view(torch.float32).view(-1, 1024, 32), None, None, _MEMORY_BYTES // 4096)
    seconds = min(best_seconds(lambda: numbers.sum()), best_seconds(lambda: weight(x[:, :1024])))
    return _MEMORY_BYTES / seconds / 1e9


def workloads(vocab_size: int, seed: int) -> dict[str, list[dict]]:
    """Ragged, single, long and many long requests."""
    rng = random.Random(seed)

    def requests(count: int, prompt: int, output: int) -> list[dict]:
        return [
            {"prompt": [rng.randrange(100, vocab_size - 100) for _ in range(prompt)], "max_new_tokens": output}
            for _ in range(count)
        ]

    return {
        "32 ragged": draw_workload(vocab_size, seed),
        "1 x (64 + 128)": requests(1, 64, 128),
        "1 x (4096 + 64)": requests(1, 4096, 64),
        "8 x (2048 + 32)": requests(8, 2048, 32),
    }


class Steps:
    """A plugin that keeps what the engine says of each step."""

    def __init__(self) -> None:
        self.stats = []

    @hookimpl
    def step_finished(self, stats) -> None:
        self.stats.append(stats)


def rates(engine: Engine, steps: Steps, work: list[dict]) -> tuple[float, float, float]:
    """Tokens a second of a workload, of its steps of decodes alone, and milliseconds outside the forward pass.

    The last is the median of the steps with the most decodes.
    """
    steps.stats.clear()
    seconds, tokens = run_engine(engine, work)
    alone = [step for step in steps.stats if not step.num_prefill_tokens]
    decoding = sum(step.forward_s + step.overhead_s for step in alone)
    most = max(step.num_decodes for step in steps.stats)
    overhead = statistics.median(1e3 * step.overhead_s for step in alone if step.num_decodes >= 0.9 * most)
    return sum(map(len, tokens)) / seconds, sum(step.num_new_tokens for step in alone) / decoding, overhead


def step_split(engine: Engine, num_seqs: int, context: int, gflops: float, gbs: float) -> None:
    """Print where a step of `num_seqs` decodes at a context goes: products, attention, the rest of the pass."""
    runner, twin = engine.runner, engine.twin
    layers = [module for module in twin.module.modules() if isinstance(module, FusedLayer)]
    if not layers:
        print("  no whole layers were swapped; a split would be of somebody else's modules")
        return
    block_size = engine.blocks.block_size
    width = -(-context // block_size)
    engine.fit([context] * num_seqs)
    cache = engine.runner.kv_cache
    for layer in cache.layers:
        for tensor in layer.tensors():
            tensor.normal_()
    tables = np.random.default_rng(0).permutation(num_seqs * width).astype(np.int32).reshape(num_seqs, width)
    ids = twin.sample_token_ids(num_seqs)
    batch = build_batch(
        ids, [context - 1] * num_seqs, [], [], [], [tables for _ in cache.groups], block_size, twin.device
    )
    whole = best_seconds(lambda: runner.forward(batch))

    heads = [module for module in twin.module.modules() if hasattr(module, "packed")]
    rows = {}

    def products() -> None:
        for layer in layers:
            for weight in layer.weights:
                weight(rows.setdefault(_depth(weight), torch.randn(num_seqs, _depth(weight)).to(twin.dtype)))
        for head in heads:
            head.packed(rows.setdefault(_depth(head.packed), torch.randn(num_seqs, _depth(head.packed)).to(twin.dtype)))

    spec = twin.layers[0]
    query = torch.randn(num_seqs, spec.num_heads, spec.key_dim).to(spec.dtype)

    def attention() -> None:
        for index, layer in enumerate(cache.layers):
            rule = twin.layers[index].rule
            group = batch.groups[next(g for g, members in enumerate(cache.groups) if index in members.layers)]
            decode_attention(
                query, layer.key, layer.value, group.block_tables, batch.context_lens,
                scale=1.0, window=rule.window, chunk=rule.chunk, backend="cpu",
            )  # fmt: skip

    weights = [weight for layer in layers for weight in layer.weights] + [head.packed for head in heads]
    bytes_read = sum(weight.num_bytes for weight in weights)
    operations = 2 * num_seqs * sum(weight.num_columns * _depth(weight) for weight in weights)
    kv_bytes = sum(spec.bytes_per_token() for spec in twin.layers) * num_seqs * context
    linear_s, attention_s = best_seconds(products), best_seconds(attention)
    rest = max(0.0, whole - linear_s - attention_s)
    floor = max(operations / gflops / 1e9, bytes_read / gbs / 1e9) + kv_bytes / gbs / 1e9
    print(
        f"  {num_seqs} decodes at {context}: {whole * 1e3:.1f} ms, at least {floor * 1e3:.1f} ms ({floor / whole:.0%})"
    )
    print(
        f"    products {linear_s * 1e3:.1f} ms: {operations / linear_s / 1e9:.0f} GFLOP/s "
        f"({operations / linear_s / 1e9 / gflops:.0%}), {bytes_read / linear_s / 1e9:.1f} GB/s "
        f"({bytes_read / linear_s / 1e9 / gbs:.0%})"
    )
    print(
        f"    attention {attention_s * 1e3:.1f} ms: {kv_bytes / attention_s / 1e9:.1f} GB/s of keys and values "
        f"({kv_bytes / attention_s / 1e9 / gbs:.0%})"
    )
    print(f"    small operations and Python {rest * 1e3:.1f} ms")


def _depth(weight: cpu.PackedLinear) -> int:
    return weight.packed.shape[1] * (2 if weight.packed.dim() == 4 else 1)


def perplexity(model, token_ids: list[int], **options) -> float:
    """Of the model as the engine runs it, over all tokens but the first."""
    with Engine(model, elastic=True, **options) as engine:
        engine.fit([len(token_ids)])
        block_size = engine.blocks.block_size
        tables = [np.arange(-(-len(token_ids) // block_size), dtype=np.int32)[None]] * len(engine.blocks.groups)
        batch = build_batch([], [], [token_ids], [0], [1], tables, block_size, engine.twin.device)
        logits = engine.runner.forward(dataclasses.replace(batch, logits_rows=torch.arange(len(token_ids))))
        loss = torch.nn.functional.cross_entropy(logits[:-1].float(), torch.tensor(token_ids[1:]))
        return float(loss.exp())


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantize", choices=["int8"])
    parser.add_argument("--optimize", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stock", action="store_true")
    parser.add_argument("--perplexity", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).eval()

    gflops, gbs = product_ceiling(dtype), memory_ceiling()
    print(f"{args.dtype}, {args.threads} thread(s): at best {gflops:.0f} GFLOP/s and {gbs:.1f} GB/s")
    start, steps = time.perf_counter(), Steps()
    options = {"optimize": args.optimize, "quantize": args.quantize, "plugins": [steps]}
    engine = Engine(model, elastic=True, enable_prefix_caching=False, **options)
    stats = engine.stats()
    print(f"engine after {time.perf_counter() - start:.1f} s; {stats.packed_bytes:,} bytes packed")
    print(f"swapped {stats.swaps_made}")
    for name, why in list(stats.swaps_refused.items())[:5]:
        print(f"  {name} was not swapped: {why}")

    work = workloads(model.config.vocab_size, args.seed)
    for name, requests in work.items():
        engine.fit([len(r["prompt"]) + r["max_new_tokens"] for r in requests])
        rounds = [rates(engine, steps, requests) for _ in range(args.rounds)]
        whole, decode, overhead = (statistics.median(figures) for figures in zip(*rounds, strict=True))
        print(
            f"{name}: {whole:.1f} tokens/s, {decode:.1f} in steps of decodes alone, "
            f"{overhead:.2f} ms of a step outside the forward pass"
        )
    ragged = work["32 ragged"]
    for num_seqs, context in ((1, 128), (32, 250), (8, 2048)):
        step_split(engine, num_seqs, context, gflops, gbs)
    if args.stock:
        stock_s, stock_tokens = run_stock(model, ragged)
        paged_s, paged_tokens = run_engine(engine, ragged)
        print(
            f"32 ragged, stock generate padded: {sum(map(len, stock_tokens)) / stock_s:.1f} tokens/s, "
            f"{stock_s / paged_s:.2f} times slower; common beginning {agreement(stock_tokens, paged_tokens):.0%}"
        )
    if args.perplexity:
        token_ids = AutoTokenizer.from_pretrained(args.model)(_TEXT.read_text())["input_ids"]
        plain, rounded = perplexity(model, token_ids), perplexity(model, token_ids, quantize="int8")
        print(f"perplexity of {len(token_ids)} tokens: {plain:.3f}, {rounded:.3f} in int8 ({rounded / plain - 1:+.2%})")


if __name__ == "__main__":
    main()

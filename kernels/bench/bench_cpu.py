"""What the engine reaches on a CPU, against ceilings of the same machine in the same run and against stock generate.

    taskset -c 1 python kernels/bench/bench_cpu.py MODEL [--threads 1] [--dtype bfloat16] [--quantize int8] [--stock]

MODEL is a folder or hub id. Prints what computes, at which level of the processor, the fastest product and the fastest
read of memory that the machine shows, and the share of them that products reach by their rows; then tokens a second of
four workloads beside what these ceilings allow, then where the time of a step of decodes goes.
--stock adds one padded batch of stock generate, --perplexity what int8 weights cost on text.txt; --tiny shrinks the
workloads, for a test. Pin the process: on a busy machine, threads that wait for each other are slower than one alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from bench_generate import agreement, run_engine, run_stock
from transformers import AutoModelForCausalLM, AutoTokenizer
from workloads import draw

from paged_backend import Engine, hookimpl
from paged_backend.kernels import AttentionVariant, cpu, decode_attention
from paged_backend.model.batch import build_batch
from paged_backend.swaps.layer import FusedLayer

# Decodes at a context whose step is split, and what is run of each workload when all is to be tiny.
_SPLITS = ((1, 128), (32, 250), (8, 2048))
_TINY = 8
# Rows of tokens that the products are tried with by themselves.
_ROWS = (1, 4, 8, 32, 128)
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


class Steps:
    """A plugin that keeps what the engine says of each step."""

    def __init__(self) -> None:
        self.stats = []

    @hookimpl
    def step_finished(self, stats) -> None:
        self.stats.append(stats)


def rates(engine: Engine, steps: Steps, work: list[dict]) -> tuple[float, float, float, float]:
    """Tokens a second of a workload, of its steps of decodes alone, and what steps took outside the forward pass.

    That is the milliseconds of the median of the steps with the most decodes, and the share of the whole workload.
    """
    steps.stats.clear()
    seconds, tokens = run_engine(engine, work)
    alone = [step for step in steps.stats if not step.num_prefill_tokens]
    decoding = sum(step.forward_s + step.overhead_s for step in alone)
    most = max(step.num_decodes for step in steps.stats)
    overhead = statistics.median(1e3 * step.overhead_s for step in alone if step.num_decodes >= 0.9 * most)
    outside = seconds - sum(step.forward_s for step in steps.stats)
    return sum(map(len, tokens)) / seconds, sum(s.num_new_tokens for s in alone) / decoding, overhead, outside / seconds


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """GFLOP/s and GB/s that the machine shows, and the weights of a model: of all its layers, and of its head."""

    gflops: float
    gbs: float
    layers: list[cpu.PackedLinear]
    heads: list[cpu.PackedLinear]

    @property
    def weight_bytes(self) -> int:
        return sum(weight.num_bytes for weight in self.layers + self.heads)

    def operations(self, num_tokens: int, num_rows: int) -> int:
        """Of a step's products: all tokens pass the layers, and those whose logits are wanted the head."""
        sizes = [sum(w.num_columns * _depth(w) for w in weights) for weights in (self.layers, self.heads)]
        return 2 * (num_tokens * sizes[0] + num_rows * sizes[1])

    def products_s(self, num_tokens: int, num_rows: int) -> float:
        """The least that a step's products take: all arithmetic, and every weight read once."""
        return max(self.operations(num_tokens, num_rows) / self.gflops, self.weight_bytes / self.gbs) / 1e9

    def workload_s(self, engine: Engine, steps: Steps, work: list[dict]) -> float:
        """The least that a workload takes in the steps that were run: products, and the attention of every token.

        A decode reads the keys and values before it. Chunks multiply by theirs, once for scores and once for values.
        """
        products = sum(
            self.products_s(step.num_decodes + step.num_prefill_tokens, step.num_new_tokens) for step in steps.stats
        )
        read = multiplied = 0
        for request in work:
            prompt, output = len(request["prompt"]), request["max_new_tokens"]
            read += sum(range(prompt + 1, prompt + output))
            multiplied += prompt * (prompt + 1) // 2
        layers = engine.twin.layers
        read *= sum(spec.bytes_per_token() for spec in layers)
        multiplied *= sum(2 * spec.num_heads * (spec.key_dim + spec.value_dim) for spec in layers)
        return products + read / self.gbs / 1e9 + multiplied / self.gflops / 1e9


def ceilings(engine: Engine, dtype: torch.dtype) -> Ceilings:
    """Measured now, for the weights of the engine's packed layers and head."""
    modules = list(engine.twin.module.modules())
    return Ceilings(
        product_ceiling(dtype),
        memory_ceiling(),
        [weight for module in modules if isinstance(module, FusedLayer) for weight in module.weights],
        [module.packed for module in modules if hasattr(module, "packed")],
    )


def product_shares(best: Ceilings, dtype: torch.dtype) -> str:
    """What share of the ceilings all products of a step reach, by their rows."""
    shares = []
    for num_rows in _ROWS:
        rows = {depth: torch.randn(num_rows, depth).to(dtype) for depth in map(_depth, best.layers + best.heads)}

        def products(rows: dict[int, torch.Tensor] = rows) -> None:
            for weight in best.layers + best.heads:
                weight(rows[_depth(weight)])

        shares.append(f"{num_rows}: {best.products_s(num_rows, num_rows) / best_seconds(products, 3):.0%}")
    return ", ".join(shares)


def step_split(engine: Engine, num_seqs: int, context: int, best: Ceilings) -> None:
    """Print where a step of `num_seqs` decodes at a context goes: products, attention, the rest of the pass."""
    runner, twin = engine.runner, engine.twin
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

    depths = {_depth(weight) for weight in best.layers + best.heads}
    rows = {depth: torch.randn(num_seqs, depth).to(twin.dtype) for depth in depths}

    def products() -> None:
        for weight in best.layers + best.heads:
            weight(rows[_depth(weight)])

    spec = twin.layers[0]
    query = torch.randn(num_seqs, spec.num_heads, spec.key_dim).to(spec.dtype)

    def attention() -> None:
        for index, layer in enumerate(cache.layers):
            variant = AttentionVariant(1.0, twin.layers[index].rule)
            group = batch.groups[next(g for g, members in enumerate(cache.groups) if index in members.layers)]
            decode_attention(query, layer, group.decodes, variant, backend="cpu")

    operations = best.operations(num_seqs, num_seqs) / 1e9
    gigabytes = best.weight_bytes / 1e9
    kv_bytes = sum(spec.bytes_per_token() for spec in twin.layers) * num_seqs * context
    linear_s, attention_s = best_seconds(products), best_seconds(attention)
    rest = max(0.0, whole - linear_s - attention_s)
    floor = best.products_s(num_seqs, num_seqs) + kv_bytes / best.gbs / 1e9
    print(
        f"  {num_seqs} decodes at {context}: {whole * 1e3:.1f} ms, at least {floor * 1e3:.1f} ms ({floor / whole:.0%})"
    )
    print(
        f"    products {linear_s * 1e3:.1f} ms: {operations / linear_s:.0f} GFLOP/s "
        f"({operations / linear_s / best.gflops:.0%}), {gigabytes / linear_s:.1f} GB/s "
        f"({gigabytes / linear_s / best.gbs:.0%})"
    )
    print(
        f"    attention {attention_s * 1e3:.1f} ms: {kv_bytes / attention_s / 1e9:.1f} GB/s of keys and values "
        f"({kv_bytes / attention_s / 1e9 / best.gbs:.0%})"
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
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).eval()

    start, steps = time.perf_counter(), Steps()
    options = {"optimize": args.optimize, "quantize": args.quantize, "plugins": [steps]}
    engine = Engine(model, elastic=True, enable_prefix_caching=False, **options)
    stats = engine.stats()
    print(f"engine after {time.perf_counter() - start:.1f} s; {stats.packed_bytes:,} bytes packed")
    print(f"swapped {stats.swaps_made}")
    for name, why in list(stats.swaps_refused.items())[:5]:
        print(f"  {name} was not swapped: {why}")
    best = ceilings(engine, dtype)
    print(
        f"{args.dtype}, {args.threads} thread(s), {stats.kernels}: "
        f"at best {best.gflops:.0f} GFLOP/s and {best.gbs:.1f} GB/s"
    )
    if best.layers:
        print(f"products reach of that, by rows: {product_shares(best, dtype)}")

    work = draw(model.config.vocab_size, args.seed)
    if args.tiny:
        small = [{"prompt": r["prompt"][:_TINY], "max_new_tokens": _TINY} for r in work["ragged"]]
        work = {"ragged": small}
    for name, requests in work.items():
        engine.fit([len(r["prompt"]) + r["max_new_tokens"] for r in requests])
        rounds = [rates(engine, steps, requests) for _ in range(args.rounds)]
        whole, decode, overhead, outside = (statistics.median(figures) for figures in zip(*rounds, strict=True))
        print(
            f"{name}: {whole:.1f} tokens/s, {decode:.1f} in steps of decodes alone, "
            f"{overhead:.2f} ms of a step outside the forward pass, {outside:.1%} of the time in all"
        )
        if best.layers:
            seconds = sum(r["max_new_tokens"] for r in requests) / whole
            least = best.workload_s(engine, steps, requests)
            print(f"  {seconds:.2f} s; by the ceilings at least {least:.2f} s, of which this is {least / seconds:.0%}")
    ragged = work["ragged"]
    if not best.layers:
        print("no whole layers were swapped; a split of steps would be of somebody else's modules")
    for num_seqs, context in _SPLITS if best.layers else ():
        step_split(engine, num_seqs, _TINY if args.tiny else context, best)
    if args.stock:
        stock_s, stock_tokens = run_stock(model, ragged)
        paged_s, paged_tokens = run_engine(engine, ragged)
        print(
            f"ragged, stock generate padded: {sum(map(len, stock_tokens)) / stock_s:.1f} tokens/s, "
            f"{stock_s / paged_s:.2f} times slower; common beginning {agreement(stock_tokens, paged_tokens):.0%}"
        )
    if args.perplexity:
        token_ids = AutoTokenizer.from_pretrained(args.model)(_TEXT.read_text())["input_ids"]
        plain, rounded = perplexity(model, token_ids), perplexity(model, token_ids, quantize="int8")
        print(f"perplexity of {len(token_ids)} tokens: {plain:.3f}, {rounded:.3f} in int8 ({rounded / plain - 1:+.2%})")


if __name__ == "__main__":
    main()

"""Useful tokens a second of the engine against one padded stock generate, alternating in one process.

    taskset -c 1 python kernels/bench/bench_generate.py MODEL [--workload FILE] [--dtype bfloat16] [--rounds 3]

MODEL is a folder or hub id, or one of qwen3.5-0.8b, granite-4.0-h-micro and lfm2-1.2b: four layers of that shape, with
random weights. A workload is JSON: a list of {"prompt": [token ids], "max_new_tokens": n}; without one, 32
requests of 16 to 256 random prompt tokens and 16 to 256 output tokens are drawn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from shapes import SHAPES, make_shape
from transformers import AutoModelForCausalLM
from workloads import ragged

from paged_backend import Engine, SamplingParams


@torch.no_grad()
def run_stock(model, work: list[dict]) -> tuple[float, list[list[int]]]:
    """Seconds and tokens of one padded batch, each row cut to what it asked for."""
    width = max(len(request["prompt"]) for request in work)
    ids = torch.tensor([[0] * (width - len(r["prompt"])) + r["prompt"] for r in work])
    mask = torch.tensor([[0] * (width - len(r["prompt"])) + [1] * len(r["prompt"]) for r in work])
    longest = max(request["max_new_tokens"] for request in work)
    start = time.perf_counter()
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=longest, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    seconds = time.perf_counter() - start
    return seconds, [row[width : width + r["max_new_tokens"]].tolist() for row, r in zip(out, work, strict=True)]


def run_engine(engine: Engine, work: list[dict]) -> tuple[float, list[list[int]]]:
    """Seconds and tokens of the same requests through the engine."""
    params = [SamplingParams(max_tokens=request["max_new_tokens"], ignore_eos=True) for request in work]
    start = time.perf_counter()
    outputs = engine.generate([request["prompt"] for request in work], params)
    return time.perf_counter() - start, [output.token_ids for output in outputs]


def agreement(some: list[list[int]], others: list[list[int]]) -> float:
    """The mean share of a request's tokens before the first that differs."""
    shares = []
    for a, b in zip(some, others, strict=True):
        same = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
        shares.append(same / len(a))
    return statistics.mean(shares)


def main() -> None:
    """Read the command line and print a line per round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--workload", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=32, help="of the workload that is drawn")
    parser.add_argument("--backend", default="auto")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    if args.model in SHAPES:
        model = make_shape(args.model, dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).eval()
    work = (
        json.loads(args.workload.read_text())
        if args.workload
        else ragged(model.config.vocab_size, args.seed, args.requests)
    )
    engine = Engine(model, elastic=True, enable_prefix_caching=False, attention_backend=args.backend)
    count = sum(request["max_new_tokens"] for request in work)
    ratios = []
    for number in range(args.rounds):
        stock_s, stock_tokens = run_stock(model, work)
        paged_s, paged_tokens = run_engine(engine, work)
        ratios.append(stock_s / paged_s)
        print(
            f"round {number + 1}: stock {count / stock_s:.1f} tokens/s, paged {count / paged_s:.1f} tokens/s, "
            f"ratio {ratios[-1]:.2f}, common beginning {agreement(stock_tokens, paged_tokens):.0%}",
            flush=True,
        )
    print(f"median ratio {statistics.median(ratios):.2f} of {args.rounds}, {args.dtype}, {args.threads} thread(s)")


if __name__ == "__main__":
    main()

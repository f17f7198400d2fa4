"""Splits an engine's step: what scheduling, batch building, sampling and bookkeeping take beside the forward pass.

    python kernels/bench/bench_step.py [--running 32 256] [--steps 200] [--vocab 49152]

The model is tiny and its forward pass is replaced by ready-made logits, so that what is timed is the engine alone.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paged_backend import Engine, SamplingParams, hookimpl

LAPS = ("schedule", "batch", "sample", "update")


class StepLog:
    """Keeps the stats of every step."""

    def __init__(self) -> None:
        self.steps: list = []

    @hookimpl
    def step_finished(self, stats) -> None:
        self.steps.append(stats)


def measure(running: int, steps: int, vocab_size: int) -> list:
    """The stats of ``steps`` steps in which ``running`` requests decode."""
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    log = StepLog()
    engine = Engine(LlamaForCausalLM(config).eval(), elastic=True, max_num_seqs=running, plugins=[log])
    logits = torch.randn(running, vocab_size).bfloat16()
    engine.runner.forward = lambda batch: logits[: batch.logits_rows.numel()]
    for index in range(running):
        prompt = [(index * 31 + j) % vocab_size for j in range(16 + index % 200)]
        engine.add_request(prompt, SamplingParams(max_tokens=100 + steps, ignore_eos=True))
    while len(log.steps) < 1 or log.steps[-1].num_decodes < running:
        engine.step()
    log.steps.clear()
    for _ in range(steps):
        engine.step()
    return log.steps


def main() -> None:
    """Read the command line and print a row per number of running requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--vocab", type=int, default=49152)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{'running':>8}"
        + "".join(f"{name + ' ms':>14}" for name in LAPS)
        + f"{'beside forward':>17}{'us/request':>12}"
    )
    for running in args.running:
        steps = measure(running, args.steps, args.vocab)
        medians = {name: statistics.median(getattr(step, f"{name}_s") for step in steps) * 1e3 for name in LAPS}
        total = sum(medians.values())
        books = (total - medians["sample"]) / running * 1e3
        print(
            f"{running:>8}" + "".join(f"{medians[name]:>14.3f}" for name in LAPS) + f"{total:>14.3f} ms{books:>12.2f}"
        )
    print("us/request leaves out sampling, whose cost is that of reading the logits")


if __name__ == "__main__":
    main()

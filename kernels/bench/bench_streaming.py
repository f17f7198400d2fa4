"""What streaming costs per token beyond the step: every stream in one event loop, text included.

    python kernels/bench/bench_streaming.py [--streams 1 32 256] [--tokens 300]

The forward pass is replaced by ready-made logits, so the steps of the bare engine and those of the service differ in
the streaming alone, and no computing hides it: handing tokens over, waking the readers, turning tokens into text.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from functools import partial

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from paged_backend import AsyncEngine, Engine, SamplingParams


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def make_engine(streams: int) -> Engine:
    """An engine whose forward pass costs nothing; its tokens are letters."""
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=1 << 15,
    )
    engine = Engine(LlamaForCausalLM(config).eval(), tokenizer, elastic=True, max_num_seqs=streams)
    logits = torch.full((streams, len(tokenizer)), -10.0)
    logits[torch.arange(streams), 40 + torch.arange(streams) % 20] = 10.0
    engine.runner.forward = lambda batch: logits[: batch.logits_rows.numel()]
    return engine


def requests(streams: int, tokens: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of three tokens."""
    return [([index % 200, 7, 8], SamplingParams(max_tokens=tokens, ignore_eos=True)) for index in range(streams)]


def bare(engine: Engine, streams: int, tokens: int) -> None:
    """Step until all is done."""
    for prompt, params in requests(streams, tokens):
        engine.add_request(prompt, params)
    while engine.has_unfinished_requests():
        engine.step()


def streamed(engine: Engine, streams: int, tokens: int) -> int:
    """Read every stream to its end; returns the number of deltas."""

    async def read(service: AsyncEngine, prompt: list[int], params: SamplingParams) -> int:
        deltas = [delta async for delta in service.submit(prompt, params)]
        assert sum(len(delta.text) for delta in deltas) == tokens
        return len(deltas)

    async def main() -> int:
        async with AsyncEngine(engine) as service:
            counts = await asyncio.gather(*(read(service, *request) for request in requests(streams, tokens)))
            return sum(counts)

    return asyncio.run(main())


def seconds(run: Callable[[], object], repeats: int = 3) -> tuple[float, float]:
    """Wall seconds, and CPU seconds of all threads, each the best of some runs."""
    wall, cpu = [], []
    for _ in range(repeats):
        start, cpu_start = time.perf_counter(), time.process_time()
        run()
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - cpu_start)
    return min(wall), min(cpu)


def main() -> None:
    """Print a row for each number of streams."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--tokens", type=int, default=300)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("microseconds per token; CPU time is that of all threads")
    print(f"{'streams':>8}{'step':>10}{'streamed':>10}{'beyond':>10}{'beyond, CPU':>13}{'tokens/delta':>14}")
    for streams in args.streams:
        engine, count = make_engine(streams), streams * args.tokens
        bare(engine, streams, 20)
        deltas = streamed(engine, streams, args.tokens)
        wall, cpu = (t / count * 1e6 for t in seconds(partial(bare, engine, streams, args.tokens)))
        wall_both, cpu_both = (t / count * 1e6 for t in seconds(partial(streamed, engine, streams, args.tokens)))
        print(f"{streams:>8}{wall:>10.1f}{wall_both:>10.1f}{wall_both - wall:>10.1f}", end="")
        print(f"{cpu_both - cpu:>13.1f}{count / deltas:>14.2f}")


if __name__ == "__main__":
    main()

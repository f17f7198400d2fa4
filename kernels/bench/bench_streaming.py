"""What streaming costs per token beyond the step, text included: to tasks of one event loop, and to threads.

    python kernels/bench/bench_streaming.py [--tasks 1 32 256] [--threads 1] [--tokens 300] [--rounds 7]

The forward pass is replaced by ready-made logits, so the steps of the bare engine and those of the service differ in
the streaming alone, and no computing hides it: handing tokens over, waking the readers, turning tokens into text.
Each round runs the bare engine, the streams, and the bare engine waking a thread or an event loop after each step that
does nothing then but sleep again: the part which is the price of threads. Differences are taken within a round.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from paged_backend import AsyncEngine, Delta, Engine, SamplingParams


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


def bare(engine: Engine, streams: int, tokens: int, after_step: Callable[[], object] = bool) -> None:
    """Step until all is done."""
    for prompt, params in requests(streams, tokens):
        engine.add_request(prompt, params)
    while engine.has_unfinished_requests():
        engine.step()
        after_step()


def to_tasks(engine: Engine, streams: int, tokens: int) -> int:
    """Read every stream to its end, each in a task of one event loop; returns the number of deltas."""

    async def read(service: AsyncEngine, prompt: list[int], params: SamplingParams) -> int:
        return _checked([delta async for delta in service.submit(prompt, params)], tokens)

    async def main() -> int:
        async with AsyncEngine(engine) as service:
            return sum(await asyncio.gather(*(read(service, *request) for request in requests(streams, tokens))))

    return asyncio.run(main())


def to_threads(engine: Engine, streams: int, tokens: int) -> int:
    """Read every stream to its end, each in a thread; returns the number of deltas."""
    with AsyncEngine(engine) as service, ThreadPoolExecutor(streams) as pool:
        handles = [service.submit(*request) for request in requests(streams, tokens)]
        return sum(pool.map(lambda handle: _checked(list(handle), tokens), handles))


def _checked(deltas: list[Delta], tokens: int) -> int:
    assert sum(len(delta.text) for delta in deltas) == tokens
    return len(deltas)


def waking_a_loop(engine: Engine, streams: int, tokens: int) -> None:
    """What ``bare`` does, in a thread that wakes an event loop after each step."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        wake = partial(loop.call_soon_threadsafe, bool)
        await loop.run_in_executor(None, bare, engine, streams, tokens, wake)

    asyncio.run(main())


def waking_threads(engine: Engine, streams: int, tokens: int) -> None:
    """What ``bare`` does, waking as many threads as there are streams after each step."""
    bells: list[SimpleQueue[bool]] = [SimpleQueue() for _ in range(streams)]

    def ring(goes_on: bool = True) -> None:
        for bell in bells:
            bell.put(goes_on)

    def sleep(bell: SimpleQueue[bool]) -> None:
        while bell.get():
            pass

    threads = [threading.Thread(target=sleep, args=(bell,)) for bell in bells]
    for thread in threads:
        thread.start()
    bare(engine, streams, tokens, ring)
    ring(False)
    for thread in threads:
        thread.join()


def seconds(run: Callable[[], object]) -> tuple[float, float]:
    """Wall seconds, and CPU seconds of all threads."""
    start, cpu_start = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - start, time.process_time() - cpu_start


def row(streams: int, in_threads: bool, tokens: int, rounds: int) -> str:
    """Medians of some rounds, in microseconds per token."""
    engine, count = make_engine(streams), streams * tokens
    stream, wake = (to_threads, waking_threads) if in_threads else (to_tasks, waking_a_loop)
    bare(engine, streams, 20)
    stream(engine, streams, 20)
    results: list[int] = []
    measured: list[list[float]] = []
    for _ in range(rounds):
        wall, cpu = seconds(partial(bare, engine, streams, tokens))
        streamed_wall, streamed_cpu = seconds(lambda: results.append(stream(engine, streams, tokens)))
        _, woken_cpu = seconds(partial(wake, engine, streams, tokens))
        measured.append([wall, cpu, streamed_wall - wall, streamed_cpu - cpu, woken_cpu - cpu])
    cells = [statistics.median(column) / count * 1e6 for column in zip(*measured, strict=True)]
    readers = f"{streams} {'thread' if in_threads else 'task'}{'s' if streams > 1 else ''}"
    return f"{readers:>12}" + "".join(f"{cell:>14.1f}" for cell in cells) + f"{rounds * count / sum(results):>14.2f}"


def main() -> None:
    """Print a row for each number of streams."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, nargs="*", default=[1, 32, 256])
    parser.add_argument("--threads", type=int, nargs="*", default=[1])
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("microseconds per token, of CPU that of all threads; beyond the step of the bare engine:")
    names = ("step", "step, CPU", "beyond", "beyond, CPU", "wake-up, CPU", "tokens/delta")
    print(f"{'readers':>12}" + "".join(f"{name:>14}" for name in names))
    for streams, in_threads in [*((n, True) for n in args.threads), *((n, False) for n in args.tasks)]:
        print(row(streams, in_threads, args.tokens, args.rounds), flush=True)


if __name__ == "__main__":
    main()

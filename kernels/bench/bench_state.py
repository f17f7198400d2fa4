"""The operations on recurrent state on a CPU, against transformers' own functions and a copy, in one run.

    taskset -c 1 python kernels/bench/bench_state.py [--threads 1] [--dtype bfloat16] [--rounds 7]

Every call takes the pool of another layer, so that no state is still in a cache, and a row has medians of calls that
were made in turn: of the thread's own time where there is one, which others that want its core do not lengthen. Bytes
are those of the states, once read and once written, and a copy's are counted so too. --tiny shrinks all, for a test.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from measure import against, markdown
from transformers.models.mamba2.modeling_mamba2 import mamba2_selective_state_update
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from paged_backend.kernels import gated_delta_update, selective_state_update

HEADER = ["state", "ms", "GB/s", "of the copy", "against the reference", "against transformers"]
# Sequences, value heads, key heads, key and value dim; sequences, heads, groups, dims of a head and of its state.
GATED_DELTA = [(32, 16, 16, 128, 128), (8, 32, 16, 128, 128), (1, 16, 16, 128, 128), (1, 32, 16, 128, 128)]
SELECTIVE = [(32, 64, 1, 64, 128), (8, 24, 1, 64, 256), (1, 64, 1, 64, 128), (1, 128, 8, 64, 128)]
TINY_GATED_DELTA, TINY_SELECTIVE = [(2, 4, 2, 16, 16)], [(2, 4, 2, 16, 16)]
# Of the pools of all layers together, and of what is copied: many times what caches hold.
_MEMORY_BYTES = 384 << 20

# Calls of one operation, by who runs it, each with the pool, and the slots that are read and written.
Calls = dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]]


def gated_delta_calls(batch: int, heads: int, key_heads: int, key_dim: int, value_dim: int, dtype) -> Calls:
    """One token of Gated DeltaNet."""
    query, key = torch.randn(2, batch, key_heads, key_dim).to(dtype)
    value = torch.randn(batch, heads, value_dim).to(dtype)
    g, beta = -torch.rand(batch, heads), torch.rand(batch, heads).to(dtype)

    def ours(backend: str, state, slots_in, slots_out):
        tensors = (query, key, value, g, beta, state, slots_in, slots_out)
        return gated_delta_update(*tensors, normalises=True, backend=backend)

    def theirs(state, slots_in, slots_out):
        token = [tensor[:, None] for tensor in (query, key, value, g, beta)]
        options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        # Their states lie by themselves, in the order of the batch.
        return torch_recurrent_gated_delta_rule(*token, initial_state=state[:batch], **options)

    return {"cpu": partial(ours, "cpu"), "reference": partial(ours, "reference"), "theirs": theirs}


def selective_calls(batch: int, heads: int, groups: int, head_dim: int, state_dim: int, dtype) -> Calls:
    """One token of Mamba-2."""
    x, dt = torch.randn(batch, heads, head_dim).to(dtype), torch.randn(batch, heads).to(dtype)
    B, C = torch.randn(2, batch, groups, state_dim).to(dtype)
    A, D, dt_bias = -torch.rand(heads), torch.rand(heads), torch.rand(heads)

    def ours(backend: str, state, slots_in, slots_out):
        tensors = (state, x, dt, A, B, C, D, None, dt_bias, slots_in, slots_out)
        return selective_state_update(*tensors, softplus=True, backend=backend)

    def theirs(state, slots_in, slots_out):
        by_dim = [tensor[..., None].expand(*tensor.shape, head_dim) for tensor in (dt, A, D, dt_bias)]
        dts, rates, skips, biases = by_dim
        rates = rates[..., None].expand(-1, -1, state_dim)
        options = {"dt_bias": biases, "dt_softplus": True}
        return mamba2_selective_state_update(state[:batch], x, dts, rates, B, C, skips, **options)

    return {"cpu": partial(ours, "cpu"), "reference": partial(ours, "reference"), "theirs": theirs}


def copied(target: torch.Tensor, source: torch.Tensor) -> None:
    """A copy as fast as there is one: torch's with many threads, with one the C library's, which goes past caches."""
    if torch.get_num_threads() > 1:
        target.copy_(source)
    else:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)


def measure(name: str, calls: Calls, shape: Sequence[int], rounds: int, memory_bytes: int) -> list[str]:
    """A row of the table: medians over the pools and rounds, in each of which every call runs once on every pool."""
    batch = shape[0]
    state_bytes = 4 * torch.Size(shape).numel()
    layers = max(1, min(memory_bytes // (2 * state_bytes), 64))
    pools = [torch.randn(2 * batch, *shape[1:]) for _ in range(layers)]
    # Pieces that take no longer than the larger calls do, so that other work on the machine tells on both alike.
    pieces = torch.zeros(6, 2, memory_bytes // 12, dtype=torch.int8)
    slots = torch.randperm(2 * batch)
    here, there = slots[:batch].contiguous(), slots[batch:].contiguous()
    times: dict[str, list[float]] = {who: [] for who in (*calls, "copy")}

    clock = time.perf_counter if torch.get_num_threads() > 1 else time.thread_time

    def timed(who: str, call: Callable[[], object]) -> None:
        start = clock()
        call()
        times[who].append(clock() - start)

    for _ in range(rounds + 1):
        for who, call in calls.items():
            for pool in pools:
                timed(who, partial(call, pool, here, there))
        for source, target in pieces:
            timed("copy", partial(copied, target, source))
        here, there = there, here
    # The first round warms up.
    median = {who: statistics.median(taken[len(taken) // (rounds + 1) :]) for who, taken in times.items()}
    rate, ceiling = 2 * state_bytes / median["cpu"], 2 * pieces[0, 0].nbytes / median["copy"]
    return [
        f"{name}, {' x '.join(map(str, shape))}",
        f"{median['cpu'] * 1e3:.3f}",
        f"{rate / 1e9:.1f}",
        f"{rate / ceiling:.0%}",
        against(median["cpu"], median["reference"]),
        against(median["cpu"], median["theirs"]),
    ]


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    memory_bytes = 1 << 16 if args.tiny else _MEMORY_BYTES
    print(f"torch {torch.__version__}, {args.threads} thread(s), {args.dtype}\n")
    rows = []
    for name, draw, shapes in (
        ("gated_delta_update", gated_delta_calls, TINY_GATED_DELTA if args.tiny else GATED_DELTA),
        ("selective_state_update", selective_calls, TINY_SELECTIVE if args.tiny else SELECTIVE),
    ):
        for batch, heads, groups, *dims in shapes:
            calls = draw(batch, heads, groups, *dims, dtype)
            rows.append(measure(name, calls, (batch, heads, *dims), args.rounds, memory_bytes))
    print(markdown(HEADER, rows))


if __name__ == "__main__":
    main()

"""Times what each scheduling policy costs in a step: everything it is asked, and the checks of its answers.

    python kernels/bench/bench_policies.py [--waiting 10000] [--running 256] [--steps 300]

The real scheduler and block manager run without a model. Requests arrive as fast as others end, so that the number of
waiting ones stays; lengths, clients, classes and deadlines are random. Prints CPU milliseconds per step.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import statistics
from collections.abc import Generator
from time import thread_time
from typing import Any

from paged_backend.lab.virtual_engine import VirtualEngine
from paged_backend.policy.plugin_manager import PluginManager
from paged_backend.policy.policy_guard import PolicyGuard
from paged_backend.request.request import Request
from paged_backend.sampling_params import SamplingParams

TIMED = (
    "add",
    "remove",
    "rank_prefills",
    "victim",
    "preempts",
    "hold_until",
    "doomed",
    "on_tokens",
    "on_step",
    "on_finished",
)


class TimedGuard(PolicyGuard):
    """A guard that adds up how long it and its policy take."""

    seconds = 0.0

    def candidates(self, now: float) -> Generator[Request]:
        iterator = super().candidates(now)
        while True:
            start = thread_time()
            request = next(iterator, None)
            self.seconds += thread_time() - start
            if request is None:
                return
            yield request


def timed(name: str) -> Any:
    """The guard's method, timed."""
    method = getattr(PolicyGuard, name)

    def call(self: TimedGuard, *args: Any) -> Any:
        start = thread_time()
        try:
            return method(self, *args)
        finally:
            self.seconds += thread_time() - start

    return call


for _name in TIMED:
    setattr(TimedGuard, _name, timed(_name))


def measure(name: str, options: dict, waiting: int, running: int, steps: int) -> tuple[list[float], int, int]:
    """Seconds of policy work of each step, and how many requests arrived and were preempted meanwhile."""
    rng = random.Random(0)
    manager = PluginManager(load_entry_points=False)
    # Memory for two thirds of what would run, so that victims are named too.
    engine = VirtualEngine(
        manager.scheduler(name, options),
        manager.eviction_factory("lru", {}),
        lambda step: 0.05,
        num_blocks=running * 20 * 2 // 3,
        block_size=16,
        max_num_seqs=running,
        max_num_batched_tokens=2048,
        guard=TimedGuard,
    )
    guard, scheduler, errors = engine.policy, engine.scheduler, engine.errors
    # What reports of slow answers cost is part of what a policy costs.
    errors.times_answers = True
    orders, tokens = itertools.count(), itertools.count()

    def add() -> None:
        prompt = list(itertools.islice(tokens, rng.randint(16, 400)))
        order, output_length = next(orders), rng.randint(8, 200)
        request = Request(
            str(order),
            prompt,
            SamplingParams(max_tokens=output_length),
            engine.now,
            order,
            priority=rng.randint(0, 3),
            deadline=engine.now + rng.uniform(1, 1000) if rng.random() < 0.8 else None,
            client_id=str(rng.randint(0, 99)),
        )
        engine.enqueue(request, output_length)

    def step() -> None:
        engine.step(drain=True)
        while len(guard) < waiting:
            add()

    while len(guard) < waiting + running:
        add()
    for _ in range(100):
        step()
    # What thousands of waiting prompts cost the garbage collector is not the policy's doing.
    gc.collect()
    gc.freeze()
    seconds = []
    preempted, first_order = scheduler.num_preemptions, next(orders)
    for _ in range(steps):
        guard.seconds = 0.0
        step()
        seconds.append(guard.seconds)
    assert not {key: n for key, n in errors.counts.items() if "slow" not in key}, errors.counts
    return seconds, next(orders) - first_order - 1, scheduler.num_preemptions - preempted


def main() -> None:
    """Print a row for each registered policy, and for options that make one do more."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    rows = [(name, {}) for name in PluginManager(load_entry_points=False).names("scheduler")]
    rows += [("deadline", {"shed": True, "preempt": True}), ("priority", {"preempt": True}), ("static", {"batch": 256})]
    print(f"{args.waiting} waiting, {args.running} seats: policy work of a step in CPU ms")
    print(f"{'policy':44s} {'median':>8s} {'mean':>8s} {'p99':>8s} {'max':>8s}  arrivals  preemptions")
    for name, options in rows:
        seconds, arrived, preempted = measure(name, options, args.waiting, args.running, args.steps)
        ms = sorted(1000 * s for s in seconds)
        label = f"{name} {options}" if options else name
        print(
            f"{label:44s} {statistics.median(ms):8.3f} {statistics.fmean(ms):8.3f} {ms[int(0.99 * len(ms))]:8.3f} "
            f"{ms[-1]:8.3f}  {arrived:8d}  {preempted:11d}",
            flush=True,
        )


if __name__ == "__main__":
    main()

"""Two engines on two cores against one on one: the same dataset through Ray Data, in turn, in one run.

Each engine has an actor, a core and a thread of torch to itself. The time goes from the first batch to the last answer,
when all actors have loaded the model. The processor's seconds a row tell what other programs on the machine took away.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from typing import Any

import numpy as np
import ray

from paged_backend import sample_model
from paged_backend.integrations.ray import PagedPredictor


class PinnedPredictor(PagedPredictor):
    """Keeps to the first core that no other one has taken, and says when and for how long it worked."""

    def __init__(self, cores: str, **options: Any) -> None:
        for core in sorted(os.listdir(cores)):
            try:
                os.rename(f"{cores}/{core}", f"{cores}/taken-{os.getpid()}")
            except OSError:
                continue
            os.sched_setaffinity(0, {int(core)})
            break
        super().__init__(**options)
        super().__call__({"prompt": np.array(["The first steps find out what is fastest."] * 4)})

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        began, busy = time.time(), time.process_time()
        found = super().__call__(batch)
        worked = time.process_time() - busy
        count = len(batch["prompt"])
        times = {"began": began, "ended": time.time(), "worked": worked / count, "actor": os.getpid()}
        return {**found, **{name: np.full(count, value) for name, value in times.items()}}


def run(arguments: argparse.Namespace, cores: list[int]) -> dict[str, float]:
    """Rows a second, processor's seconds a row, and a sum over the answers, with an engine on each of the cores."""
    prompts = [
        f"Question {index}. " + "The market is held once a week. " * (1 + index % 12) for index in range(arguments.rows)
    ]
    with tempfile.TemporaryDirectory() as folder:
        for core in cores:
            open(f"{folder}/{core}", "w").close()
        blocks = max(1, arguments.rows // arguments.batch_size)
        dataset = ray.data.from_items([{"prompt": prompt} for prompt in prompts], override_num_blocks=blocks)
        options = {"model": arguments.model, "model_kwargs": {"dtype": arguments.dtype}, "cores": folder}
        params = {"max_tokens": arguments.max_tokens, "ignore_eos": True}
        rows = dataset.map_batches(
            PinnedPredictor,
            fn_constructor_kwargs={**options, "params": params, "kv_cache_memory": "256MiB"},
            compute=ray.data.ActorPoolStrategy(size=len(cores), max_tasks_in_flight_per_actor=1),
            num_cpus=1,
            batch_size=arguments.batch_size,
        ).take_all()
    assert len(rows) == arguments.rows
    assert {row["error"] for row in rows} == {""}
    assert len({row["actor"] for row in rows}) == len(cores)
    seconds = max(row["ended"] for row in rows) - min(row["began"] for row in rows)
    return {
        "rate": len(rows) / seconds,
        "worked": statistics.fmean(row["worked"] for row in rows),
        "tokens": sum(sum(row["token_ids"]) for row in rows),
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or hub id; by default the sample model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", type=int, default=192)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    arguments.model = arguments.model or sample_model.fetch()
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        parser.error("two cores are needed; let the program have them, as in taskset -c 0,1")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    # No batch before every engine is there.
    context.wait_for_min_actors_s = 600
    ratios = []
    for number in range(arguments.rounds):
        # One engine takes either core in turn, for another program may be on one of them.
        one, two = run(arguments, [cores[number % 2]]), run(arguments, cores)
        assert one["tokens"] == two["tokens"]
        ratios.append(two["rate"] / one["rate"])
        print(
            f"round {number + 1}: {one['rate']:.2f} rows/s on one, {two['rate']:.2f} on two, {ratios[-1]:.2f} times; "
            f"{one['worked']:.3f} and {two['worked']:.3f} processor seconds a row, same tokens",
            flush=True,
        )
    print(f"two engines on two cores: {statistics.median(ratios):.2f} times the rows a second of one on one (median)")
    ray.shutdown()


if __name__ == "__main__":
    main()

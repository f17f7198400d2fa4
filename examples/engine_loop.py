"""Step the engine by hand: requests join the running batch at any time, tokens come out as they are made."""

from __future__ import annotations

import argparse

import torch

from paged_backend import Engine, SamplingParams, sample_model

# Each prompt with the step before which it arrives.
ARRIVALS = [
    (0, "The three primary colours are"),
    (4, "Once upon a time there was a fox who"),
    (9, "The best way to cook rice is"),
]


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder or hub id; by default a small model that is fetched once")
    parser.add_argument("--max-tokens", type=int, default=16)
    arguments = parser.parse_args()

    name = arguments.model or sample_model.fetch()
    with Engine.from_pretrained(name, model_kwargs={"dtype": torch.float32}, kv_cache_memory="64MiB") as engine:
        arrivals, step = list(ARRIVALS), 0
        while arrivals or engine.has_unfinished_requests():
            while arrivals and arrivals[0][0] <= step:
                prompt = arrivals.pop(0)[1]
                request_id = engine.add_request(prompt, SamplingParams(max_tokens=arguments.max_tokens))
                print(f"step {step:3}  request {request_id} joins: {prompt!r}")
            for output in engine.step():
                if output.finished:
                    print(f"step {step:3}  request {output.request_id} ends ({output.finish_reason}): {output.text!r}")
            step += 1
        stats = engine.stats()
        print(f"{stats.num_generated_tokens} tokens in {stats.num_steps} steps, {stats.peak_running} requests at once")


if __name__ == "__main__":
    main()

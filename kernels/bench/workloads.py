"""The workloads that benchmarks of whole engines run."""

from __future__ import annotations

import random

# Request for request: {"prompt": [token ids], "max_new_tokens": n}.
Workload = list[dict]


def ragged(vocab_size: int, seed: int, count: int = 32) -> Workload:
    """Requests of 16 to 256 random prompt tokens that each ask for 16 to 256 tokens."""
    rng = random.Random(seed)
    return [
        {
            "prompt": [rng.randrange(100, vocab_size - 100) for _ in range(rng.randint(16, 256))],
            "max_new_tokens": rng.randint(16, 256),
        }
        for _ in range(count)
    ]


def draw(vocab_size: int, seed: int) -> dict[str, Workload]:
    """32 ragged requests; a single one of 64 + 128 tokens; a long one of 4096 + 64; 8 contexts of 2048 + 32."""
    rng = random.Random(seed)

    def equal(count: int, prompt: int, output: int) -> Workload:
        return [
            {"prompt": [rng.randrange(100, vocab_size - 100) for _ in range(prompt)], "max_new_tokens": output}
            for _ in range(count)
        ]

    return {
        "ragged": ragged(vocab_size, seed),
        "single": equal(1, 64, 128),
        "long": equal(1, 4096, 64),
        "contexts": equal(8, 2048, 32),
    }

"""What prompts of a trace share with earlier ones is found token by token, whatever form they have."""

from __future__ import annotations

import random

from paged_backend.lab.block_tokens import SPAN, BlockTokens
from paged_backend.lab.shared_prefixes import shared_lengths
from paged_backend.lab.trace import TraceRequest


def shared(*prompts, salts: dict[int, str] | None = None) -> list[int]:
    return shared_lengths(
        [TraceRequest(0.0, prompt, 5, cache_salt=(salts or {}).get(n)) for n, prompt in enumerate(prompts)]
    )


def test_only_earlier_prompts_count() -> None:
    assert shared([1, 2, 3, 4], [1, 2, 9], [1, 2, 9, 9, 9], [7]) == [0, 2, 3, 0]


def test_the_last_token_of_a_prompt_is_computed_in_any_case() -> None:
    assert shared([1, 2, 3, 4], [1, 2, 3, 4], [1, 2]) == [0, 3, 1]


def test_prompts_of_other_salts_share_nothing() -> None:
    prompts = [[1, 2, 3, 4]] * 4
    assert shared(*prompts, salts={1: "a", 2: "a", 3: ""}) == [0, 0, 3, 0]


def test_prompts_of_which_only_the_length_is_known_share_nothing() -> None:
    assert shared(range(2**40, 2**40 + 50), range(2**40 + 50, 2**40 + 90), [1, 2, 3]) == [0, 0, 0]


def test_prompts_of_known_blocks_share_whole_blocks_of_the_trace() -> None:
    first, second = BlockTokens([3, 4, 5], 3 * SPAN - 10), BlockTokens([3, 4, 6], 2 * SPAN + 7)
    assert shared(first, second, BlockTokens([3], 40), BlockTokens([9], 40)) == [0, 2 * SPAN, 39, 0]


def test_many_prompts_come_to_what_comparing_each_with_each_does() -> None:
    draw = random.Random(0)
    prompts = [[draw.randrange(2) for _ in range(draw.randint(1, 12))] for _ in range(200)]

    def common(a: list[int], b: list[int]) -> int:
        return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

    expected = [
        min(max((common(prompt, other) for other in prompts[:n]), default=0), len(prompt) - 1)
        for n, prompt in enumerate(prompts)
    ]
    assert shared(*prompts) == expected

"""The demo's prompts are what the README says of them."""

from __future__ import annotations

from paged_backend.cli.prompts import PROMPTS


def test_there_are_sixteen_different_prompts_of_mixed_length():
    assert len(set(PROMPTS)) == len(PROMPTS) == 16
    lengths = [len(prompt.split()) for prompt in PROMPTS]
    assert min(lengths) == 6
    assert max(lengths) > 20 * min(lengths)
    assert all(prompt == prompt.strip() for prompt in PROMPTS)

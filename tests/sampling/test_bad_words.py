"""Banned words are those that transformers' own processor bans, whatever the default dtype is."""

from __future__ import annotations

import pytest
import torch
from transformers.generation.logits_process import NoBadWordsLogitsProcessor

from paged_backend.sampling.bad_words import BadWords

WORDS = [[3], [5, 6], [6, 5], [1, 5, 7], [2], [2, 4], [8, 8, 8, 8, 8]]
EOS = 2


@pytest.mark.parametrize(
    "seen", [[0], [5], [6, 5], [1, 5], [0, 1, 5], [6], [0, 6], [0, 2], [8, 8, 8, 8], [0, 8, 8, 8, 8], [1, 5, 0]]
)
@pytest.mark.parametrize("words", [WORDS, WORDS[:1], WORDS[1:4]])
def test_the_same_tokens_are_banned_as_by_transformers(seen: list[int], words: list[list[int]]) -> None:
    input_ids, scores = torch.tensor([seen]), torch.randn(1, 10, generator=torch.Generator().manual_seed(0))
    expected = NoBadWordsLogitsProcessor(words, [EOS])(input_ids, scores)
    assert torch.equal(BadWords(words, [EOS])(input_ids, scores), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_does_not_matter(dtype: torch.dtype) -> None:
    words, scores = BadWords([[3], [0, 4]], []), torch.zeros(1, 6)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        banned = words(torch.tensor([[1, 0]]), scores)
    finally:
        torch.set_default_dtype(before)
    assert banned.dtype == torch.float32
    assert banned[0].isinf().nonzero().flatten().tolist() == [3, 4]


def test_an_end_of_text_alone_is_never_banned() -> None:
    assert not BadWords([[EOS]], [EOS])(torch.tensor([[1]]), torch.zeros(1, 6)).isinf().any()

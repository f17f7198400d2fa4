"""How many tokens spell a part of an output."""

from __future__ import annotations

import pytest
from tiny_tokenizers import byte_tokenizer

from paged_backend.integrations.chat.token_counts import num_tokens_of
from paged_backend.outputs import RequestMetrics, RequestOutput

TOKENIZER = byte_tokenizer()


def output(text: str) -> RequestOutput:
    ids = TOKENIZER(text)["input_ids"]
    return RequestOutput("0", 0, [5], RequestMetrics(arrival_time=1.0), ids, decode=TOKENIZER.decode)


@pytest.mark.parametrize(("part", "count"), [("a", 1), ("é", 2), ("b", 1), ("aéb", 4), ("ab", 2)])
def test_the_tokens_of_a_part_are_those_that_spell_it(part: str, count: int):
    assert num_tokens_of(part, output("aéb"), TOKENIZER) == count

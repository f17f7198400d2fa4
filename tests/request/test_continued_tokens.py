"""A prompt that is not copied and its output read like the list of both."""

from __future__ import annotations

import pytest

from paged_backend.request.continued_tokens import ContinuedTokens
from paged_backend.request.request import Request
from paged_backend.sampling_params import SamplingParams


def continued(prompt: range, output: list[int]) -> ContinuedTokens:
    tokens = ContinuedTokens(prompt)
    for token in output:
        tokens.append(token)
    return tokens


@pytest.mark.parametrize("output", [[], [7], [7, 8, 9]])
def test_every_index_and_slice_is_that_of_the_list(output: list[int]) -> None:
    tokens, listed = continued(range(100, 105), output), [*range(100, 105), *output]
    assert (len(tokens), list(tokens)) == (len(listed), listed)
    places = range(-len(listed), len(listed))
    assert [tokens[i] for i in places] == [listed[i] for i in places]
    for start in range(-9, 10):
        for stop in range(-9, 10):
            assert list(tokens[start:stop]) == listed[start:stop]
    assert list(tokens[::2]) == listed[::2]
    for beyond in (len(listed), -len(listed) - 1):
        with pytest.raises(IndexError):
            tokens[beyond]


def test_a_request_copies_no_prompt_but_a_list() -> None:
    lazy, listed = range(3, 10**9), [3, 4, 5]
    request = Request("0", lazy, SamplingParams(), 0.0, 0)
    request.append_token(1)
    request.replace_last_token(2)
    assert (request.num_tokens, request.token_ids[-1], request.token_ids[10**9 - 4]) == (10**9 - 2, 2, 10**9 - 1)
    assert request.output.prompt_token_ids is lazy
    copied = Request("1", listed, SamplingParams(), 0.0, 1)
    listed.append(6)
    assert (copied.token_ids, copied.num_tokens) == ([3, 4, 5], 3)

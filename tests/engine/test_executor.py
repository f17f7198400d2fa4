"""A step is carried out in one pass or two, and a pass that fails harms only whom it fails for."""

from __future__ import annotations

import pytest
from block_checks import assert_all_blocks_are_back
from ragged_prompts import GREEDY

from paged_backend import Engine


@pytest.mark.parametrize("block_size", [1, 7, 16, 32, 256])
@pytest.mark.parametrize("batching", ["shared", "separate"])
def test_block_size_and_batching_do_not_change_tokens(llama, prompts, expected, block_size, batching):
    engine = Engine(llama, block_size=block_size, batching=batching, max_num_batched_tokens=16)
    assert [output.token_ids for output in engine.generate(prompts, GREEDY)] == expected
    assert_all_blocks_are_back(engine)


def test_forward_pass_that_fails_for_one_request_fails_it_alone(llama, prompts, expected):
    engine = Engine(llama)
    ids = [engine.add_request(prompt, GREEDY) for prompt in prompts]
    poison = prompts[2][3]
    forward = engine.runner.forward

    def failing(batch):
        if poison in batch.input_ids.tolist():
            raise RuntimeError("out of memory")
        return forward(batch)

    engine.runner.forward = failing
    outputs = {}
    while engine.has_unfinished_requests():
        outputs.update((output.request_id, output) for output in engine.step())
    # A token may come up in several requests; those that never fed it are untouched.
    for request_id, prompt, tokens in zip(ids, prompts, expected, strict=True):
        if poison in prompt or poison in tokens[:-1]:
            assert outputs[request_id].finish_reason == "error"
        else:
            assert outputs[request_id].token_ids == tokens
    assert outputs[ids[2]].finish_reason == "error"
    assert_all_blocks_are_back(engine)

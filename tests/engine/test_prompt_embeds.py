"""Prompts that are fed as embeddings: the model sees them, and nothing else takes them for their tokens."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_greedy, draw_prompts, stock_greedy
from tiny_models import make_tiny

from paged_backend import Engine, SamplingParams
from paged_backend.errors import RequestRefused

NUM_TOKENS = 10
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def llama():
    return make_tiny("llama")


def run(engine, requests):
    ids = [engine.add_request(**request) for request in requests]
    outputs = [engine.outputs(request_id)[0] for request_id in ids]
    while engine.has_unfinished_requests():
        engine.step()
        engine.blocks.check_integrity()
    return outputs


def embedded(model, prompt):
    """A request that feeds the embeddings of ``prompt`` under other tokens."""
    with torch.no_grad():
        embeds = model.get_input_embeddings()(torch.tensor(prompt))
    return {"prompt": [7] * len(prompt), "params": GREEDY, "prompt_embeds": embeds}


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "opt"])
@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 5, "block_size": 4}, {"batching": "separate", "max_num_batched_tokens": 16}],
    ids=str,
)
def test_embeddings_are_fed_in_place_of_the_prompts_tokens(family, options):
    model = make_tiny(family)
    prompts = draw_prompts([9, 3, 21, 12])
    expected = [stock_greedy(model, prompt, NUM_TOKENS) for prompt in prompts]
    # Every other prompt comes as tokens, in the same batches.
    requests = [embedded(model, p) if n % 2 else {"prompt": p, "params": GREEDY} for n, p in enumerate(prompts)]
    outputs = run(Engine(model, elastic=True, **options), requests)
    for prompt, output, tokens in zip(prompts, outputs, expected, strict=True):
        assert_greedy(model, prompt, output.token_ids, tokens)


def test_a_preempted_prompt_is_fed_its_embeddings_again(llama):
    prompts = draw_prompts([14, 15, 16])
    expected = [stock_greedy(llama, prompt, NUM_TOKENS) for prompt in prompts]
    engine = Engine(llama, kv_cache_memory=45_000, block_size=4)
    outputs = run(engine, [embedded(llama, prompt) for prompt in prompts])
    assert engine.stats().num_preemptions > 0
    for prompt, output, tokens in zip(prompts, outputs, expected, strict=True):
        assert_greedy(llama, prompt, output.token_ids, tokens)


def test_such_a_prompt_shares_no_prefix_with_its_tokens(llama):
    engine = Engine(llama, elastic=True, block_size=4)
    prompts = draw_prompts([13, 13])
    for prompt in prompts:
        (output,) = run(engine, [embedded(llama, prompt)])
        assert_greedy(llama, prompt, output.token_ids, stock_greedy(llama, prompt, NUM_TOKENS))
    (output,) = run(engine, [{"prompt": [7] * 13, "params": GREEDY}])
    assert_greedy(llama, [7] * 13, output.token_ids, stock_greedy(llama, [7] * 13, NUM_TOKENS))
    assert engine.stats().num_prefix_hits == 0
    assert run(engine, [{"prompt": [7] * 13, "params": GREEDY}])[0].token_ids == output.token_ids
    assert engine.stats().num_prefix_hits == 1


def test_the_samples_of_a_prompt_share_its_embeddings(llama):
    (prompt,) = draw_prompts([11])
    params = SamplingParams(max_tokens=6, temperature=1.0, n=3, seed=5, ignore_eos=True)
    expected = Engine(llama, elastic=True).generate(prompt, params)
    engine = Engine(llama, elastic=True)
    request_id = engine.add_request(**{**embedded(llama, prompt), "params": params})
    outputs = engine.outputs(request_id)
    while engine.has_unfinished_requests():
        engine.step()
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]


@pytest.mark.parametrize(
    ("embeds", "message"),
    [
        (torch.zeros(3, 63), r"\(3, 64\).*\(3, 63\)"),
        (torch.zeros(2, 64), r"\(3, 64\).*\(2, 64\)"),
        (torch.zeros(3, 64, dtype=torch.long), "floats"),
        ([[0.0] * 64] * 3, "floats"),
    ],
    ids=["width", "length", "integers", "list"],
)
def test_embeddings_of_the_wrong_shape_or_kind_are_refused(llama, embeds, message):
    engine = Engine(llama, elastic=True)
    with pytest.raises(RequestRefused, match=message):
        engine.add_request([5, 6, 7], GREEDY, prompt_embeds=embeds)
    assert not engine.has_unfinished_requests()

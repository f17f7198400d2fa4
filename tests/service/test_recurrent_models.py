"""AsyncEngine on models that keep recurrent state: callers share a batch, leave it and come back."""

from __future__ import annotations

import pytest
from oracle import assert_greedy, draw_prompts, stock_greedy
from recurrent_models import make_recurrent
from service_checks import PATIENCE_S, Steps, assert_closed, greedy

from paged_backend import AsyncEngine, Engine

OPTIONS = {"block_size": 5, "max_num_seqs": 3, "max_num_batched_tokens": 24, "optimize": "none"}


# One that goes on from a state with many tokens at once, and one that does token by token.
@pytest.fixture(scope="module", params=["qwen3_next", "jamba"])
def model(request):
    return make_recurrent(request.param)


def assert_stock(model, prompt, tokens):
    assert_greedy(model, prompt, tokens, stock_greedy(model, prompt, len(tokens)))


def test_a_stream_among_others_gets_stocks_tokens_as_they_do(model):
    prompts = draw_prompts([13, 31, 4, 22, 1])
    with AsyncEngine(Engine(model, **OPTIONS)) as service:
        handles = [service.submit(prompt, greedy()) for prompt in prompts]
        deltas = list(handles[0])
        outputs = [handle.result(PATIENCE_S) for handle in handles]
    assert [token for delta in deltas for token in delta.token_ids] == outputs[0].token_ids
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output.token_ids) == 8
        assert_stock(model, prompt, output.token_ids)
    assert_closed(service)


def test_who_leaves_takes_nothing_from_the_states_of_the_others(model):
    steps = Steps()
    prompts = draw_prompts([13, 7, 9, 18])
    with AsyncEngine(Engine(model, **OPTIONS, plugins=[steps])) as service:
        handles = [service.submit(prompt, greedy(12)) for prompt in prompts]
        steps.wait(5)
        # The fourth takes its seat, and with it its place among the states.
        handles[1].cancel()
        steps.free()
        outputs = [handle.result(PATIENCE_S) for handle in handles]
    assert [output.finish_reason for output in outputs] == ["length", "abort", "length", "length"]
    assert outputs[1].token_ids
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_stock(model, prompt, output.token_ids)
    assert_closed(service)


def test_the_next_turn_of_a_chat_goes_on_from_the_state_of_the_one_before(model):
    first, more = draw_prompts([23, 6])
    with AsyncEngine(Engine(model, **OPTIONS)) as service:
        answer = service.submit(first, greedy(9)).result(PATIENCE_S).token_ids
        second = first + answer + more
        output = service.submit(second, greedy(9)).result(PATIENCE_S)
    # The last token of the answer was never computed.
    assert output.metrics.num_cached_tokens == 30
    assert_stock(model, second, output.token_ids)

"""Without a model, every step takes its seconds and every request its own number of tokens."""

from __future__ import annotations

from model_free import ModelFree

from paged_backend.lab.virtual_executor import EOS
from paged_backend.plugins.fifo import Fifo


def test_a_request_generates_as_many_tokens_as_expected():
    engine = ModelFree(Fifo())
    short, long = engine.add(3, 2), engine.add(3, 5)
    engine.run()
    assert [len(request.output.token_ids) for request in (short, long)] == [2, 5]


def test_a_request_that_ends_before_max_tokens_ends_with_eos():
    engine = ModelFree(Fifo())
    stopped, full = engine.add(3, 2, max_tokens=9), engine.add(3, 2)
    engine.run()
    assert (stopped.output.finish_reason, stopped.output.token_ids[-1]) == ("stop", EOS)
    assert full.output.finish_reason == "length"
    assert EOS not in full.output.token_ids


def test_every_generated_token_is_another():
    engine = ModelFree(Fifo())
    requests = [engine.add(3, 4) for _ in range(3)]
    engine.run()
    tokens = [token for request in requests for token in request.output.token_ids]
    assert len(set(tokens)) == len(tokens) == 12


def test_the_clock_passes_by_what_a_step_takes():
    engine = ModelFree(Fifo(), step_s=lambda num_decodes, num_prefill_tokens: num_decodes + 0.5 * num_prefill_tokens)
    engine.add(4, 3)
    engine.run()
    # The prompt gives the first token, then come two decodes.
    assert engine.now == 0.5 * 4 + 2

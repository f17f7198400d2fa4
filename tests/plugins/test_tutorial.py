"""The tutorial in plugins/README.md runs as it is written, from top to bottom."""

from __future__ import annotations

import re

import plugin_reference
import prometheus_client
import pytest
from oracle import draw_prompts
from tiny_models import make_tiny

import paged_backend
from paged_backend import Engine, SamplingParams
from paged_backend.errors import RequestRefused

TUTORIAL = plugin_reference.README.read_text().split("## Reference")[0]
GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def model():
    return make_tiny("llama", num_hidden_layers=1)


@pytest.fixture(scope="module")
def steps(model) -> list[dict]:
    """The names that are defined after each block of code; an engine is known by the block that made it."""
    namespace = {"model": model, "Engine": paged_backend.Engine}
    registry = prometheus_client.REGISTRY
    before = set(registry._collector_to_names)
    after = []
    for source in re.findall(r"^```python\n(.*?)^```", TUTORIAL, re.DOTALL | re.MULTILINE):
        exec(compile(source, str(plugin_reference.README), "exec"), namespace)
        after.append(dict(namespace))
    yield after
    for collector in set(registry._collector_to_names) - before:
        registry.unregister(collector)


def engine_with(steps: list[dict], name: str) -> Engine:
    """The engine of the block that first knew ``name``."""
    return next(step for step in steps if name in step)["engine"]


def ends(engine: Engine, *requests: dict) -> list[str]:
    """The ids of requests, named by arrival, in the order in which they end."""
    for index, request in enumerate(requests):
        engine.add_request(**{"params": GREEDY, "request_id": str(index), **request})
    order = []
    while engine.has_unfinished_requests():
        order += [output.request_id for output in engine.step() if output.finished]
    assert engine.stats().policy_errors == {}
    return order


def prompts(*lengths: int) -> list[dict]:
    return [{"prompt": prompt} for prompt in draw_prompts(lengths)]


def one_seat(model, policy, **options) -> Engine:
    return Engine(model, scheduler=policy, scheduler_options=options, max_num_seqs=1, strict_policies=True)


def test_short_prompts_go_first(steps, model):
    policy = type(engine_with(steps, "ShortPromptsFirst").scheduler.policy.policy)
    assert policy.__name__ == "ShortPromptsFirst"
    assert ends(one_seat(model, policy), *prompts(9, 30, 4, 12)) == ["2", "0", "3", "1"]


def test_options_reach_the_policy(steps):
    policy = engine_with(steps, "ShortPromptsFirstWithAging").scheduler.policy.policy
    assert policy.aging == 5.0


def test_clients_take_turns(steps, model):
    requests = [{**p, "client_id": c} for p, c in zip(prompts(4, 4, 4, 4, 4), "aaabb", strict=True)]
    assert ends(one_seat(model, steps[-1]["ClientsInTurn"]), *requests) == ["0", "3", "1", "4", "2"]


def test_a_request_is_added_with_what_callers_may_say(steps):
    engine = engine_with(steps, "ClientsInTurn")
    (request,) = engine.scheduler.policy.waiting
    assert (request.priority, request.client_id, request.metadata) == (-1, "ann", {"tier": "gold"})


def test_gold_takes_a_seat(steps):
    engine = engine_with(steps, "GoldFirst")
    long = SamplingParams(max_tokens=20, ignore_eos=True)
    plain, gold = prompts(5, 6)
    engine.add_request(**plain, params=long, request_id="plain")
    for _ in range(3):
        engine.step()
    assert ends(engine, {**gold, "request_id": "gold", "metadata": {"tier": "gold"}}) == ["gold", "plain"]
    assert engine.stats().num_preemptions == 1


def test_policies_for_blocks_are_used(steps):
    engine = engine_with(steps, "KeepUrgentPrefixes")
    assert type(engine.blocks.pools[0].policy.policy).__name__ == "KeepUrgentPrefixes"
    assert engine.blocks.block_size == 1024 // (16 * 4)
    assert len(ends(engine, *prompts(4, 9))) == 2


def test_attention_of_a_plugin_gives_the_same_tokens(steps, model):
    engine = engine_with(steps, "OneByOne")
    asked = draw_prompts((4, 9, 21))
    expected = Engine(model).generate(asked, GREEDY)
    outputs = engine.generate(asked, GREEDY)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]


def test_listener_hears(steps):
    assert steps[-1]["slowest"].seconds > 0


def test_shipped_listeners_count(steps):
    engine = engine_with(steps, "Prometheus")
    ends(engine, *prompts(4, 9))
    assert b"paged_backend_requests_total 2.0" in prometheus_client.generate_latest()


def test_long_prompts_are_refused(steps):
    engine = engine_with(steps, "ShortPromptsOnly")
    with pytest.raises(RequestRefused, match="101 prompt tokens; at most 100"):
        engine.add_request(draw_prompts((101,))[0])


def test_offered_name_can_be_chosen(steps, model):
    from types import SimpleNamespace

    plugin = SimpleNamespace(register_schedulers=steps[-1]["register_schedulers"])
    engine = Engine(model, plugins=[plugin], scheduler="short_prompts_first")
    assert type(engine.scheduler.policy.policy) is steps[-1]["ShortPromptsFirst"]

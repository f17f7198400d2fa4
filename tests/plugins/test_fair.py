"""fair: two clients that both want more get the same service, within the bound of virtual token counters."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_free import ModelFree

from paged_backend.errors import ConfigError
from paged_backend.plugins.fair import Fair
from paged_backend.plugins.fifo import Fifo
from paged_backend.plugins.token_counters import MANY_CLIENTS

CLIENTS = ("a", "b", "c")
LONGEST_PROMPT, MOST_OUTPUT, SEATS = 20, 8, 4
ARRIVALS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(CLIENTS), st.integers(1, LONGEST_PROMPT), st.integers(1, MOST_OUTPUT)),
    min_size=4,
    max_size=80,
)


class Ledger:
    """Watches an engine from outside: who received how much, and the widest gap while two clients both waited."""

    def __init__(self, engine: ModelFree, weights: dict[str, float]) -> None:
        self.engine, self.weights = engine, weights
        self.service: Counter = Counter()
        self.waiting: Counter = Counter()
        self.started: set = set()
        self.bounds: dict[tuple[str, str], tuple[float, float]] = {}
        self.widest = 0.0
        add, remove, on_tokens = engine.policy.add, engine.policy.remove, engine.policy.on_tokens

        def watch_add(request, now):
            self.waiting[request.client_id] += 1
            add(request, now)

        def watch_remove(request):
            self.waiting[request.client_id] -= 1
            if not request.is_waiting and request not in self.started:
                self.started.add(request)
                self.service[request.client_id] += request.num_prompt_tokens
            self.measure()
            remove(request)

        def watch_tokens(counts, now):
            for request, _ in counts:
                if request.num_uncomputed_tokens == 0:
                    self.service[request.client_id] += 2
            self.measure()
            on_tokens(counts, now)

        engine.policy.add, engine.policy.remove, engine.policy.on_tokens = watch_add, watch_remove, watch_tokens

    def measure(self) -> None:
        for i, f in enumerate(CLIENTS):
            for g in CLIENTS[i + 1 :]:
                if not (self.waiting[f] and self.waiting[g]):
                    self.bounds.pop((f, g), None)
                    continue
                gap = self.service[f] / self.weights[f] - self.service[g] / self.weights[g]
                low, high = self.bounds.get((f, g), (gap, gap))
                low, high = self.bounds[f, g] = min(low, gap), max(high, gap)
                self.widest = max(self.widest, high - low)


def run(engine: ModelFree, arrivals) -> None:
    for gap, client, prompt, output in arrivals:
        for _ in range(gap):
            engine.step()
        engine.add(prompt, output, client_id=client)
    engine.run()


@settings(max_examples=150, deadline=None)
@given(
    ARRIVALS,
    st.fixed_dictionaries({client: st.sampled_from([0.5, 1.0, 3.0]) for client in CLIENTS}),
    st.integers(8, 40),
)
def test_service_of_two_backlogged_clients_stays_within_the_bound(arrivals, weights, num_blocks):
    engine = ModelFree(Fair(weights), num_blocks=num_blocks, max_num_seqs=SEATS)
    ledger = Ledger(engine, weights)
    run(engine, arrivals)
    assert ledger.widest <= 2 * (LONGEST_PROMPT + 2 * SEATS * MOST_OUTPUT) / min(weights.values())
    assert len(engine.ended) == len(arrivals)
    engine.assert_sound()


@pytest.mark.parametrize(("policy", "within"), [(Fair(), True), (Fifo(), False)])
def test_a_flood_from_one_client_does_not_push_out_another(policy, within):
    engine = ModelFree(policy, num_blocks=64, max_num_seqs=SEATS)
    ledger = Ledger(engine, dict.fromkeys(CLIENTS, 1.0))
    run(engine, [(0, "a", 10, 8)] * 100 + [(0, "b", 10, 8)] * 20)
    assert (ledger.widest <= 2 * (LONGEST_PROMPT + 2 * SEATS * MOST_OUTPUT)) == within


@pytest.mark.parametrize(("policy", "within"), [(Fair(), True), (Fair(prompt_cost=0.0), False)])
def test_long_prompts_count_as_service(policy, within):
    engine = ModelFree(policy, num_blocks=64, max_num_seqs=SEATS)
    ledger = Ledger(engine, dict.fromkeys(CLIENTS, 1.0))
    run(engine, [(0, "a", LONGEST_PROMPT, 1)] * 60 + [(0, "b", 2, 1)] * 200)
    assert (ledger.widest <= 2 * (LONGEST_PROMPT + 2 * SEATS * MOST_OUTPUT)) == within


def test_a_client_with_twice_the_weight_gets_twice_the_service():
    engine = ModelFree(Fair({"a": 2.0}), num_blocks=64, max_num_seqs=2)
    ledger = Ledger(engine, dict.fromkeys(CLIENTS, 1.0))
    for _ in range(200):
        for client in "ab":
            engine.add(6, 4, client_id=client)
    while ledger.waiting["a"] > 20:
        engine.step()
    assert 1.8 < ledger.service["a"] / ledger.service["b"] < 2.2


def test_idleness_earns_no_credit():
    engine = ModelFree(Fair(), num_blocks=64, max_num_seqs=1)
    engine.add(4, 4, client_id="late")
    engine.run()
    for _ in range(50):
        engine.add(4, 4, client_id="busy")
    for _ in range(150):
        engine.step()
    engine.starts.clear()
    for _ in range(10):
        engine.add(4, 4, client_id="late")
    for _ in range(60):
        engine.step()
    started = [request.client_id for request, _ in engine.starts]
    assert 4 <= started.count("late") <= started.count("busy") + 2


def test_a_clients_own_requests_run_by_arrival_and_preempted_ones_come_back_first():
    engine = ModelFree(Fair(), num_blocks=12, block_size=2, max_num_seqs=3)
    for client in "aab":
        engine.add(4, 16, client_id=client)
    for client in "ab":
        engine.add(4, 2, client_id=client)
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    firsts = list(dict.fromkeys(engine.start_orders))
    assert [order for order in firsts if order in (0, 1, 3)] == [0, 1, 3]
    engine.assert_sound()


def test_clients_that_owe_nothing_are_forgotten():
    policy = Fair()
    engine = ModelFree(policy, max_num_seqs=8)
    for n in range(3 * MANY_CLIENTS):
        engine.add(1, 1, client_id=str(n))
        engine.run()
    assert len(policy._counters) <= MANY_CLIENTS + 2


@pytest.mark.parametrize("options", [{"weights": {"a": 0}}, {"prompt_cost": -1}, {"output_cost": -0.5}])
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(ConfigError):
        Fair(**options)

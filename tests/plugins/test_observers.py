"""Observers tell what the engine did."""

from __future__ import annotations

import gc
import io
import sys
import weakref

import pytest
from clock import Clock
from oracle import draw_prompts
from tiny_models import make_tiny

from paged_backend import Engine, SamplingParams
from paged_backend.errors import ConfigError
from paged_backend.plugins.observers import Prometheus, StepLog

prometheus_client = pytest.importorskip("prometheus_client", reason="needs the extra metrics")


@pytest.fixture(scope="module")
def model():
    return make_tiny("llama")


def test_prometheus_counts_what_the_engine_counts(model):
    registry = prometheus_client.CollectorRegistry()

    class Broken:
        from paged_backend import hookimpl

        @hookimpl
        def request_added(self, request) -> None:
            raise ValueError("broken")

    prompts = [*draw_prompts((30, 9, 17)), draw_prompts((30, 9, 17))[0]]
    engine = Engine(
        model,
        plugins=[Prometheus(registry), Broken()],
        block_size=4,
        max_num_seqs=3,
        kv_cache_memory=60_000,
        clock=Clock(tick=0.01),
    )
    engine.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True))
    stats = engine.stats()

    assert stats.num_preemptions > 0
    assert stats.num_prefix_hits > 0
    assert value(registry, "waiting_requests") == value(registry, "running_requests") == 0
    assert value(registry, "requests_total") == 4
    assert value(registry, "steps_total") == stats.num_steps
    assert value(registry, "tokens_total", kind="generated") == 48
    assert value(registry, "tokens_total", kind="cached") == stats.num_cached_tokens
    assert value(registry, "preemptions_total") == stats.num_preemptions
    assert value(registry, "prefix_hits_total") == stats.num_prefix_hits
    (where,) = stats.policy_errors
    assert value(registry, "policy_errors_total", where=where) == 4
    blocks = [value(registry, "kv_blocks", attention="full", use=use) for use in ("held", "cached", "free")]
    assert sum(blocks) == stats.groups[0].num_blocks
    for name in ("time_to_first_token", "inter_token", "request"):
        assert value(registry, f"{name}_seconds_count") == 4
        assert value(registry, f"{name}_seconds_sum") > 0


def test_a_scrape_between_steps_sees_running_requests(model):
    registry = prometheus_client.CollectorRegistry()
    engine = Engine(model, plugins=[Prometheus(registry, interval_s=0.0)])
    engine.add_request([5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True))
    engine.step()
    assert b"paged_backend_running_requests 1.0" in prometheus_client.generate_latest(registry)


def test_step_log_prints_a_line_per_step(model):
    from rich.console import Console

    text = io.StringIO()
    with Engine(model, plugins=[StepLog(every=2, console=Console(file=text, width=300))]) as engine:
        engine.generate([[5, 6, 7]], SamplingParams(max_tokens=6, ignore_eos=True))
    lines = text.getvalue().splitlines()
    assert len(lines) == 4
    assert "step      2" in lines[0]
    assert "running    1" in lines[0]
    assert lines[-1] == "stopped after 6 steps: 6 tokens for 1 requests"
    assert not engine._policy_errors.counts


def value(registry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"paged_backend_{name}", labels)


@pytest.mark.parametrize("shared", [True, False], ids=["one observer", "two observers"])
def test_prometheus_adds_up_engines_and_the_end_of_one_ends_nothing_of_the_others(model, shared):
    registry = prometheus_client.CollectorRegistry()
    first = Prometheus(registry, interval_s=0.0)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    staying = Engine(model, plugins=[first], kv_cache_memory=60_000)
    leaving = Engine(model, plugins=[first if shared else Prometheus(registry, interval_s=0.0)], kv_cache_memory=60_000)
    staying.generate([[5, 6, 7]], params)
    leaving.generate([[5, 6, 7], [8, 9]], params)
    blocks = value(registry, "kv_blocks", attention="full", use="free")
    leaving.add_request([5, 6], params)
    leaving.step()
    assert value(registry, "running_requests") == 1
    leaving.close()
    assert value(registry, "requests_total") == 3
    assert value(registry, "running_requests") == 0
    assert 0 < value(registry, "kv_blocks", attention="full", use="free") < blocks
    staying.generate([[9, 8, 7]], params)
    assert value(registry, "requests_total") == 4
    assert value(registry, "tokens_total", kind="generated") == 17
    assert staying.stats().policy_errors == {}


def test_an_engine_that_is_dropped_is_not_kept_by_its_observers(model):
    observers = [Prometheus(prometheus_client.CollectorRegistry()), StepLog()]
    engine = Engine(model, plugins=observers)
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=2))
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None


def test_prometheus_says_what_to_do_when_its_names_are_taken_by_others():
    registry = prometheus_client.CollectorRegistry()
    prometheus_client.Counter("paged_backend_request_seconds", "Mine.", registry=registry)
    with pytest.raises(ConfigError, match=r"not ours .*give Prometheus one of its own"):
        Prometheus(registry)


def test_step_log_tells_engines_apart_and_sums_up_each_by_itself(model):
    from rich.console import Console

    text = io.StringIO()
    log = StepLog(every=100, console=Console(file=text, width=300))
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    first, second = Engine(model, plugins=[log]), Engine(model, plugins=[log])
    first.generate([[5, 6, 7]], params)
    second.generate([[5, 6, 7], [8, 9]], params)
    second.close()
    first.generate([[5, 6]], params)
    first.close()
    assert text.getvalue().splitlines() == [
        "engine 2  stopped after 3 steps: 6 tokens for 2 requests",
        "engine 1  stopped after 6 steps: 6 tokens for 2 requests",
    ]
    assert first._policy_errors.counts == second._policy_errors.counts == {}


@pytest.mark.parametrize(("observer", "package"), [(StepLog, "rich"), (Prometheus, "prometheus_client")])
def test_missing_package_says_what_to_install(monkeypatch, observer, package):
    for name in [package, *(n for n in sys.modules if n.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match="pip install"):
        observer()

"""Observers tell what the engine did."""

from __future__ import annotations

import io
import sys

import pytest
from oracle import draw_prompts
from tiny_models import make_tiny

from paged_backend import Engine, SamplingParams
from paged_backend.errors import ConfigError
from paged_backend.plugins.observers import Prometheus, StepLog

prometheus_client = pytest.importorskip("prometheus_client", reason="needs the extra metrics")


@pytest.fixture(scope="module")
def model():
    return make_tiny("llama")


class Clock:
    """Every look at it takes 10 ms."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.01
        return self.now


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
        clock=Clock(),
    )
    engine.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True))
    stats = engine.stats()

    def value(name: str, **labels: str) -> float:
        return registry.get_sample_value(f"paged_backend_{name}", labels)

    assert stats.num_preemptions > 0
    assert stats.num_prefix_hits > 0
    assert value("waiting_requests") == value("running_requests") == 0
    assert value("requests_total") == 4
    assert value("steps_total") == stats.num_steps
    assert value("tokens_total", kind="generated") == 48
    assert value("tokens_total", kind="cached") == stats.num_cached_tokens
    assert value("preemptions_total") == stats.num_preemptions
    assert value("prefix_hits_total") == stats.num_prefix_hits
    (where,) = stats.policy_errors
    assert value("policy_errors_total", where=where) == 4
    blocks = [value("kv_blocks", attention="full", use=use) for use in ("held", "cached", "free")]
    assert sum(blocks) == stats.groups[0].num_blocks
    for name in ("time_to_first_token", "inter_token", "request"):
        assert value(f"{name}_seconds_count") == 4
        assert value(f"{name}_seconds_sum") > 0


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


@pytest.mark.parametrize(("observer", "package"), [(StepLog, "rich"), (Prometheus, "prometheus_client")])
def test_missing_package_says_what_to_install(monkeypatch, observer, package):
    for name in [package, *(n for n in sys.modules if n.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match="pip install"):
        observer()

"""Observers: a step log for people, and metrics for Prometheus; pass an object of either as a plugin of an engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paged_backend.checks import checked_amount, checked_int
from paged_backend.errors import ConfigError
from paged_backend.hookspecs import hookimpl
from paged_backend.outputs import RequestOutput
from paged_backend.policies import RequestView
from paged_backend.stats import EngineStats, StepStats

# Seconds. From a small model on a GPU to a long prompt on a laptop.
BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)


class StepLog:
    """Prints a line for every ``every``-th step, for each step that preempts, and a summary at the end.

    console: a ``rich.console.Console``; by default one that writes to stderr. Needs the extra ``cli``.
    """

    def __init__(self, every: int = 1, console: Any = None) -> None:
        self.every = checked_int("every", every, 1)
        try:
            from rich.console import Console
        except ImportError as error:
            raise ConfigError("StepLog needs rich: pip install 'paged-backend[cli]'") from error
        if console is not None and not callable(getattr(console, "print", None)):
            raise ConfigError(f"console must be a rich.console.Console or None, got {console!r:.200}")
        self.console = Console(stderr=True) if console is None else console
        self._num_steps = self._num_tokens = self._num_requests = 0

    @hookimpl
    def step_finished(self, stats: StepStats) -> None:
        """One line."""
        self._num_steps = stats.step
        self._num_tokens += stats.num_new_tokens
        self._num_requests += stats.num_finished
        if stats.step % self.every and not stats.num_preempted:
            return
        preempted = f"  [red]preempted {stats.num_preempted}[/]" if stats.num_preempted else ""
        self.console.print(
            f"[dim]{stats.time:10.3f}[/] step {stats.step:6d}"
            f"  waiting {stats.num_waiting:5d}  running {stats.num_running:4d}  finished {stats.num_finished:3d}"
            f"  decodes {stats.num_decodes:4d}  prompt tokens {stats.num_prefill_tokens:5d}"
            f"  forward {1000 * stats.forward_s:7.1f} ms  rest {1000 * stats.overhead_s:5.1f} ms{preempted}",
            highlight=False,
            soft_wrap=True,
        )

    @hookimpl
    def engine_stopped(self, engine: Any) -> None:
        """What it came to."""
        self.console.print(
            f"stopped after {self._num_steps} steps: {self._num_tokens} tokens for {self._num_requests} requests",
            highlight=False,
        )


class Prometheus:
    """Offers an engine's numbers to Prometheus, in ``prometheus_client``'s default registry or the one given.

    ``prometheus_client.start_http_server(8000)`` serves them. A scrape never touches the engine: it sees the numbers
    of the last step, or at most ``interval_s`` earlier. Needs the extra ``metrics``.
    """

    def __init__(self, registry: Any = None, interval_s: float = 1.0) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise ConfigError("Prometheus needs prometheus_client: pip install 'paged-backend[metrics]'") from error
        if registry is not None and not callable(getattr(registry, "register", None)):
            raise ConfigError(f"registry must be a prometheus_client registry or None, got {registry!r:.200}")
        registry = prometheus_client.REGISTRY if registry is None else registry
        self.interval_s = checked_amount("interval_s", interval_s)
        self._engine: Any | None = None
        self._stats: EngineStats | None = None
        self._seen_at = float("-inf")

        def histogram(name: str, text: str) -> Any:
            return prometheus_client.Histogram(
                f"paged_backend_{name}_seconds", text, buckets=BUCKETS, registry=registry
            )

        self._first_token = histogram("time_to_first_token", "From arrival to the first generated token.")
        self._inter_token = histogram("inter_token", "Between the generated tokens of a request, its mean.")
        self._latency = histogram("request", "From arrival to the end of a request.")
        registry.register(self)

    @hookimpl
    def engine_started(self, engine: Any) -> None:
        """Keep the engine to read its stats."""
        self._engine, self._stats = engine, engine.stats()

    @hookimpl
    def step_finished(self, stats: StepStats) -> None:
        """Take the numbers when they are due, and always before the engine falls idle."""
        if self._engine is not None and (not stats.num_running or stats.time - self._seen_at >= self.interval_s):
            self._seen_at, self._stats = stats.time, self._engine.stats()

    @hookimpl
    def request_finished(self, request: RequestView, output: RequestOutput) -> None:
        """Times of one request."""
        metrics = output.metrics
        if metrics.finished_time is None or metrics.first_token_time is None:
            return
        self._first_token.observe(metrics.first_token_time - metrics.arrival_time)
        self._latency.observe(metrics.finished_time - metrics.arrival_time)
        if len(output.token_ids) > 1:
            self._inter_token.observe((metrics.finished_time - metrics.first_token_time) / (len(output.token_ids) - 1))

    def collect(self) -> Iterator[Any]:
        """What ``prometheus_client`` asks for at each scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        stats = self._stats
        if stats is None:
            return
        yield GaugeMetricFamily("paged_backend_waiting_requests", "Requests that wait.", stats.num_waiting)
        yield GaugeMetricFamily("paged_backend_running_requests", "Requests that run.", stats.num_running)
        blocks = GaugeMetricFamily(
            "paged_backend_kv_blocks", "Blocks of keys and values by use.", labels=["attention", "use"]
        )
        for group in stats.groups:
            uses = {"held": group.num_owned_blocks, "cached": group.num_cached_blocks, "free": group.num_free_blocks}
            for use, count in uses.items():
                blocks.add_metric([group.rule, use], count)
        yield blocks
        tokens = CounterMetricFamily("paged_backend_tokens", "Tokens by kind.", labels=["kind"])
        tokens.add_metric(["prompt"], stats.num_prompt_tokens)
        tokens.add_metric(["generated"], stats.num_generated_tokens)
        tokens.add_metric(["cached"], stats.num_cached_tokens)
        tokens.add_metric(["recomputed"], stats.num_recomputed_tokens)
        yield tokens
        yield CounterMetricFamily("paged_backend_requests", "Requests that ended.", stats.num_finished)
        yield CounterMetricFamily("paged_backend_steps", "Steps.", stats.num_steps)
        yield CounterMetricFamily("paged_backend_preemptions", "Requests set aside.", stats.num_preemptions)
        yield CounterMetricFamily("paged_backend_prefix_hits", "Requests begun from the cache.", stats.num_prefix_hits)
        errors = CounterMetricFamily("paged_backend_policy_errors", "Broken contracts of plugins.", labels=["where"])
        for where, count in stats.policy_errors.items():
            errors.add_metric([where], count)
        yield errors

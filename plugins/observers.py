"""Observers: a step log for people, and metrics for Prometheus; pass an object of either as a plugin of an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from paged_backend.checks import checked_amount, checked_int
from paged_backend.errors import ConfigError
from paged_backend.hookspecs import ObservedEngine, hookimpl
from paged_backend.outputs import RequestOutput
from paged_backend.policies import RequestView
from paged_backend.stats import EngineStats, StepStats

# Seconds. From a small model on a GPU to a long prompt on a laptop.
BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)


class StepLog:
    """Prints a line for every ``every``-th step, for each step that preempts, and a summary at the end.

    console: a ``rich.console.Console``; by default one that writes to stderr. One object may watch several engines,
    which it numbers in the order in which they started. Needs the extra ``cli``.
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
        self._num_engines = 0
        self._totals: WeakKeyDictionary[ObservedEngine, Counter[str]] = WeakKeyDictionary()

    @hookimpl
    def engine_started(self, engine: ObservedEngine) -> None:
        """One more to watch."""
        self._num_engines += 1
        self._totals[engine] = Counter(engine=self._num_engines)

    @hookimpl
    def step_finished(self, engine: ObservedEngine, stats: StepStats) -> None:
        """One line."""
        totals = self._totals[engine]
        totals.update(steps=1, tokens=stats.num_new_tokens, requests=stats.num_finished)
        if stats.step % self.every and not stats.num_preempted:
            return
        preempted = f"  [red]preempted {stats.num_preempted}[/]" if stats.num_preempted else ""
        self.console.print(
            f"{self._name(totals)}[dim]{stats.time:10.3f}[/] step {stats.step:6d}"
            f"  waiting {stats.num_waiting:5d}  running {stats.num_running:4d}  finished {stats.num_finished:3d}"
            f"  decodes {stats.num_decodes:4d}  prompt tokens {stats.num_prefill_tokens:5d}"
            f"  forward {1000 * stats.forward_s:7.1f} ms  rest {1000 * stats.overhead_s:5.1f} ms{preempted}",
            highlight=False,
            soft_wrap=True,
        )

    @hookimpl
    def engine_stopped(self, engine: ObservedEngine) -> None:
        """What it came to."""
        totals = self._totals.pop(engine)
        self.console.print(
            f"{self._name(totals)}stopped after {totals['steps']} steps: {totals['tokens']} tokens for "
            f"{totals['requests']} requests",
            highlight=False,
        )

    def _name(self, totals: Mapping[str, int]) -> str:
        """Which engine a line is about, where there was more than one."""
        return f"engine {totals['engine']}  " if self._num_engines > 1 else ""


class Prometheus:
    """Offers the numbers of engines to Prometheus, in ``prometheus_client``'s default registry or the one given.

    ``prometheus_client.start_http_server(8000)`` serves them. A scrape never touches an engine: it sees the numbers
    of the last step, or at most ``interval_s`` earlier. Of several engines, watched by one object or by several with
    one registry, it sees the sums; those that were closed still count in what only grows. Needs the extra ``metrics``.
    """

    def __init__(self, registry: Any = None, interval_s: float = 1.0) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise ConfigError("Prometheus needs prometheus_client: pip install 'paged-backend[metrics]'") from error
        if registry is not None and not callable(getattr(registry, "register", None)):
            raise ConfigError(f"registry must be a prometheus_client registry or None, got {registry!r:.200}")
        self.interval_s = checked_amount("interval_s", interval_s)
        self._metrics = _metrics_of(prometheus_client.REGISTRY if registry is None else registry)
        self._seen_at: WeakKeyDictionary[ObservedEngine, float] = WeakKeyDictionary()

    @hookimpl
    def engine_started(self, engine: ObservedEngine) -> None:
        """One more to watch."""
        self._metrics.see(engine)

    @hookimpl
    def step_finished(self, engine: ObservedEngine, stats: StepStats) -> None:
        """Take the numbers when they are due, and always before the engine falls idle."""
        if not stats.num_running or stats.time - self._seen_at.get(engine, float("-inf")) >= self.interval_s:
            self._seen_at[engine] = stats.time
            self._metrics.see(engine)

    @hookimpl
    def request_finished(self, request: RequestView, output: RequestOutput) -> None:
        """Times of one request."""
        metrics = output.metrics
        if metrics.finished_time is None or metrics.first_token_time is None:
            return
        self._metrics.first_token.observe(metrics.first_token_time - metrics.arrival_time)
        self._metrics.latency.observe(metrics.finished_time - metrics.arrival_time)
        if (num_more := len(output.token_ids) - 1) > 0:
            self._metrics.inter_token.observe((metrics.finished_time - metrics.first_token_time) / num_more)

    @hookimpl
    def engine_stopped(self, engine: ObservedEngine) -> None:
        """Its requests and blocks are no more."""
        self._metrics.forget(engine)


class _Metrics:
    """What one registry serves: times of requests, and the sums over engines as they were last seen."""

    def __init__(self, registry: Any) -> None:
        import prometheus_client

        def histogram(name: str, text: str) -> Any:
            return prometheus_client.Histogram(
                f"paged_backend_{name}_seconds", text, buckets=BUCKETS, registry=registry
            )

        # Steps are in the engines' threads, scrapes in one of their own.
        self._lock = Lock()
        self._stats: WeakKeyDictionary[ObservedEngine, EngineStats] = WeakKeyDictionary()
        # What engines that were closed had counted.
        self._past: Counter[tuple[str, str]] = Counter()
        self.first_token = histogram("time_to_first_token", "From arrival to the first generated token.")
        self.inter_token = histogram("inter_token", "Between the generated tokens of a request, its mean.")
        self.latency = histogram("request", "From arrival to the end of a request.")
        registry.register(self)

    def see(self, engine: ObservedEngine) -> None:
        """Take an engine's numbers."""
        stats = engine.stats()
        with self._lock:
            self._stats[engine] = stats

    def forget(self, engine: ObservedEngine) -> None:
        """An engine was closed."""
        with self._lock:
            if (stats := self._stats.pop(engine, None)) is not None:
                self._past.update(_counts(stats))

    def collect(self) -> Iterator[Any]:
        """What ``prometheus_client`` asks for at each scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            engines, counts = list(self._stats.values()), self._past.copy()
        waiting, running = (sum(getattr(stats, f"num_{what}") for stats in engines) for what in ("waiting", "running"))
        yield GaugeMetricFamily("paged_backend_waiting_requests", "Requests that wait.", waiting)
        yield GaugeMetricFamily("paged_backend_running_requests", "Requests that run.", running)
        uses: Counter[tuple[str, str]] = Counter()
        for stats in engines:
            counts.update(_counts(stats))
            for group in stats.groups:
                uses[group.rule, "held"] += group.num_owned_blocks
                uses[group.rule, "cached"] += group.num_cached_blocks
                uses[group.rule, "free"] += group.num_free_blocks
        blocks = GaugeMetricFamily(
            "paged_backend_kv_blocks", "Blocks of keys and values by use.", labels=["attention", "use"]
        )
        for labels, count in uses.items():
            blocks.add_metric(labels, count)
        yield blocks
        for name, (text, label) in COUNTERS.items():
            family = CounterMetricFamily(f"paged_backend_{name}", text, labels=[label] if label else [])
            for (counter, value), count in counts.items():
                if counter == name:
                    family.add_metric([value] if label else [], count)
            yield family


# Each with what it tells, and by what it is told apart, if it is.
COUNTERS = {
    "tokens": ("Tokens by kind.", "kind"),
    "requests": ("Requests that ended.", None),
    "steps": ("Steps.", None),
    "preemptions": ("Requests set aside.", None),
    "prefix_hits": ("Requests begun from the cache.", None),
    "policy_errors": ("Broken contracts of plugins.", "where"),
}


def _counts(stats: EngineStats) -> dict[tuple[str, str], int]:
    """An engine's counters by name and label."""
    return {
        ("tokens", "prompt"): stats.num_prompt_tokens,
        ("tokens", "generated"): stats.num_generated_tokens,
        ("tokens", "cached"): stats.num_cached_tokens,
        ("tokens", "recomputed"): stats.num_recomputed_tokens,
        ("requests", ""): stats.num_finished,
        ("steps", ""): stats.num_steps,
        ("preemptions", ""): stats.num_preemptions,
        ("prefix_hits", ""): stats.num_prefix_hits,
        **{("policy_errors", where): count for where, count in stats.policy_errors.items()},
    }


# A registry takes each name once, so all who watch for it share what it serves.
_of_registry: WeakKeyDictionary[Any, _Metrics] = WeakKeyDictionary()


def _metrics_of(registry: Any) -> _Metrics:
    if registry not in _of_registry:
        try:
            _of_registry[registry] = _Metrics(registry)
        except ValueError as error:
            raise ConfigError(
                f"the registry has metrics of these names that are not ours ({error}); give Prometheus one of its own: "
                "Prometheus(prometheus_client.CollectorRegistry())"
            ) from error
    return _of_registry[registry]

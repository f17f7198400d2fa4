"""Bench: the same requests under static, dynamic-window and continuous batching, with the same weights and arrivals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from paged_backend.checks import checked_amount, checked_int, describe
from paged_backend.errors import ConfigError
from paged_backend.lab.compute import TokenCost, flops_ceiling
from paged_backend.lab.live import run_on_engine, run_on_stock
from paged_backend.lab.run import Run
from paged_backend.lab.trace import TraceRequest
from paged_backend.lab.traffic import ARRIVALS, Traffic, arriving

# What keys and values may take, of what the longest requests that run at once would need.
POOL_SHARE = 0.75
# Without a scale, lengths are halved until the slowest mode is expected to take fewer seconds than this.
PATIENCE_S = 45.0
_PROBE_TOKENS = 16
# Lengths are not halved any more when the longest would be shorter than this.
_SHORTEST = 32
# Tokens of a block for lengths as they are, and for any; between them it shrinks with the lengths, of which it would
# waste a larger share otherwise.
_BLOCK_SIZE, _SMALLEST_BLOCK = 16, 4


@dataclass(frozen=True)
class Mode:
    """A way of batching.

    name: as it is called on. scheduler: the admission policy of our engine, None for stock ``generate``. window:
    whether a batch waits for company. together: whether a batch is answered as a whole.
    """

    name: str
    text: str
    scheduler: str | None
    window: bool = False
    together: bool = True


MODES = (
    Mode("stock-static", "static, stock", None),
    Mode("stock-window", "window, stock", None, window=True),
    Mode("static", "static, our kernels", "static"),
    Mode("window", "window, our kernels", "window", window=True),
    Mode("continuous", "continuous", "fifo", together=False),
)


@dataclass(frozen=True)
class Setting:
    """How a bench is run.

    batch: requests of a batch, and seats of the continuous one. window_ms: how long a window waits for a full batch.
    load: how much arrives of what the first mode can do, 1 being all. scheduler: of the continuous mode. engine: more
    options of engines. Raises ConfigError for what cannot be used.
    """

    modes: Sequence[str] = tuple(mode.name for mode in MODES)
    arrivals: str = "poisson"
    batch: int = 8
    window_ms: float = 200.0
    load: float = 1.0
    scheduler: str = "fifo"
    engine: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = [mode.name for mode in MODES]
        for name in self.modes:
            if name not in known:
                raise ConfigError(f"mode {describe(name)} is unknown; choose from {', '.join(known)}")
        if not self.modes or len(set(self.modes)) < len(self.modes):
            raise ConfigError(f"modes={describe(self.modes)} must be different modes of {', '.join(known)}")
        if self.arrivals not in ARRIVALS:
            raise ConfigError(f"arrivals={describe(self.arrivals)} is unknown; choose from {', '.join(ARRIVALS)}")
        checked_int("batch", self.batch, 1)
        checked_amount("window_ms", self.window_ms)
        checked_amount("load", self.load, positive=True)

    def scheduling(self, mode: Mode) -> dict[str, Any]:
        """The options of an engine that say how a mode schedules."""
        if not mode.together:
            return {"scheduler": self.scheduler, "scheduler_options": {}}
        options = {"batch": self.batch, **({"window_ms": self.window_ms} if mode.window else {})}
        return {"scheduler": mode.scheduler, "scheduler_options": options}

    def window_s(self, mode: Mode) -> float | None:
        """How long a mode waits for company, in seconds, if it does."""
        return self.window_ms / 1000 if mode.window else None


@dataclass(frozen=True)
class Measured:
    """One mode. saturated: all requests there at once; arriving: at their times."""

    mode: Mode
    saturated: Run
    arriving: Run


@dataclass(frozen=True)
class Bench:
    """All modes.

    traffic: as it was drawn, scaled. rate: requests a second that arrived. ceiling: floating-point operations a second
    of the machine's fastest matrix product. cost: of a token. assumptions: of a simulation, else nothing.
    """

    setting: Setting
    traffic: Traffic
    rate: float
    ceiling: float
    cost: TokenCost
    measured: Sequence[Measured]
    assumptions: str = ""

    def compute_utilisation(self, run: Run) -> float:
        """The operations that the requests needed, over those that the machine could have done meanwhile."""
        needed = sum(self.cost.of(o.num_prompt_tokens, o.num_output_tokens) for o in run.outcomes)
        return needed / (self.ceiling * run.seconds)


class Progress:
    """Hears how a bench goes on; this one keeps it to itself."""

    def begins(self, text: str, num_requests: int) -> None:
        """A run of so many requests begins."""

    def answered(self, count: int) -> None:
        """So many of them were answered."""


def bench(
    model: Any,
    traffic: Traffic,
    setting: Setting,
    *,
    scale: float | None = None,
    progress: Progress | None = None,
    arrival_trace: Sequence[TraceRequest] = (),
) -> Bench:
    """Run ``traffic`` under every mode of ``setting`` on ``model``: all at once, then arriving at a rate.

    The rate is what the first mode could do, times ``load``. scale: of the traffic's lengths, and of blocks where
    lengths shrink; None shortens them until the first mode is expected to take less than a minute. arrival_trace: whose
    pace requests arrive at, if they do.

    Raises UnsupportedModel and ConfigError as an Engine does.
    """
    import torch

    progress = progress or Progress()
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if scale is None:
        scale = _scale_for(model, traffic, setting.batch, progress)
    traffic = traffic.scaled(scale)
    setting = replace(setting, engine={"block_size": _block_size(scale), **setting.engine})
    if limit is not None and traffic.longest > limit:
        raise ConfigError(f"requests of {traffic.longest} tokens are longer than the model's {limit}; give a scale")
    requests = traffic.draw(model.config.get_text_config().vocab_size)
    ceiling, cost = flops_ceiling({torch.float32, model.dtype}, model.device), TokenCost.of_model(model)
    uses_engines = any(mode.scheduler for mode in MODES if mode.name in setting.modes)
    memory = _memory_for(model, requests, setting) if uses_engines else {}

    def open_server(mode: Mode) -> AbstractContextManager[Serve]:
        return _server(model, mode, requests, memory, setting)

    rate, measured = compare(requests, traffic.seed, setting, open_server, progress, arrival_trace)
    return Bench(setting, traffic, rate, ceiling, cost, measured)


Serve = Callable[[Sequence[TraceRequest], Callable[[int], None]], Run]


def compare(
    requests: Sequence[TraceRequest],
    seed: int,
    setting: Setting,
    open_server: Callable[[Mode], AbstractContextManager[Serve]],
    progress: Progress,
    arrival_trace: Sequence[TraceRequest],
) -> tuple[float, list[Measured]]:
    """The rate at which requests arrived, and what each mode of ``setting`` came to: all at once, then arriving.

    open_server: what serves requests in one mode. seed: where random arrivals start.
    """
    at_once = arriving(requests, "at-once", 0.0)
    rate, due = 0.0, at_once
    measured = []
    for mode in (mode for mode in MODES if mode.name in setting.modes):
        with open_server(mode) as serve:
            progress.begins(f"{mode.text}, all at once", len(requests))
            saturated = serve(at_once, progress.answered)
            if not rate:
                rate = setting.load * len(requests) / saturated.seconds
                due = arriving(requests, setting.arrivals, rate, seed, arrival_trace)
            if setting.arrivals == "at-once":
                measured.append(Measured(mode, saturated, saturated))
                continue
            progress.begins(f"{mode.text}, arriving", len(requests))
            measured.append(Measured(mode, saturated, serve(due, progress.answered)))
    return rate, measured


def _server(
    model: Any, mode: Mode, requests: Sequence[TraceRequest], memory: Mapping[str, int], setting: Setting
) -> AbstractContextManager[Serve]:
    """What serves requests in one mode, warmed up."""
    if mode.scheduler is None:

        def serve(trace: Sequence[TraceRequest], answered: Callable[[int], None]) -> Run:
            window_s = setting.window_s(mode)
            return run_on_stock(model, trace, batch=setting.batch, window_s=window_s, on_finished=answered)

        _warm_up(serve, requests)
        return nullcontext(serve)
    return _EngineServer(model, mode, requests, memory, setting)


class _EngineServer(AbstractContextManager[Serve]):
    """An engine for one mode, open as long as it is served by."""

    def __init__(
        self, model: Any, mode: Mode, requests: Sequence[TraceRequest], memory: Mapping[str, int], setting: Setting
    ) -> None:
        self._model, self._mode, self._requests = model, mode, requests
        self._memory, self._setting = memory, setting

    def __enter__(self) -> Serve:
        from paged_backend.engine.engine import Engine

        setting = self._setting
        chosen = {"max_num_seqs": setting.batch, "enable_prefix_caching": False, **self._memory}
        self._engine = Engine(self._model, **{**setting.scheduling(self._mode), **chosen, **setting.engine})
        _warm_up(self._serve, self._requests)
        return self._serve

    def _serve(self, trace: Sequence[TraceRequest], answered: Callable[[int], None]) -> Run:
        return run_on_engine(self._engine, trace, together=self._mode.together, on_finished=answered)

    def __exit__(self, *error: object) -> None:
        self._engine.close()


def _block_size(scale: float) -> int:
    """The power of two that has the same share of requests of ``scale`` times the lengths as 16 has of those."""
    size = _BLOCK_SIZE
    while size > _SMALLEST_BLOCK and size > _BLOCK_SIZE * scale:
        size //= 2
    return size


def _memory_for(model: Any, requests: Sequence[TraceRequest], setting: Setting) -> dict[str, int]:
    """The option of engines for POOL_SHARE of what the longest requests take that could run at once, at least for the
    longest. Models with recurrent state, which lies in the same memory, have the engine's own default."""
    from paged_backend.engine.engine import Engine

    with Engine(model, **{"max_num_seqs": setting.batch, "kv_cache_memory": "64MiB", **setting.engine}) as engine:
        stats = engine.stats()
    if stats.states is not None or not stats.groups:
        return {}
    size = stats.groups[0].block_size
    lengths = sorted((len(request.prompt) + request.output_length for request in requests), reverse=True)
    slots = [-(-length // size) * size for length in lengths]
    most = max(POOL_SHARE * sum(slots[: setting.batch]), slots[0] + 2 * size)
    return {"kv_cache_memory": int(most * sum(group.bytes_per_token for group in stats.groups))}


def _warm_up(serve: Serve, requests: Sequence[TraceRequest]) -> None:
    """What is compiled and allocated on first use is not timed."""
    serve([replace(request, arrival=0.0, output_length=2) for request in requests[:2]], lambda count: None)


def _scale_for(model: Any, traffic: Traffic, batch: int, progress: Progress) -> float:
    """The share of the traffic's lengths at which stock static batches should take at most ``PATIENCE_S``.

    Judged by short rows, as if a token took the same time however long its request is.
    """
    progress.begins("finding out how fast the machine is", 1)
    rows = [TraceRequest(0.0, [1] * _PROBE_TOKENS, 1)] * min(batch, traffic.num_requests)
    run_on_stock(model, rows, batch=batch)
    prefill_s = run_on_stock(model, rows, batch=batch).seconds / _PROBE_TOKENS
    longer = [replace(request, output_length=_PROBE_TOKENS) for request in rows]
    decode_s = (run_on_stock(model, longer, batch=batch).seconds - prefill_s * _PROBE_TOKENS) / (_PROBE_TOKENS - 1)
    scale = 1.0
    while _expected_s(traffic.scaled(scale), batch, prefill_s, decode_s) > PATIENCE_S:
        if traffic.scaled(scale / 2).longest < _SHORTEST:
            break
        scale /= 2
    progress.answered(1)
    return scale


def _expected_s(traffic: Traffic, batch: int, prefill_s: float, decode_s: float) -> float:
    """Seconds of all padded batches, by what a prompt token and a generated one of a whole batch take."""
    requests = traffic.draw()
    batches = [requests[first : first + batch] for first in range(0, len(requests), batch)]
    return sum(
        prefill_s * max(len(request.prompt) for request in rows)
        + decode_s * max(request.output_length for request in rows)
        for rows in batches
    )

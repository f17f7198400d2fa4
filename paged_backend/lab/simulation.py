"""Simulation: a bench in virtual time, on a device that is not there."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from paged_backend.lab.bench import Bench, Mode, Progress, Serve, Setting, compare
from paged_backend.lab.open_loop import serve
from paged_backend.lab.padded import PaddedServer, VirtualClock
from paged_backend.lab.roofline import Roofline
from paged_backend.lab.run import Run
from paged_backend.lab.trace import TraceRequest
from paged_backend.lab.traffic import Traffic
from paged_backend.lab.virtual_engine import VirtualEngine
from paged_backend.outputs import RequestOutput
from paged_backend.policy.plugin_manager import PluginManager
from paged_backend.request.request import Request
from paged_backend.sampling_params import SamplingParams
from paged_backend.stats import EngineStats

BLOCK_SIZE = 16
MAX_NUM_BATCHED_TOKENS = 2048


def simulate(
    roofline: Roofline, traffic: Traffic, setting: Setting, arrival_trace: Sequence[TraceRequest] = ()
) -> Bench:
    """What ``bench`` would measure if steps took what ``roofline`` says.

    The padded modes stand for stock ``generate``; the others run the scheduler, the policies and the books of engines.
    """
    requests = traffic.draw()

    def open_server(mode: Mode) -> AbstractContextManager[Serve]:
        return nullcontext(lambda trace, answered: _run(roofline, mode, trace, setting))

    rate, measured = compare(requests, traffic.seed, setting, open_server, Progress(), arrival_trace)
    peak, cost = roofline.device.flops, roofline.model.cost
    mean_length = sum(request.output_length for request in requests) / len(requests)
    assumptions = (
        f"{roofline.assumptions()}\nSo no answer of {mean_length:.0f} tokens, the mean, can take less than "
        f"{roofline.least_seconds(mean_length):.2f} s, however it is batched."
    )
    return Bench(setting, traffic, rate, peak, cost, measured, assumptions)


def _run(roofline: Roofline, mode: Mode, trace: Sequence[TraceRequest], setting: Setting) -> Run:
    if mode.scheduler is None:
        clock, window_s = VirtualClock(roofline.of_batch), setting.window_s(mode)
        server = PaddedServer(clock.execute, clock.read, clock.set_forward, batch=setting.batch, window_s=window_s)
        return server.run(trace)
    plugins, scheduling = PluginManager(), setting.scheduling(mode)
    engine = VirtualEngine(
        plugins.scheduler(scheduling["scheduler"], scheduling["scheduler_options"]),
        plugins.eviction_factory("lru", {}),
        roofline.of,
        num_blocks=roofline.num_blocks(BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        max_num_seqs=setting.batch,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        enable_prefix_caching=False,
    )
    return serve(VirtualServer(engine), trace, together=mode.together)


class VirtualServer:
    """A VirtualEngine as an open loop drives it."""

    def __init__(self, engine: VirtualEngine) -> None:
        self._engine = engine
        self._orders = itertools.count()
        self.blocks = engine.blocks
        self.scheduler = engine.scheduler

    def clock(self) -> float:
        return self._engine.now

    def wait_until(self, moment: float) -> None:
        self._engine.now = max(self._engine.now, moment)

    def add(self, request: TraceRequest) -> str:
        order = next(self._orders)
        params = SamplingParams(max_tokens=request.output_length)
        self._engine.enqueue(Request(str(order), request.prompt, params, request.arrival, order), request.output_length)
        return str(order)

    def step(self, drain: bool) -> Sequence[RequestOutput]:
        return self._engine.step(drain=drain).outputs

    def held_until(self) -> float | None:
        return self._engine.scheduler.held_until

    def first_token_time(self, output: RequestOutput) -> float:
        first = output.metrics.first_token_time
        assert first is not None
        return first

    def stats(self) -> EngineStats:
        return self._engine.stats()

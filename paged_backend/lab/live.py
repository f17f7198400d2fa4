"""Live runs: requests in real time, through an engine or through stock ``generate``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from paged_backend.lab.open_loop import OnFinished, serve
from paged_backend.lab.padded import PaddedServer
from paged_backend.lab.run import Run
from paged_backend.lab.trace import TraceRequest
from paged_backend.outputs import RequestOutput
from paged_backend.sampling_params import SamplingParams
from paged_backend.stats import EngineStats

if TYPE_CHECKING:
    from paged_backend.engine.engine import Engine
    from paged_backend.engine.scheduler import Scheduler
    from paged_backend.memory.block_manager import BlockManager


def run_on_engine(
    engine: Engine,
    trace: Sequence[TraceRequest],
    *,
    together: bool = False,
    on_finished: OnFinished = lambda count: None,
) -> Run:
    """``trace`` through an idle engine; see ``open_loop.serve``."""
    return serve(LiveServer(engine), trace, together=together, on_finished=on_finished)


class LiveServer:
    """An engine in real time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._began = engine.clock()

    @property
    def blocks(self) -> BlockManager:
        return self._engine.blocks

    @property
    def scheduler(self) -> Scheduler:
        return self._engine.scheduler

    def clock(self) -> float:
        return self._engine.clock() - self._began

    def wait_until(self, moment: float) -> None:
        _sleep(moment - self.clock())

    def add(self, request: TraceRequest) -> str:
        params = SamplingParams(max_tokens=request.output_length, ignore_eos=True, temperature=0.0)
        return self._engine.add_request(request.prompt, params)

    def step(self, drain: bool) -> Sequence[RequestOutput]:
        return self._engine.step(drain=drain)

    def held_until(self) -> float | None:
        until = self._engine.held_until
        return None if until is None else until - self._began

    def first_token_time(self, output: RequestOutput) -> float:
        first = output.metrics.first_token_time
        assert first is not None
        return first - self._began

    def stats(self) -> EngineStats:
        return self._engine.stats()


def run_on_stock(
    model: Any,
    trace: Sequence[TraceRequest],
    *,
    batch: int,
    window_s: float | None = None,
    on_finished: OnFinished = lambda count: None,
) -> Run:
    """``trace`` through stock ``generate``, in batches that are padded on the left to their longest."""
    began = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - began

    def wait_until(moment: float) -> None:
        _sleep(moment - clock())

    def execute(requests: Sequence[TraceRequest]) -> list[float]:
        return _generate(model, requests, clock)

    server = PaddedServer(execute, clock, wait_until, batch=batch, window_s=window_s, on_finished=on_finished)
    return server.run(trace)


def _generate(model: Any, requests: Sequence[TraceRequest], clock: Callable[[], float]) -> list[float]:
    """When a padded batch began, and when each further token of its rows was there."""
    import torch

    width = max(len(request.prompt) for request in requests)
    longest = max(request.output_length for request in requests)
    input_ids = torch.zeros(len(requests), width, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for row, request in enumerate(requests):
        input_ids[row, width - len(request.prompt) :] = torch.as_tensor(list(request.prompt))
        attention_mask[row, width - len(request.prompt) :] = 1
    times = [clock()]

    def note(input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        times.append(clock())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    model.generate(
        input_ids=input_ids.to(model.device),
        attention_mask=attention_mask.to(model.device),
        do_sample=False,
        min_new_tokens=longest,
        max_new_tokens=longest,
        pad_token_id=0,
        stopping_criteria=[note],
    )
    return times


def _sleep(seconds: float) -> None:
    if seconds > 0:
        time.sleep(seconds)

"""Memory study: what keys and values take when memory is reserved for each request, padded, or paged."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paged_backend.lab.figure import new_figure, save
from paged_backend.lab.open_loop import serve
from paged_backend.lab.padded import PaddedServer, VirtualClock
from paged_backend.lab.run import KVMoment, Run
from paged_backend.lab.simulation import VirtualServer
from paged_backend.lab.step_cost import PRESETS
from paged_backend.lab.trace import TraceRequest
from paged_backend.lab.virtual_engine import VirtualEngine
from paged_backend.policy.plugin_manager import PluginManager

if TYPE_CHECKING:
    from rich.table import Table

BLOCK_SIZES = (1, 8, 16, 32, 64, 128, 256)
# More requests than this at once no batch is tried with.
_MANY = 4096
_BUDGET = 512
# The cost that sets the pace of what comes and goes; memory depends on it hardly at all.
_COST = PRESETS["gpu-7b"]


@dataclass(frozen=True)
class Layout:
    """One way of laying out keys and values for the same requests.

    peak_reserved, mean_used: tokens. utilisation: used over reserved, weighted by time. largest_batch: the most of the
    requests that ran at once in as much memory as the preallocated layout takes. at_exhaustion: what happens when more
    is wanted than there is, in words; of the paged ones, in three quarters of what they reserved at the peak. memory:
    over time.
    """

    name: str
    peak_reserved: int
    mean_used: float
    utilisation: float
    largest_batch: int
    at_exhaustion: str
    memory: Sequence[KVMoment] = field(repr=False)


@dataclass(frozen=True)
class MemoryStudy:
    """All layouts. batch: requests that run at once. longest: tokens of the longest request. budget: tokens of memory
    in which ``largest_batch`` was found: as many as the preallocated layout takes. bytes_per_token: of the model."""

    batch: int
    longest: int
    budget: int
    bytes_per_token: int
    layouts: Sequence[Layout]


def study(requests: Sequence[TraceRequest], batch: int, bytes_per_token: int) -> MemoryStudy:
    """Let ``requests``, all there at once, run ``batch`` at a time under every layout, in virtual time."""
    longest = max(len(request.prompt) + request.output_length for request in requests)
    budget = batch * longest
    paged = {size: _paged(requests, batch, batch * (-(-longest // size) + 1), size) for size in BLOCK_SIZES}
    layouts = [_preallocated(requests, paged[1][0], batch, longest), _padded(requests, batch, budget)]
    for size, (run, _) in paged.items():
        num_blocks = max(1, budget // size)
        _, most = _paged(requests, min(_MANY, len(requests)), num_blocks, size)
        layouts.append(_layout(f"paged, blocks of {size}", run.memory, most, _exhausted(requests, batch, run, size)))
    return MemoryStudy(batch, longest, budget, bytes_per_token, layouts)


def _paged(requests: Sequence[TraceRequest], seats: int, num_blocks: int, block_size: int) -> tuple[Run, int]:
    """The run, and how many ran at once at most."""
    plugins = PluginManager()
    engine = VirtualEngine(
        plugins.scheduler("fifo", {}),
        plugins.eviction_factory("lru", {}),
        _COST.of,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=seats,
        max_num_batched_tokens=_BUDGET,
        enable_prefix_caching=False,
    )
    run = serve(VirtualServer(engine), requests, together=False)
    return run, engine.stats().peak_running


def _exhausted(requests: Sequence[TraceRequest], batch: int, run: Run, block_size: int) -> str:
    """What happens in three quarters of the memory that was reserved at the most."""
    peak = max(moment.allocated for moment in run.memory)
    longest = max(len(request.prompt) + request.output_length for request in requests)
    short = max(peak * 3 // 4, longest + block_size) // block_size + 1
    tight, _ = _paged(requests, batch, short, block_size)
    again = tight.computed_tokens - tight.useful_tokens
    return f"waits; {tight.num_preemptions} set aside, {again / tight.useful_tokens:.1%} computed again"


def _preallocated(requests: Sequence[TraceRequest], run: Run, batch: int, longest: int) -> Layout:
    """A seat's memory is for the longest request, whoever sits there."""
    running = [sum(o.arrival <= m.time < o.finished for o in run.outcomes if o.finished) for m in run.memory]
    seats = [min(batch, count) for count in running]
    memory = [m._replace(allocated=count * longest) for m, count in zip(run.memory, seats, strict=True)]
    return _layout("preallocated", memory, batch, "waits for a seat, however short it is")


def _padded(requests: Sequence[TraceRequest], batch: int, budget: int) -> Layout:
    """A batch's rows are as wide as its longest."""
    clock = VirtualClock(_steps_of)
    run = PaddedServer(clock.execute, clock.read, clock.set_forward, batch=batch).run(requests)
    largest = _largest_padded(requests, budget)
    return _layout("padded", run.memory, largest, "runs out of memory, and the batch is lost")


def _largest_padded(requests: Sequence[TraceRequest], budget: int) -> int:
    """How many of the first requests fit as one batch, whose cache has the longest prompt and the longest answer."""
    count = prompt = output = 0
    for request in requests:
        prompt, output = max(prompt, len(request.prompt)), max(output, request.output_length)
        if (count + 1) * (prompt + output) > budget:
            break
        count += 1
    return count


def _layout(name: str, memory: Sequence[KVMoment], largest_batch: int, at_exhaustion: str) -> Layout:
    seconds = memory[-1].time - memory[0].time
    used = sum(m.filled * (later.time - m.time) for m, later in itertools.pairwise(memory))
    utilisation = Run([], 0.0, memory, 0, 0).kv_utilisation
    return Layout(
        name,
        max(moment.allocated for moment in memory),
        used / seconds if seconds else 0.0,
        utilisation,
        largest_batch,
        at_exhaustion,
        memory,
    )


def _steps_of(batch: Sequence[TraceRequest]) -> list[float]:
    """Seconds of each step of a padded batch, each of which takes what its rows take."""
    width = max(len(request.prompt) for request in batch)
    num_decodes = max(request.output_length for request in batch) - 1
    return [_COST.seconds(0, len(batch) * width)] + [_COST.seconds(len(batch), 0)] * num_decodes


def to_json(result: MemoryStudy, about: dict[str, Any]) -> str:
    """One JSON object: about, and the study."""
    told = asdict(result)
    for layout in told["layouts"]:
        del layout["memory"]
    return json.dumps({**about, **told}, indent=1) + "\n"


def table(result: MemoryStudy, title: str) -> Table:
    """A row for each layout."""
    from rich.table import Column, Table

    headings = ("reserved, peak MB", "of it used, mean", f"largest batch in {_mb(result, result.budget)} MB")
    shown = Table("", *(Column(heading, justify="right") for heading in headings), "when memory runs out", title=title)
    for layout in result.layouts:
        shown.add_row(
            layout.name,
            _mb(result, layout.peak_reserved),
            f"{layout.utilisation:.1%}",
            f"{layout.largest_batch:,}",
            layout.at_exhaustion,
        )
    return shown


def plot(result: MemoryStudy, path: Path) -> None:
    """Draw what is reserved and what is used over time, of each layout but the blocks that are not 16.

    Raises ConfigError without matplotlib, or for a kind of file that it cannot write.
    """
    figure = new_figure(11, 4.5)
    axes = figure.subplots(1, 1)
    for layout in result.layouts:
        if layout.name.startswith("paged") and not layout.name.endswith(" 16"):
            continue
        times = [moment.time for moment in layout.memory]
        reserved = [moment.allocated * result.bytes_per_token / 1e6 for moment in layout.memory]
        used = [moment.filled * result.bytes_per_token / 1e6 for moment in layout.memory]
        (line,) = axes.step(times, reserved, where="post", label=f"{layout.name}, reserved")
        axes.step(times, used, where="post", color=line.get_color(), linestyle=":", label="used")
    axes.set(xlabel="time, s", ylabel="MB of keys and values", ylim=(0, None))
    axes.legend()
    save(figure, path)


def _mb(result: MemoryStudy, num_tokens: float) -> str:
    return f"{num_tokens * result.bytes_per_token / 1e6:,.1f}"

"""Every hook a plugin may implement; each docstring is the hook's reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import pluggy

if TYPE_CHECKING:
    from paged_backend.outputs import RequestOutput
    from paged_backend.request.view import RequestView
    from paged_backend.stats import EngineStats, StepStats

PROJECT = "paged_backend"
# A plugin may state what it was written for: anything from the oldest on, since what came later was only added.
HOOK_API_VERSION = 3
OLDEST_HOOK_API_VERSION = 1

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

Register = Callable[[str, Any], None]


class ObservedEngine(Protocol):
    """The engine as its listeners know it."""

    def stats(self) -> EngineStats:
        """Numbers since it started, and the memory as it is now; until it closes."""


@hookspec
def register_schedulers(register: Register) -> None:
    """Offer scheduling policies: ``register("name", SchedulingPolicy subclass or factory)``. Once per engine.

    A factory is called with ``scheduler_options``. A string ``"module:attribute"`` is imported only when chosen.
    """


@hookspec
def register_evictions(register: Register) -> None:
    """Offer eviction policies: ``register("name", EvictionPolicy subclass or factory)``. Once per engine.

    A factory is called with ``eviction_options``, once per KV group.
    """


@hookspec
def register_block_sizes(register: Register) -> None:
    """Offer block-size rules: ``register("name", rule)`` with ``rule(ModelShape, device) -> int``. Once per engine."""


@hookspec
def register_attention_backends(register: Register) -> None:
    """Offer attention backends: ``register("name", {"decode_attention": function, ...})``. Once per engine.

    The operations and what their functions are called with, by position (see ``LayerCache``, ``Sequences``,
    ``AttentionVariant``): ``store_kv(key, value, cache, slot_mapping)``, ``prefill_attention(query, cache, sequences,
    variant)``, ``decode_attention(query, cache, sequences, variant)``. An operation left out runs as with ``auto``. The
    model is proven with the backend before anything is served; a function that cannot be called so, that raises or that
    returns another shape or dtype is a PluginError that names it.
    """


@hookspec
def register_routers(register: Register) -> None:
    """Offer routing policies: ``register("name", RoutingPolicy subclass or factory)``. Once per group of replicas.

    A factory is called with the options of the router. A string ``"module:attribute"`` is imported only when chosen.
    """


@hookspec(firstresult=True)
def admit_request(request: RequestView, stats: EngineStats) -> bool | str | None:
    """Accept or refuse a new request; the first plugin with an opinion decides.

    Return True to accept, a reason to refuse (the caller gets ``RequestRefused(reason)``), None to pass. False refuses
    too, but tells the caller the plugin's name alone.
    """


@hookspec
def engine_started(engine: ObservedEngine) -> None:
    """The engine is built: model proven, cache sized. Once per engine.

    Keep ``engine`` to read ``engine.stats()`` until it is closed; what changes it is refused inside of its own calls.
    """


@hookspec
def request_added(request: RequestView) -> None:
    """A request was accepted and waits."""


@hookspec
def request_preempted(request: RequestView, num_blocks: int) -> None:
    """A running request gave up ``num_blocks`` blocks and waits again, keeping its tokens."""


@hookspec
def request_finished(request: RequestView, output: RequestOutput) -> None:
    """A request ended, whatever the reason; ``output``, a copy of what its caller gets, tells which."""


@hookspec
def step_finished(engine: ObservedEngine, stats: StepStats) -> None:
    """A step of ``engine`` is over and its state is consistent. Last of all in a step."""


@hookspec
def engine_stopped(engine: ObservedEngine) -> None:
    """The engine was closed; its cache is gone."""

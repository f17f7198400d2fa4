"""The engines that stay behind models between calls of ``generate``, a few for each model."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from paged_backend import Engine, EngineConfig, SharedEngine
from paged_backend.policies import SchedulingPolicy

# How many engines a model keeps that nobody uses at the moment.
MAX_ENGINES = 4


class _KeptEngine:
    """One engine with what it was asked for by. users: the calls that have it in their hands."""

    def __init__(self, model: nn.Module, config: EngineConfig, plugins: tuple[Any, ...]) -> None:
        self.config = config
        self.plugins = plugins
        # As long as the policy in it has not run.
        self._value = _value(config)
        self.engine = SharedEngine(Engine(model, None, config, plugins=plugins, elastic=True))
        self.users: set[object] = set()

    def serves(self, config: EngineConfig, plugins: tuple[Any, ...]) -> bool:
        """Whether a call that asks for these means this engine."""
        return (config == self.config or _value(config) == self._value) and _same(plugins, self.plugins)


class _ModelEngines:
    """One model's engines, least recently used first. They never hold the model itself."""

    def __init__(self) -> None:
        # Held while an engine is made, so that threads which come at once get the same one.
        self.lock = threading.Lock()
        self.kept: list[_KeptEngine] = []

    def take(self, model: nn.Module, config: EngineConfig, plugins: tuple[Any, ...], user: object) -> _KeptEngine:
        """The engine for these, kept until ``user`` is taken from its users again."""
        with self.lock:
            self.kept = [kept for kept in self.kept if not kept.engine.is_lost]
            kept = next((kept for kept in self.kept if kept.serves(config, plugins)), None)
            if kept is None:
                self._make_room()
                kept = _KeptEngine(model, config, plugins)
            else:
                self.kept.remove(kept)
            self.kept.append(kept)
            kept.users.add(user)
            return kept

    def _make_room(self) -> None:
        """Close those that nobody has used for longest."""
        num_idle = len(self.kept) - MAX_ENGINES + 1
        for kept in [kept for kept in self.kept if not kept.users][: max(0, num_idle)]:
            self.kept.remove(kept)
            kept.engine.close()

    def close(self) -> None:
        with self.lock:
            for kept in self.kept:
                kept.engine.close()
            self.kept.clear()


_lock = threading.Lock()
_by_model: WeakKeyDictionary[nn.Module, _ModelEngines] = WeakKeyDictionary()


@contextmanager
def engine_for(model: nn.Module, config: EngineConfig, plugins: tuple[Any, ...]) -> Iterator[SharedEngine]:
    """The engine of ``model`` for an equal configuration and the same plugins, made on first use.

    Of those that nobody uses a model keeps the last few. Raises UnsupportedModel when the model cannot be served.
    """
    with _lock:
        engines = _by_model.get(model)
        if engines is None:
            engines = _by_model[model] = _ModelEngines()
    user = object()
    kept = engines.take(model, config, plugins, user)
    try:
        yield kept.engine
    finally:
        kept.users.discard(user)


def release_engines(model: nn.Module) -> None:
    """Close the engines of ``model`` and of the models inside it, as PEFT's wrappers have one."""
    for module in [model, *model.modules()]:
        with _lock:
            engines = _by_model.pop(module, None)
        if engines is not None:
            engines.close()


def _value(config: EngineConfig) -> EngineConfig:
    """What compares equal for configurations that mean the same, as two fresh policies of equal settings do.

    For this package's own policies, in which nobody keeps anything to look at later.
    """
    policy = config.scheduler
    if isinstance(policy, SchedulingPolicy) and type(policy).__module__.startswith("paged_backend."):
        try:
            return replace(config, scheduler=pickle.dumps(policy))
        except Exception:
            return config
    return config


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


def _after_fork() -> None:
    # A thread that the child does not have may have held one of them.
    global _lock
    _lock = threading.Lock()
    for engines in list(_by_model.values()):
        engines.lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

"""The engines that stay behind models between calls of ``generate``, one for each model and configuration."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from paged_backend import Engine, EngineConfig, SharedEngine


class _ModelEngines:
    """One model's engines. They never hold the model itself."""

    def __init__(self) -> None:
        # Held while an engine is made, so that threads which come at once get the same one.
        self.lock = threading.Lock()
        self.engines: list[tuple[EngineConfig, tuple[Any, ...], SharedEngine]] = []

    def get(self, model: nn.Module, config: EngineConfig, plugins: tuple[Any, ...]) -> SharedEngine:
        with self.lock:
            for known_config, known_plugins, engine in self.engines:
                if known_config == config and _same(known_plugins, plugins):
                    return engine
            engine = SharedEngine(Engine(model, None, config, plugins=plugins, elastic=True))
            self.engines.append((config, plugins, engine))
            return engine

    def close(self) -> None:
        with self.lock:
            for _, _, engine in self.engines:
                engine.close()
            self.engines.clear()


_lock = threading.Lock()
_by_model: WeakKeyDictionary[nn.Module, _ModelEngines] = WeakKeyDictionary()


def engine_for(model: nn.Module, config: EngineConfig, plugins: tuple[Any, ...]) -> SharedEngine:
    """The engine of ``model`` for an equal configuration and the same plugins, made on first use.

    Raises UnsupportedModel when the model cannot be served.
    """
    with _lock:
        engines = _by_model.get(model)
        if engines is None:
            engines = _by_model[model] = _ModelEngines()
    return engines.get(model, config, plugins)


def release_engines(model: nn.Module) -> None:
    """Close the engines of ``model`` and of the models inside it, as PEFT's wrappers have one."""
    for module in [model, *model.modules()]:
        with _lock:
            engines = _by_model.pop(module, None)
        if engines is not None:
            engines.close()


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))

"""Choices: the policies and kernels that a configuration names, found before any model is looked at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paged_backend.config import EngineConfig
from paged_backend.model.attention_backend import Backend, resolve
from paged_backend.policies import BlockSizeRule, EvictionPolicy, SchedulingPolicy
from paged_backend.policy.plugin_manager import PluginManager


@dataclass(frozen=True)
class Choices:
    """What one engine runs with.

    make_eviction: makes the eviction policy of one KV group. block_size: tokens, or the rule that tells them of a
    model. attention_backend: the kernels.
    """

    scheduler: SchedulingPolicy
    make_eviction: Callable[[], EvictionPolicy]
    block_size: int | BlockSizeRule
    attention_backend: Backend


def choose(config: EngineConfig, plugins: PluginManager) -> Choices:
    """Find what ``config`` names among ``plugins``.

    Raises UnknownPolicy for a name that nobody registered, ConfigError for an object or an option that cannot be used,
    PluginError for what a plugin registered wrongly.
    """
    name = config.attention_backend
    return Choices(
        scheduler=plugins.scheduler(config.scheduler, config.scheduler_options),
        make_eviction=plugins.eviction_factory(config.eviction, config.eviction_options),
        block_size=plugins.block_size_rule(config.block_size),
        attention_backend=resolve(name, plugins.attention_backend(name), plugins.names("attention_backend")),
    )

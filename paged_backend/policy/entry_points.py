"""The entry points that lead to installed plugins."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterable
from importlib.metadata import EntryPoint
from typing import Any

from paged_backend.errors import PluginError
from paged_backend.hookspecs import PROJECT

PLUGINS_VARIABLE = "PAGED_BACKEND_PLUGINS"


def entry_points() -> list[tuple[EntryPoint, bool]]:
    """The installed plugins that are to be loaded, each with whether it was asked for by name.

    Raises PluginError for a name that is not installed.
    """
    limit = os.environ.get(PLUGINS_VARIABLE)
    wanted = None if limit is None else {name.strip() for name in limit.split(",") if name.strip()}
    points = list(importlib.metadata.entry_points(group=PROJECT))
    installed = {point.name for point in points}
    if wanted is not None and (missing := sorted(wanted - installed)):
        known = ", ".join(sorted(installed)) or "none"
        raise PluginError(f"{PLUGINS_VARIABLE} names {missing[0]!r}, which is not installed; installed: {known}")
    return [(point, wanted is not None) for point in points if wanted is None or point.name in wanted]


def clash_of(point: EntryPoint, points: Iterable[EntryPoint]) -> str | None:
    """What is wrong if several distributions have a plugin of this name, all of which are among ``points``."""
    same = [each for each in points if each.name == point.name]
    if len(same) < 2:
        return None
    both = " and ".join(f"{distribution_of(each)} ({each.value})" for each in same)
    return (
        f"plugin {point.name!r} is installed by both {both}; uninstall one of them, or leave the name out of "
        f"{PLUGINS_VARIABLE}"
    )


def loaded(point: EntryPoint) -> Any:
    """What an entry point leads to; raises PluginError, which names it, whatever goes wrong."""
    try:
        return point.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise PluginError(
            f"plugin {point.name!r} ({point.value}) cannot be loaded: {error!r}; fix or uninstall it, or leave it out "
            f"of {PLUGINS_VARIABLE}"
        ) from error


def distribution_of(point: EntryPoint) -> str:
    """The distribution that brought an entry point, with its version."""
    return "unknown" if point.dist is None else f"{point.dist.name} {point.dist.version}"

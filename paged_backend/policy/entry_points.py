"""The entry points that lead to installed plugins."""

from __future__ import annotations

import importlib.metadata
import os
from importlib.metadata import EntryPoint
from typing import Any

from paged_backend.errors import PluginError
from paged_backend.hookspecs import PROJECT

PLUGINS_VARIABLE = "PAGED_BACKEND_PLUGINS"


def entry_points() -> list[tuple[EntryPoint, bool]]:
    """The installed plugins that are to be loaded, each with whether it was asked for by name.

    Raises PluginError for a name that is not installed, and for one that two distributions have.
    """
    limit = os.environ.get(PLUGINS_VARIABLE)
    wanted = None if limit is None else {name.strip() for name in limit.split(",") if name.strip()}
    installed: dict[str, EntryPoint] = {}
    clashing: dict[str, EntryPoint] = {}
    for point in importlib.metadata.entry_points(group=PROJECT):
        if installed.setdefault(point.name, point) is not point:
            clashing[point.name] = point
    if wanted is not None and (missing := sorted(wanted - installed.keys())):
        known = ", ".join(sorted(installed)) or "none"
        raise PluginError(f"{PLUGINS_VARIABLE} names {missing[0]!r}, which is not installed; installed: {known}")
    chosen = [point for name, point in installed.items() if wanted is None or name in wanted]
    for point in chosen:
        if (other := clashing.get(point.name)) is not None:
            both = " and ".join(f"{distribution_of(each)} ({each.value})" for each in (point, other))
            raise PluginError(
                f"plugin {point.name!r} is installed by both {both}; uninstall one of them, or leave the name out of "
                f"{PLUGINS_VARIABLE}"
            )
    return [(point, wanted is not None) for point in chosen]


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

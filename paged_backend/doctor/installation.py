"""The installation: versions, plugins, and the sample model."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from paged_backend import sample_model as sample
from paged_backend.doctor.finding import Finding
from paged_backend.policy.plugin_manager import PluginManager

NAME = "paged-backend"
# Extras of those who develop the package.
_INNER_EXTRAS = {"dev", "test"}


def versions() -> Iterator[Finding]:
    """The package, Python, and everything that it needs or can use, against the versions that it was made for."""
    own = distribution(NAME)
    yield Finding(NAME, "ok", own.version)
    yield _fits("Python", platform.python_version(), SpecifierSet(own.metadata["Requires-Python"] or ""), "")
    extras = [extra for extra in own.metadata.get_all("Provides-Extra") or [] if extra not in _INNER_EXTRAS]
    absent = []
    for requirement in map(Requirement, own.requires or []):
        # An extra of extras, whose packages stand there by themselves.
        if requirement.name == NAME:
            continue
        for extra in ["", *extras]:
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
                continue
            try:
                found = version(requirement.name)
            except PackageNotFoundError:
                if extra:
                    absent.append(f"{requirement.name} (extra {extra!r})")
                else:
                    yield Finding(
                        requirement.name,
                        "problem",
                        f"not installed, and needed: pip install '{requirement.name}{requirement.specifier}'",
                    )
            else:
                yield _fits(requirement.name, found, requirement.specifier, requirement.name)
            break
    if absent:
        yield Finding("extras", "note", f"not installed, and needed by an extra alone: {', '.join(absent)}")


def _fits(name: str, found: str, wanted: SpecifierSet, package: str) -> Finding:
    if wanted.contains(found, prereleases=True):
        return Finding(name, "ok", f"{found}, wanted {wanted}" if wanted else found)
    remedy = f": pip install '{package}{wanted}'" if package else ""
    return Finding(name, "problem", f"{found} is not in {wanted}, which {NAME} was made for{remedy}")


def plugins() -> Iterator[Finding]:
    """The installed plugins, and what is wrong with the broken ones."""
    found = PluginManager(lists=True).describe()
    installed = [plugin for plugin in found if not plugin.source.startswith(f"{NAME} ")]
    for plugin in installed:
        if plugin.error is not None:
            yield Finding("plugin", "problem", f"{plugin.error} ({plugin.source})")
        else:
            offered = [f"{kind} {name}" for kind, names in plugin.names.items() for name in names] or plugin.hooks
            yield Finding("plugin", "ok", f"{plugin.name} of {plugin.source}: {', '.join(offered)}")
    if not installed:
        yield Finding("plugins", "ok", "the built-in ones alone")


def sample_model() -> Iterator[Finding]:
    """Whether the sample model is here; it is not fetched."""
    if sample.is_fetched():
        yield Finding("sample model", "ok", f"{sample.NAME} is in {sample.folder()}")
    else:
        yield Finding("sample model", "note", f"{sample.NAME} is not fetched yet; paged-backend demo does so, once")

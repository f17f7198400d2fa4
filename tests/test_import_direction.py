"""Imports point one way: kernels below the core, plugins and integrations beside it, through its public face only."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import paged_backend

ROOT = Path(__file__).parents[1]
PACKAGE_DIR: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]

# The core modules that reach kernels, and what plugins may know of the core: their interfaces and the values passed.
REACHES_KERNELS = {"attention", "fused", "kv_cache", "model_runner", "patterns", "sampler"}
OPEN_TO_PLUGINS = {"errors", "hookspecs", "policies", "request", "stats"}
# Modules whose every name is public.
PUBLIC_MODULES = {"paged_backend.errors", "paged_backend.hookspecs", "paged_backend.policies"}
# Programs on top of the engine: they may use everything, and nothing imports them.
PROGRAMS = {"__main__", "cli", "cli_chat", "cli_engine", "cli_generate", "demo", "demo_prompts", "lab", "sample_model"}


def imported_names(source: str, package: str) -> Iterator[str]:
    """Yield the dotted name of everything imported anywhere in a module of `package`: `from a.b import c` is a.b.c."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{prefix}.{alias.name}" for alias in node.names)


def part_of(name: str) -> tuple[str, str]:
    """Say which part of the house a dotted name lies in, and its module in the core.

    `paged_backend.plugins.eviction` is ("plugins", ""), `paged_backend.engine.scheduler.Scheduler` is ("core", "scheduler").
    """
    words = name.split(".")
    if words[0] != "paged_backend":
        return "outside", words[0]
    part = words[1] if len(words) > 1 else ""
    if f"paged_backend.{part}" in PACKAGE_DIR:
        return part, ""
    return ("programs" if part in PROGRAMS else "core"), part


def allowed(importer: str, name: str, public: set[str]) -> bool:
    """Tell whether the module `importer` may import the dotted `name`."""
    part, module = part_of(importer)
    target, target_module = part_of(name)
    if part == "programs":
        return True
    if target == "programs":
        return False
    if part == "kernels":
        if target == "outside":
            return target_module in {"torch", "triton"} or target_module in sys.stdlib_module_names
        return target == "kernels"
    if target == "outside" or part == target == "core":
        return True
    if part == "core":
        # install() and uninstall() are public names of the package that live in an integration.
        return (target == "kernels" and module in REACHES_KERNELS) or (target == "integrations" and module == "")
    if part == "plugins":
        return target == "plugins" or (target == "core" and target_module in OPEN_TO_PLUGINS)
    assert part == "integrations"
    if target == "core":
        parent, _, last = name.rpartition(".")
        return name == "paged_backend" or last in public or parent in PUBLIC_MODULES or name in PUBLIC_MODULES
    return target == "integrations"


def modules() -> Iterator[tuple[str, Path]]:
    for package, folder in PACKAGE_DIR.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            yield ".".join([package, *(part for part in parts if part != "__init__")]), path


@pytest.mark.parametrize(("module", "path"), [pytest.param(*pair, id=pair[0]) for pair in modules()])
def test_imports_point_one_way(module: str, path: Path) -> None:
    public = set(paged_backend.__all__)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    wrong = [name for name in imported_names(path.read_text(), package) if not allowed(module, name, public)]
    assert wrong == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("paged_backend.kernels.store_kv", "import transformers"),
        ("paged_backend.kernels.store_kv", "from paged_backend.errors import PagedBackendError"),
        ("paged_backend.kernels.store_kv", "from .. import errors"),
        ("paged_backend.engine.scheduler", "from paged_backend.kernels import store_kv"),
        ("paged_backend.engine.scheduler", "from paged_backend import kernels"),
        ("paged_backend.engine.scheduler", "from .plugins.eviction import LRU"),
        ("paged_backend.engine.scheduler", "from paged_backend.integrations import huggingface"),
        ("paged_backend.engine.engine", "from paged_backend.lab.replay import replay"),
        ("paged_backend.plugins.eviction", "def f():\n    from paged_backend.memory.block_manager import BlockManager"),
        ("paged_backend.plugins.eviction", "import paged_backend.engine.engine"),
        ("paged_backend.plugins.eviction", "from paged_backend import Engine"),
        ("paged_backend.integrations.huggingface.patches", "from paged_backend.model.twin import Twin"),
        ("paged_backend.integrations.huggingface.patches", "import paged_backend.engine.engine"),
        ("paged_backend.integrations.huggingface.patches", "from paged_backend import engine"),
        ("paged_backend.integrations.huggingface.patches", "from paged_backend.kernels import store_kv"),
    ],
)
def test_an_import_against_the_direction_is_caught(module: str, line: str) -> None:
    names = list(imported_names(line, module.rpartition(".")[0]))
    assert not any(allowed(module, name, {"Engine"}) for name in names)


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("paged_backend.kernels.store_kv", "import math, torch, triton.language as tl"),
        ("paged_backend.kernels.store_kv", "from paged_backend.kernels.dispatch import choose"),
        ("paged_backend.model.attention", "from paged_backend.kernels import store_kv"),
        ("paged_backend", "from paged_backend.integrations.huggingface.patches import install"),
        ("paged_backend.plugins.eviction", "from paged_backend.policies import EvictionPolicy"),
        ("paged_backend.integrations.huggingface.patches", "from paged_backend import Engine"),
        ("paged_backend.integrations.huggingface.patches", "from paged_backend.engine.engine import Engine"),
        ("paged_backend.integrations.huggingface.patches", "from paged_backend.errors import UnsupportedModel"),
        ("paged_backend.lab.bench", "from paged_backend.kernels import store_kv"),
        ("paged_backend.cli.app", "from paged_backend.lab.bench import bench"),
    ],
)
def test_an_import_along_the_direction_passes(module: str, line: str) -> None:
    names = list(imported_names(line, module.rpartition(".")[0]))
    assert names
    assert all(allowed(module, name, {"Engine"}) for name in names)

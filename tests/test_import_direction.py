"""Imports point one way: each room names the rooms it may import, and no module imports itself by a detour."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

import paged_backend

ROOT = Path(__file__).parents[1]
PACKAGE_DIR: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]

# What each room may import beside itself. A room is a folder, or a module in the root, whose names are public.
VALUES = {"checks", "config", "errors", "outputs", "sampling_params", "stats"}
ROOMS: dict[str, set[str]] = {
    "outputs": set(),
    "errors": {"outputs"},
    "checks": {"errors"},
    "config": {"checks", "errors"},
    "sampling_params": {"checks", "errors"},
    "stats": set(),
    "lazy_heap": set(),
    "block_cost": set(),
    "kernels": set(),
    "request": VALUES,
    "sampling": {"kernels", "request"} | VALUES,
    "policies": {"lazy_heap", "request"},
    "hookspecs": {"outputs", "request", "stats"},
    "policy": {"hookspecs", "policies", "request"} | VALUES,
    "memory": {"kernels", "policies", "policy", "request"} | VALUES,
    "model": {"kernels", "memory"} | VALUES,
    "swaps": {"kernels", "memory", "model"} | VALUES,
    "engine": {"memory", "model", "policies", "policy", "request", "sampling", "swaps"} | VALUES,
    "service": {"engine", "request", "sampling"} | VALUES,
    "lab": {
        "block_cost",
        "engine",
        "hookspecs",
        "kernels",
        "memory",
        "plugins",
        "policies",
        "policy",
        "request",
        "sampling",
    }
    | VALUES,
    "sample_model": {"errors"},
    "doctor": {"kernels", "policy", "sample_model"} | VALUES,
    # Plugins see what third parties see: the interfaces, and the values passed.
    "plugins": {"block_cost", "checks", "errors", "hookspecs", "outputs", "policies", "stats"},
    # Integrations see public names only, through the face.
    "integrations": {
        "face",
        "checks",
        "config",
        "errors",
        "hookspecs",
        "outputs",
        "policies",
        "sampling_params",
        "stats",
    },
    "cli": {
        "block_cost",
        "doctor",
        "engine",
        "face",
        "hookspecs",
        "integrations",
        "lab",
        "model",
        "plugins",
        "policy",
        "request",
        "sample_model",
        "sampling",
        "service",
    }
    | VALUES,
    "__main__": {"cli"},
}
# The package itself, which hands out names of all rooms when they are first used.
FACE = "face"
# The outside libraries that a room keeps to.
OUTSIDE = {"kernels": {"torch", "triton"}}


def imported_names(source: str, package: str) -> Iterator[str]:
    """Yield the dotted name of everything imported anywhere in a module of `package`: `from a.b import c` is a.b.c."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{prefix}.{alias.name}" for alias in node.names)


def room_of(name: str) -> str | None:
    """The room that a dotted name lies in; None outside of the package."""
    words = name.split(".")
    if words[0] != "paged_backend":
        return None
    if len(words) > 1 and words[1] in ROOMS:
        return words[1]
    return FACE if len(words) < 3 else words[1]


def allowed(importer: str, name: str) -> bool:
    """Tell whether the module `importer` may import the dotted `name`."""
    room, target = room_of(importer), room_of(name)
    if room == FACE:
        return True
    assert room is not None
    if target is None:
        outside = name.partition(".")[0]
        return room not in OUTSIDE or outside in OUTSIDE[room] or outside in sys.stdlib_module_names
    if target == FACE and name != "paged_backend" and name.rpartition(".")[2] not in paged_backend.__all__:
        return False
    return target == room or target in ROOMS[room]


def modules() -> dict[str, Path]:
    found = {}
    for package, folder in PACKAGE_DIR.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *(part for part in parts if part != "__init__")])] = path
    return found


MODULES = modules()


def imports_of(module: str, path: Path) -> list[str]:
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return list(imported_names(path.read_text(), package))


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """The circles that a walk along imports closes, each from the module where it closes on."""
    found: list[list[str]] = []
    done: set[str] = set()

    def walk(module: str, path: list[str]) -> None:
        if module in path:
            found.append(path[path.index(module) :])
        elif module not in done:
            for target in graph.get(module, ()):
                walk(target, [*path, module])
            done.add(module)

    for module in graph:
        walk(module, [])
    return found


def module_graph() -> dict[str, set[str]]:
    """Which module imports which, for types or not. The face is left out: it imports a name when that is asked for."""
    graph: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        targets = graph.setdefault(module, set())
        for name in imports_of(module, path) if module != "paged_backend" else ():
            while name and name not in MODULES:
                name = name.rpartition(".")[0]
            if name not in ("", module, "paged_backend"):
                targets.add(name)
    return graph


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_what_its_room_may(module: str) -> None:
    assert [name for name in imports_of(module, MODULES[module]) if not allowed(module, name)] == []


def test_every_folder_and_every_public_module_is_in_the_table() -> None:
    assert {room for room in map(room_of, MODULES) if room != FACE} == ROOMS.keys()


def test_no_module_imports_itself_by_a_detour() -> None:
    assert circles(module_graph()) == []


def test_the_table_of_rooms_holds_no_circle() -> None:
    assert circles(ROOMS) == []


def test_a_circle_is_found() -> None:
    assert circles({"a": ["b"], "b": ["c"], "c": ["b"], "d": ["a"]}) == [["b", "c"]]


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("kernels.store_kv", "import transformers"),
        ("kernels.store_kv", "from paged_backend.errors import PagedBackendError"),
        ("kernels.store_kv", "from .. import errors"),
        ("engine.scheduler", "from paged_backend.kernels import store_kv"),
        ("engine.scheduler", "from paged_backend import kernels"),
        ("engine.scheduler", "from paged_backend.plugins.eviction import LRU"),
        ("engine.engine", "from paged_backend.service.handle import Handle"),
        ("memory.block_manager", "from ..engine.scheduler import Scheduler"),
        ("request.lockstep", "from paged_backend.sampling.distribution import take_rows"),
        ("hookspecs", "def f():\n    from paged_backend.engine.engine import Engine"),
        ("model.twin", "from paged_backend import Engine"),
        ("plugins.eviction", "def f():\n    from paged_backend.memory.block_manager import BlockManager"),
        ("plugins.eviction", "import paged_backend.engine"),
        ("plugins.eviction", "from paged_backend import Engine"),
        ("integrations.huggingface.patches", "from paged_backend.model.twin import Twin"),
        ("integrations.huggingface.patches", "import paged_backend.engine"),
        ("integrations.huggingface.patches", "from paged_backend import engine"),
        ("integrations.huggingface.patches", "from paged_backend.kernels import store_kv"),
    ],
)
def test_an_import_against_the_direction_is_caught(module: str, line: str) -> None:
    module = f"paged_backend.{module}"
    assert not any(allowed(module, name) for name in imported_names(line, module.rpartition(".")[0]))


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("kernels.store_kv", "import math, torch, triton.language as tl"),
        ("kernels.store_kv", "from paged_backend.kernels.dispatch import choose"),
        ("model.attention", "from paged_backend.kernels import store_kv"),
        ("engine.scheduler", "from ..memory import block_manager"),
        ("plugins.eviction", "from paged_backend.policies import EvictionPolicy"),
        ("integrations.huggingface.patches", "from paged_backend import Engine"),
        ("integrations.huggingface.patches", "from paged_backend.errors import UnsupportedModel"),
        ("cli.app", "from paged_backend.service.async_engine import AsyncEngine"),
    ],
)
def test_an_import_along_the_direction_passes(module: str, line: str) -> None:
    module = f"paged_backend.{module}"
    names = list(imported_names(line, module.rpartition(".")[0]))
    assert names
    assert all(allowed(module, name) for name in names)

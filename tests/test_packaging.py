"""The package as users get it: what is declared, what an sdist and a wheel hold, what imports from where."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGE_DIR: dict[str, str] = PYPROJECT["tool"]["setuptools"]["package-dir"]
EXTRAS: dict[str, list[str]] = PYPROJECT["project"]["optional-dependencies"]

IMPORT_ALL = """
import importlib, sys
from pathlib import Path
folder, modules = sys.argv[1], sys.argv[2:]
for name in modules:
    file = importlib.import_module(name).__file__
    assert Path(file).is_relative_to(folder), f"{name} was imported from {file}"
print(len(modules), "imported")
"""


def installed_files() -> dict[str, Path]:
    """Map every file that belongs in a wheel, py.typed and kernel sources included, to its place on disk."""
    files = {}
    for package, folder in PACKAGE_DIR.items():
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".md":
                files[str(Path(*package.split("."), path.relative_to(ROOT / folder)))] = path
    return files


def installed_modules() -> list[str]:
    return sorted(
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in installed_files()
        if name.endswith(".py")
    )


def run(arguments: list[str], cwd: Path) -> str:
    result = subprocess.run(arguments, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel from an sdist of a copy of the repository, so that no earlier build leaks into it."""
    folder = tmp_path_factory.mktemp("build")
    leave_out = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, folder / "repository", ignore=leave_out)
    build = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
    run([sys.executable, "-c", build, "build_sdist", str(folder)], folder / "repository")
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    run([sys.executable, "-c", build, "build_wheel", str(folder)], folder / sdist.name.removesuffix(".tar.gz"))
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_every_package_on_disk_is_listed() -> None:
    packages = {Path(name).parent for name in installed_files() if name.endswith("__init__.py")}
    assert {".".join(package.parts) for package in packages} == set(PYPROJECT["tool"]["setuptools"]["packages"])


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if ".dist-info/" not in name} == set(installed_files())


def test_the_wheel_states_its_licence_and_ships_its_text(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    info = wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info"
    metadata = archive.read(f"{info}/METADATA").decode()
    assert "License-Expression: Apache-2.0\n" in metadata
    assert "License-File: LICENSE\n" in metadata
    licence = archive.read(f"{info}/licenses/LICENSE").decode()
    assert "Apache License\n                           Version 2.0, January 2004" in licence
    assert "END OF TERMS AND CONDITIONS" in licence


@pytest.fixture(scope="module")
def loaded(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], str]:
    """From the unpacked wheel: the modules that the public names load, and what importing every module says then."""
    folder = tmp_path_factory.mktemp("unpacked")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    # Without `site` (-S) an editable install of this checkout cannot stand in for a file the wheel lacks.
    search = [str(folder / "site"), *(entry for entry in sys.path if entry.endswith("-packages"))]
    public = (
        f"import sys; sys.path += {search!r}\n"
        "import paged_backend, torch\n"
        "assert all(hasattr(paged_backend, name) for name in paged_backend.__all__)\n"
        "assert not torch.cuda.is_initialized()\n"
        "print(*sys.modules)"
    )
    arguments = [str(folder / "site"), *installed_modules()]
    names, said = run([sys.executable, "-I", "-S", "-c", public + IMPORT_ALL, *arguments], folder).splitlines()
    return names.split(), said


def test_the_unpacked_wheel_imports_without_the_checkout(loaded: tuple[list[str], str]) -> None:
    assert loaded[1] == f"{len(installed_modules())} imported"


def test_the_public_names_load_without_cuda_or_an_extra(loaded: tuple[list[str], str]) -> None:
    assert "paged_backend.engine.engine" in loaded[0]
    assert set(loaded[0]).isdisjoint({"langchain_core", "llguidance", "matplotlib", "peft", "prometheus_client", "ray"})


@pytest.mark.parametrize("start", ["the repository", "elsewhere"])
def test_the_installed_package_is_found_from_any_folder(start: str, tmp_path: Path) -> None:
    import paged_backend.plugins

    editable = Path(paged_backend.plugins.__file__).is_relative_to(ROOT)
    if not editable and start == "the repository":
        pytest.skip("the checkout's paged_backend/ shadows an installed wheel there")
    # The folders beside the core, which the core's own folder would hide.
    names = [name for name in PACKAGE_DIR if name.count(".") == 1]
    code = "import sys, importlib.util\nfor name in sys.argv[1:]: print(importlib.util.find_spec(name).origin)"
    found = run([sys.executable, "-c", code, *names], ROOT if start == "the repository" else tmp_path).splitlines()
    installed = Path(paged_backend.__file__).parent
    places = [ROOT / PACKAGE_DIR[name] if editable else installed / name.split(".")[1] for name in names]
    assert found == [str(place / "__init__.py") for place in places]


def test_the_version_is_that_of_the_metadata() -> None:
    import paged_backend

    assert paged_backend.__version__ == version("paged-backend") == PYPROJECT["project"]["version"]


def test_the_command_line_script_answers_help(tmp_path: Path) -> None:
    assert "Usage" in run([str(Path(sys.executable).with_name("paged-backend")), "--help"], tmp_path)


def requirements_of(extra: str) -> Iterator[Requirement]:
    for requirement in map(Requirement, EXTRAS[extra]):
        if requirement.name == PYPROJECT["project"]["name"]:
            for other in requirement.extras:
                yield from requirements_of(other)
        else:
            yield requirement


def test_the_tested_versions_lie_in_the_declared_ranges() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    tested = dict(line.split("==") for line in lines if not line.startswith("#"))
    # `dev` is what `make test` installs: it holds every extra that tests use.
    for requirement in [*map(Requirement, PYPROJECT["project"]["dependencies"]), *requirements_of("dev")]:
        assert Version(tested[requirement.name]) in requirement.specifier, requirement


def test_no_file_names_a_folder_of_the_machine_it_was_written_on() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    home = re.compile(r"(?<![\w.*)])/(?:home|root|Users)/\w|" + re.escape(str(ROOT)) + r"\b")
    for name in run(["git", "ls-files", "-z"], ROOT).split("\0"):
        path = ROOT / name
        if path.is_file() and path.suffix in {"", ".cpp", ".md", ".py", ".toml", ".txt"}:
            match = home.search(path.read_text())
            assert match is None, f"{name} names {match and match[0]}"

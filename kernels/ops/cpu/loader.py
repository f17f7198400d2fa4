"""The C++ library: compiled once for this processor into torch's extension cache, then loaded from there."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch

_SOURCES = ("attention.cpp", "library.cpp", "product.cpp", "quantised_product.cpp", "rows.cpp", "state.cpp")
_HEADERS = ("attention.h", "product.h", "quantised_product.h", "rows.h", "state.h", "vec.h")
_FOLDER = Path(__file__).parent
# Hidden, since a process that loads two levels would take one's tables of functions for the other's.
_FLAGS = ("-O3", "-fopenmp", "-w", "-fvisibility=hidden")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
# What the compiler may use at each level; "plain" is the least that every processor of the architecture has.
LEVELS = {
    "avx512_bf16": (*_AVX512, "-mavx512bf16"),
    "avx512": _AVX512,
    "avx2": _AVX2,
    "plain": (),
}
# What torch's variable of the environment allows at most.
_CAPABILITIES = {"default": "plain", "avx2": "avx2"}
_building = threading.Lock()


def _after_fork() -> None:
    # A thread that the child does not have may have held it.
    global _building
    _building = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


class UnavailableWarning(UserWarning):
    """The C++ operations could not be compiled, so that plain torch runs in their place."""


@functools.cache
def is_available() -> bool:
    """Whether the library can be loaded, compiling it if need be. Warns once, with the remedy, when it cannot."""
    try:
        library()
    except Exception as error:
        warnings.warn(
            "the C++ operations of paged_backend could not be compiled, and plain torch, which is several times "
            f"slower, runs in their place: {error}",
            UnavailableWarning,
            stacklevel=2,
        )
        return False
    return True


@functools.cache
def library() -> Any:
    """The operations for this processor, a namespace of torch.ops. Raises what the compiler raises."""
    return load(level())


def is_loaded() -> bool:
    """Whether something in this process uses the library already, so that using it costs no compilation."""
    return library.cache_info().currsize > 0


@functools.cache
def level() -> str:
    """The best of LEVELS that this processor knows, and that torch's own kernels may use.

    As torch does, it takes no better one than the environment's ``ATEN_CPU_CAPABILITY`` ("default", "avx2"), so that a
    machine can stand in for an older one.
    """
    known = list(LEVELS)
    most = _CAPABILITIES.get(os.environ.get("ATEN_CPU_CAPABILITY", ""), known[0])
    return max(processor_level(), most, key=known.index)


@functools.cache
def processor_level() -> str:
    """The best of LEVELS that this processor knows."""
    if platform.machine() in ("x86_64", "AMD64"):
        try:
            flags = set(Path("/proc/cpuinfo").read_text().split())
        except OSError:
            flags = set()
        if {"avx2", "fma", "f16c"} <= flags:
            if not {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags:
                return "avx2"
            return "avx512_bf16" if "avx512_bf16" in flags else "avx512"
    return "plain"


@functools.cache
def load(level: str) -> Any:
    """The operations compiled for one of LEVELS, which this processor must know."""
    path = library_path(level)
    with _building:
        if not path.exists():
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                lock = (path.parent / "lock").open("w")
            except OSError as error:
                raise OSError(
                    f"they cannot be kept in {path.parents[1]} ({error}); name another folder in TORCH_EXTENSIONS_DIR"
                ) from error
            with _locked(lock):
                if not path.exists():
                    _compile(path.stem, [str(_FOLDER / source) for source in _SOURCES], _flags(level), path)
        torch.ops.load_library(str(path))
    return getattr(torch.ops, _namespace(level))


def library_path(level: str) -> Path:
    """Where the operations compiled for one of LEVELS are kept, whether they are there yet or not."""
    digest = hashlib.sha256("\0".join([torch.__version__, platform.machine(), *_flags(level)]).encode())
    for name in (*_SOURCES, *_HEADERS):
        digest.update((_FOLDER / name).read_bytes())
    name = f"{_namespace(level)}_{digest.hexdigest()[:16]}"
    cache = os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions"
    return Path(cache) / name / f"{name}.so"


def compiler() -> str:
    """The name of the C++ compiler, or its path: CXX, or c++."""
    return os.environ.get("CXX", "c++")


def _namespace(level: str) -> str:
    return f"paged_backend_{level}"


def _flags(level: str) -> tuple[str, ...]:
    return (*_FLAGS, *LEVELS[level], f"-DPAGED_LIBRARY={_namespace(level)}")


def _compile(name: str, sources: list[str], flags: tuple[str, ...], path: Path) -> None:
    """Compile aside and move into place, so that a path that exists is a library that is whole."""
    if shutil.which(compiler()) is None:
        raise FileNotFoundError(
            f"{compiler()} is not found; install a C++ compiler, for instance with `apt install g++`"
        )
    # Takes a second to import, and only the first process of a machine needs it.
    from torch.utils import cpp_extension

    with tempfile.TemporaryDirectory(dir=path.parent) as aside, _scripts_on_path(), _quiet(cpp_extension.__name__):
        cpp_extension.load(
            name,
            sources,
            extra_cflags=list(flags),
            extra_ldflags=["-fopenmp"],
            build_directory=aside,
            is_python_module=False,
        )
        os.replace(Path(aside) / path.name, path)


@contextmanager
def _locked(lock: TextIO) -> Iterator[None]:
    """Hold a lock that the system gives back when its holder dies, unlike the file that cpp_extension waits for."""
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _quiet(logger: str) -> Iterator[None]:
    """Let only errors of a logger through, and no warning."""
    log = logging.getLogger(logger)
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(before)


@contextmanager
def _scripts_on_path() -> Iterator[None]:
    """Let cpp_extension find the ninja of this environment, which need not be activated."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join([before, sysconfig.get_path("scripts"), str(Path(sys.executable).parent)])
    try:
        yield
    finally:
        os.environ["PATH"] = before

"""Which implementation of an operation runs: a table from operation and backend name to function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

# What "auto" tries on a device, best first; a name that an operation has no implementation for is passed over.
# ROCm tensors say "cuda" too. "cpu" is the compiled C++ of ops/cpu.
_PREFERENCE: dict[str, tuple[str, ...]] = {"cuda": ("triton", "reference"), "cpu": ("cpu", "reference")}
_FALLBACK = ("reference",)

_implementations: dict[str, dict[str, Callable[..., Any]]] = {}
_available: dict[str, Callable[[], bool]] = {}


def implements(operation: str, backend: str) -> Callable[[Function], Function]:
    """Registers the decorated function as what `backend` runs for `operation`."""

    def register(function: Function) -> Function:
        _implementations.setdefault(operation, {})[backend] = function
        return function

    return register


def available_if(backend: str, predicate: Callable[[], bool]) -> None:
    """Lets "auto" choose `backend` only where `predicate` holds; it is asked every time and should remember."""
    _available[backend] = predicate


def implementations(operation: str) -> tuple[str, ...]:
    """The backend names that `operation` has an implementation for."""
    return tuple(_implementations[operation])


def implementation(operation: str, backend: str, tensor: torch.Tensor) -> Callable[..., Any]:
    """The function that runs `operation` on tensors that live where `tensor` does.

    Raises ValueError for a backend that the operation does not have.
    """
    known = _implementations[operation]
    if backend == "auto":
        for name in _PREFERENCE.get(tensor.device.type, _FALLBACK):
            if name in known and (name not in _available or _available[name]()):
                return known[name]
    if backend not in known:
        raise ValueError(f"{operation} has no backend {backend!r}; use one of {('auto', *known)}")
    return known[backend]

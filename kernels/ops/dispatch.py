"""Which function runs an operation: backends, each a table of functions, and what "auto" chooses among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, eq=False)
class Backend:
    """A name and the functions that run under it, by operation; what is left out runs as with "auto".

    devices: types of the devices on which "auto" takes it; ROCm tensors say "cuda" too.
    unavailable: why it cannot run on a device, None where it can. "auto" asks at every call, so it should remember.
    """

    name: str
    functions: Mapping[str, Callable[..., Any]]
    devices: tuple[str, ...] = ()
    unavailable: Callable[[torch.device], str | None] = lambda device: None


_reference: dict[str, Callable[..., Any]] = {}

AUTO = Backend("auto", {})
REFERENCE = Backend("reference", _reference)

# By name; what "auto" prefers comes first.
_backends: dict[str, Backend] = {}


def reference(operation: str) -> Callable[[Function], Function]:
    """Makes the decorated function the reference of an operation: the oracle, and what runs where nothing else does."""

    def add(function: Function) -> Function:
        _reference[operation] = function
        return function

    return add


def register(backend: Backend) -> None:
    """Lets callers name a backend, and "auto" take it, after those that were registered before."""
    _backends[backend.name] = backend


def backends() -> tuple[Backend, ...]:
    """Every backend that callers may name."""
    return (AUTO, *_backends.values(), REFERENCE)


def implementation(operation: str, backend: str | Backend, tensor: torch.Tensor) -> Callable[..., Any]:
    """The function that runs `operation` on tensors that live where `tensor` does.

    Raises ValueError for the name of a backend that the operation does not have.
    """
    if isinstance(backend, str):
        backend = _named(operation, backend)
    function = backend.functions.get(operation)
    return function or _preferred(operation, tensor.device)


def preferred(device: torch.device) -> Backend:
    """The backend that "auto" takes on a device; on a CPU that may compile the C++ operations first."""
    able = (b for b in _backends.values() if device.type in b.devices and b.unavailable(device) is None)
    return next(able, REFERENCE)


def _named(operation: str, name: str) -> Backend:
    names = [backend.name for backend in backends() if backend is AUTO or operation in backend.functions]
    if name not in names:
        raise ValueError(f"{operation} has no backend {name!r}; use one of {tuple(names)}")
    return next(backend for backend in backends() if backend.name == name)


def _preferred(operation: str, device: torch.device) -> Callable[..., Any]:
    for backend in _backends.values():
        if device.type in backend.devices and operation in backend.functions and backend.unavailable(device) is None:
            return backend.functions[operation]
    return _reference[operation]

"""Attention backends as a config names them: the kernels' own, and what plugins bring, found without a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from paged_backend.checks import describe
from paged_backend.errors import ConfigError, PluginError, UnknownPolicy
from paged_backend.kernels import AUTO, backends, cpu, preferred
from paged_backend.kernels import Backend as Backend

# What each operation of attention is called with, by position.
OPERATIONS = {
    "store_kv": ("key", "value", "cache", "slot_mapping"),
    "prefill_attention": ("query", "cache", "sequences", "variant"),
    "decode_attention": ("query", "cache", "sequences", "variant"),
}


def resolve(name: str, functions: Any = None, offered: Iterable[str] = ()) -> Backend:
    """The backend of this name: one of the kernels' own or, where a plugin offers it, its ``functions`` by operation.

    offered: the names that plugins offer, for the message.

    An operation that the plugin leaves out runs as with ``auto``. The result belongs to whoever asked: two engines may
    have two plugins' backends of one name.

    Raises UnknownPolicy for a name that nobody offers, and PluginError for functions that are no mapping of operations
    to functions, that cannot be called as operations are, or that take the name of the kernels' own.
    """
    own = {backend.name: backend for backend in backends()}
    if functions is None:
        if name not in own:
            known = ", ".join([*own, *offered])
            raise UnknownPolicy(
                f"unknown attention_backend {name!r}; choose one of {known}, or give 'module:attribute'"
            )
        return own[name]
    if name in own:
        raise PluginError(f"attention backend {name!r} is built in; a plugin's needs another name")
    if not isinstance(functions, Mapping) or not functions.keys() <= OPERATIONS.keys():
        raise PluginError(
            f"attention backend {name!r} must map {', '.join(OPERATIONS)} to functions, got {describe(functions)}"
        )
    return Backend(name, {operation: _guarded(name, operation, run) for operation, run in functions.items()})


def check_runs(backend: Backend, devices: Iterable[torch.device]) -> None:
    """Raise ConfigError if ``backend`` cannot run on one of ``devices``."""
    for device in devices:
        if reason := backend.unavailable(device):
            raise ConfigError(
                f"attention_backend={backend.name!r} cannot run where the model is, on {device}: {reason}; give 'auto'"
            )


def what_computes(
    backend: Backend, device: torch.device, dtype: torch.dtype, quantize: str | None
) -> tuple[str, tuple[str, ...]]:
    """What computes under ``backend``, as `EngineStats.kernels` says it, and what would be faster on this machine."""
    if device.type == "cpu" and backend.name in (AUTO.name, cpu.BACKEND.name):
        return cpu.running(), cpu.faster(dtype, quantize)
    return (preferred(device) if backend is AUTO else backend).name, ()


def _guarded(name: str, operation: str, run: Any) -> Callable[..., Any]:
    """A plugin's function whose failures and impossible answers are told as its own, and not as the model's."""
    label = f"{operation} of attention backend {name!r}, {getattr(run, '__qualname__', None) or describe(run)},"
    arguments = OPERATIONS[operation]
    if not callable(run):
        raise PluginError(f"{label} is no function")
    try:
        signature = inspect.signature(run)
    except (TypeError, ValueError):
        signature = None
    if signature is not None:
        try:
            signature.bind(*arguments)
        except TypeError as error:
            raise PluginError(
                f"{label} takes {signature}, and is called with ({', '.join(arguments)}): {error}"
            ) from error

    def guarded(tensor: torch.Tensor, *more: Any) -> Any:
        try:
            result = run(tensor, *more)
        except Exception as error:
            raise PluginError(f"{label} failed with {type(error).__name__}: {error}") from error
        if operation != "store_kv":
            expected = (*tensor.shape[:2], more[0].value_dim)
            if not isinstance(result, torch.Tensor) or result.shape != expected or result.dtype != tensor.dtype:
                got = f"{result.dtype} {tuple(result.shape)}" if isinstance(result, torch.Tensor) else describe(result)
                raise PluginError(f"{label} must return {tensor.dtype} {expected}, got {got}")
        return result

    return guarded

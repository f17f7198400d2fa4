"""Triton where it is installed, and what its kernels need to know about the device they run on."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch


def _import_if_installed(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


triton = _import_if_installed("triton")
tl = _import_if_installed("triton.language")
available = triton is not None

# The interpreter runs kernels on CPU tensors; TRITON_INTERPRET=1 must be set before Triton is first imported.
interpreted = available and bool(triton.knobs.runtime.interpret)

# Processors pretended to by the interpreter, few enough that short contexts are split as long ones are on a GPU.
_INTERPRETED_PROCESSORS = 4


def jit(function: Any) -> Any:
    """triton.jit, or the function as it is where Triton is missing and nothing will launch it."""
    return triton.jit(function) if available else function


@functools.cache
def architecture(device: torch.device) -> str:
    """The name that `tuning` knows a device by: "sm_90", "gfx942", or "interpreter"."""
    if device.type != "cuda":
        return "interpreter"
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@functools.cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors, or compute units, of a device."""
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def converts_float8(name: str) -> bool:
    """Whether Triton converts e4m3 on this architecture; elsewhere the kernels take its bits apart themselves."""
    # gfx942 has the other float8, with another bias; Triton's emulation there takes more registers than ours.
    return name.startswith(("gfx950", "gfx12")) or (name.startswith("sm_") and int(name[3:]) >= 89)


def unavailable(device: torch.device) -> str | None:
    """Why kernels cannot run on a device, or None."""
    if not available:
        return "Triton is not installed"
    if device.type != "cuda" and not interpreted:
        return (
            "it runs on CUDA and ROCm devices; TRITON_INTERPRET=1, set before Python starts, runs its kernels on the "
            "CPU, slowly, for tests"
        )
    return None


def triton_operation(name: str, mutates: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Makes the decorated launcher of an operation a custom op, for torch.compile.

    mutates: names of the tensors written in place. The op raises ValueError where Triton cannot run.
    """

    def register(launch: Callable[..., Any]) -> Any:
        @functools.wraps(launch)
        def checked(*arguments: Any) -> Any:
            device = next(argument.device for argument in arguments if isinstance(argument, torch.Tensor))
            if reason := unavailable(device):
                raise ValueError(f"{name} cannot run in Triton on {device}: {reason}; use backend='auto'")
            with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
                return launch(*arguments)

        return torch.library.custom_op(f"paged_backend::{name}_triton", checked, mutates_args=mutates)

    return register


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not less than a positive number."""
    return 1 << (number - 1).bit_length()

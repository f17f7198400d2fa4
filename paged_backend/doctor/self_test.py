"""The self-test: the operations of the backends that would run here, against the plain-torch reference."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from paged_backend.doctor.backends import device
from paged_backend.doctor.finding import Finding
from paged_backend.doctor.kernel_cases import Case, cases
from paged_backend.kernels import Backend, LayerCache, cpu, preferred
from paged_backend.kernels.cpu import loader
from paged_backend.kernels.dispatch import REFERENCE

Functions = Mapping[str, Callable[..., Any]]

# Absolute and relative, against the reference in float32; kernels/README.md says why these.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
# Half-precision numbers are float32 numbers too, so the oracle rounds nothing.
_EXACT = dict.fromkeys(TOLERANCE, torch.float32)
# Triton compiles each kernel when it is first launched, which the time for testing does not count.
COMPILE_LIMIT_S = 120.0

# What multiplies by a weight is no operation of the dispatch: a backend packs the weight first.
_ORACLES = {**REFERENCE.functions, "linear": F.linear}


def self_test(seconds: float) -> Iterator[Finding]:
    """Try the backend that "auto" takes, and the C++ operations where they are compiled, for so long at most."""
    if seconds <= 0:
        yield Finding("self-test", "note", "left out; give --seconds 5 to try the kernels")
        return
    backends = _backends()
    if not backends:
        yield Finding("self-test", "note", "only the reference runs here, and it has nothing to be compared with")
    for backend, on in backends:
        yield from try_backend(backend, on, seconds / len(backends))


def _backends() -> list[tuple[Backend, torch.device]]:
    """Those to try, each with the device to try it on."""
    backends = [(preferred(device()), device())]
    host = torch.device("cpu")
    if device() != host and loader.library_path(loader.level()).exists() and cpu.is_available():
        backends.append((cpu.BACKEND, host))
    return [(backend, on) for backend, on in backends if backend is not REFERENCE]


def try_backend(backend: Backend, on: torch.device, seconds: float) -> Iterator[Finding]:
    """Yield a finding for each operation of a backend, and one about the time."""
    functions: dict[str, Callable[..., Any]] = dict(backend.functions)
    if backend.name == cpu.BACKEND.name:
        functions["linear"] = lambda x, weight, bias: cpu.pack(weight, bias)(x)
    drawn = [case for case in cases() if case.operation in functions]
    tallies = {operation: Tally() for operation in sorted(functions)}
    clock = _Clock(seconds)
    for case in drawn:
        if clock.is_over:
            break
        if on.type == "cuda":
            # Twice, since the first launch compiles.
            with clock.compiling():
                _outcome(functions, case, on)
        tallies[case.operation].add(case, *_outcome(functions, case, on))
    for operation, tally in tallies.items():
        yield tally.finding(f"{operation} ({backend.name})")
    tried = sum(tally.num_cases for tally in tallies.values())
    words = f"{tried} of {len(drawn)} cases in {clock.seconds:.1f} s"
    if clock.compile_seconds:
        words += f", and {clock.compile_seconds:.1f} s for first launches, which compile"
    if tried < len(drawn):
        words += "; the others were left out for want of time, give more --seconds"
    yield Finding(f"time ({backend.name})", "note" if tried < len(drawn) else "ok", words)


@dataclass
class Tally:
    """What became of an operation's cases."""

    num_cases: int = 0
    worst: dict[torch.dtype, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def add(self, case: Case, errors: dict[torch.dtype, float], failure: str | None) -> None:
        """Count a case with its largest error by dtype, or with what went wrong."""
        self.num_cases += 1
        for dtype, error in errors.items():
            self.worst[dtype] = max(self.worst.get(dtype, 0.0), error)
            if not error <= TOLERANCE.get(dtype, 0):
                failure = f"{_name(dtype)} is {error:.1e} away where {TOLERANCE.get(dtype, 0):g} is allowed"
        if failure is not None:
            self.wrong.append(f"{case.shape}: {failure}")

    def finding(self, name: str) -> Finding:
        """The tally in words."""
        if self.wrong:
            return Finding(name, "problem", f"WRONG in {len(self.wrong)} of {self.num_cases} cases; {self.wrong[0]}")
        if not self.num_cases:
            return Finding(name, "note", "not tried")
        errors = [
            f"{_name(dtype)} {error:.1e} (allowed {TOLERANCE[dtype]:.0e})"
            for dtype, error in self.worst.items()
            if error and dtype in TOLERANCE
        ]
        told = f"largest error: {', '.join(errors)}" if errors else "to the bit"
        return Finding(name, "ok", f"{self.num_cases} cases agree; {told}")


class _Clock:
    """Seconds that pass, those that compile apart."""

    def __init__(self, seconds: float) -> None:
        self._limit = seconds
        self._start = time.monotonic()
        self.compile_seconds = 0.0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start - self.compile_seconds

    @property
    def is_over(self) -> bool:
        return self.seconds >= self._limit or self.compile_seconds >= COMPILE_LIMIT_S

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """What is done within is not counted as testing."""
        start = time.monotonic()
        yield
        self.compile_seconds += time.monotonic() - start


def _outcome(functions: Functions, case: Case, on: torch.device) -> tuple[dict[torch.dtype, float], str | None]:
    """The largest error by dtype, of the result and of what was written in place; and what went wrong, if anything."""
    given = _mapped(case.arguments, lambda tensor: tensor.to(on, copy=True))
    exact = _mapped(case.arguments, lambda tensor: tensor.to(_EXACT.get(tensor.dtype, tensor.dtype), copy=True))
    expected = _ORACLES[case.operation](*exact)
    try:
        actual = _tensors((functions[case.operation](*given), given))
    except Exception as error:
        return {}, f"{type(error).__name__}: {error}"
    wanted = _tensors((expected, exact))
    if [tensor.shape for tensor in actual] != [tensor.shape for tensor in wanted]:
        return {}, "the result has another shape"
    errors: dict[torch.dtype, float] = {}
    for tensor, oracle in zip(actual, wanted, strict=True):
        errors[tensor.dtype] = max(errors.get(tensor.dtype, 0.0), error_of(tensor.cpu(), oracle))
    return errors, None


def error_of(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, as a share of 1 and the expected element; infinity for NaN on one side alone."""
    actual, expected = actual.double(), expected.double()
    error = (actual - expected).abs() / (1 + expected.abs())
    error = torch.where(actual.isnan() & expected.isnan() | (actual == expected), 0.0, error)
    return float(error.nan_to_num(math.inf, math.inf).max()) if error.numel() else 0.0


def _mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The same value with every tensor in it changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, LayerCache):
        parts = (value.key, value.value, value.key_scale, value.value_scale)
        return LayerCache(*(_mapped(part, change) for part in parts))
    if isinstance(value, tuple):
        parts = tuple(_mapped(part, change) for part in value)
        return value._make(parts) if hasattr(value, "_make") else parts
    return value


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _mapped(value, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

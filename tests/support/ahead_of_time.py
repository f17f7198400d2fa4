"""Compiles the Triton kernels that an operation launches for a GPU that need not be present, and reads their usage."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from paged_backend.kernels.triton import support as triton_support

# The first three have tiles of their own, the rest get the defaults.
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx90a": GPUTarget("hip", "gfx90a", 64),
}
# Shared memory that one block, or workgroup, may use.
SHARED_MEMORY = {
    "sm_80": 163 << 10,
    "sm_90": 227 << 10,
    "gfx942": 64 << 10,
    "sm_89": 99 << 10,
    "sm_100": 227 << 10,
    "gfx90a": 64 << 10,
}
PROCESSORS = {"sm_80": 108, "sm_90": 132, "gfx942": 304, "sm_89": 142, "sm_100": 148, "gfx90a": 104}
_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass(frozen=True)
class Compiled:
    """What one compiled kernel takes from its device."""

    name: str
    registers: int
    spilled: int  # bytes of local memory on CUDA, vector registers on ROCm
    shared_memory: int  # bytes


class _AbsentDevice:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, architecture: str) -> None:
        self.architecture = architecture

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self.architecture]

    def get_current_device(self) -> str:
        return self.architecture

    def get_current_stream(self, device: str) -> int:
        return 0


@contextmanager
def pretended(architecture: str) -> Iterator[list[Compiled]]:
    """Makes operations on CPU tensors believe in a GPU: their kernels are compiled for it and listed, not launched."""
    compiled: list[Compiled] = []
    run = JITFunction.run

    def compile_only(kernel: JITFunction, *arguments, grid, warmup, **options):
        binary = run(kernel, *arguments, grid=grid, warmup=True, **options)
        compiled.append(_usage(kernel.__name__, binary))

    facts = {"architecture": lambda device: architecture, "num_processors": lambda device: PROCESSORS[architecture]}
    modules = [module for name, module in sys.modules.items() if name.startswith("paged_backend.kernels.")]
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(JITFunction, "run", compile_only))
        patches.enter_context(mock.patch.object(triton_support, "interpreted", True))
        for name, answer in facts.items():
            for module in modules:
                if hasattr(module, name):
                    patches.enter_context(mock.patch.object(module, name, answer))
        patches.enter_context(mock.patch.object(driver, "_active", _AbsentDevice(architecture)))
        yield compiled


def compile_launches(architecture: str, call: Callable[[], object]) -> list[Compiled]:
    """The kernels that `call` would launch on a GPU of this architecture."""
    with pretended(architecture) as compiled:
        call()
    return compiled


def _usage(name: str, binary) -> Compiled:
    if "cubin" in binary.asm:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(binary.asm["cubin"])
            file.flush()
            text = subprocess.run(
                [_CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
            ).stdout
        registers, stack, local = (int(re.search(rf"{word}:(\d+)", text)[1]) for word in ("REG", "STACK", "LOCAL"))
        return Compiled(name, registers, stack + local, binary.metadata.shared)
    text = binary.asm["amdgcn"]
    # Scalar registers spill into lanes of vector registers, not into memory.
    registers, spilled = (int(re.search(rf"\.{word}:\s*(\d+)", text)[1]) for word in ("vgpr_count", "vgpr_spill_count"))
    return Compiled(name, registers, spilled, binary.metadata.shared)

"""Run the kernel tests on the Triton backend: in a process of its own, where Triton interprets its kernels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paged_backend.kernels.triton import support as triton_support

pytestmark = [
    pytest.mark.triton_interpreter,
    pytest.mark.skipif(not triton_support.available, reason="Triton is not installed"),
    pytest.mark.skipif(triton_support.interpreted, reason="this is the interpreter's process"),
]

ROOT = Path(__file__).parents[2]
# They are about C++ alone, or run no kernel.
LEFT_OUT = (
    "arena",
    "bench_policies",
    "bench_step",
    "bench_streaming",
    "cpu_threads",
    "loader",
    "operations",
    "packed_linear",
    "peers",
    "shapes",
)


@pytest.mark.slow
def test_the_kernels_agree_with_the_oracle_in_the_interpreter():
    left_out = [f"--ignore=tests/kernels/test_{name}.py" for name in LEFT_OUT]
    chosen = ["tests/kernels", *left_out, "-m", "not aot"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    process = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stdout[-5000:] + process.stderr[-2000:]
    # Fewer would mean that they were not found.
    assert int(re.search(r"(\d+) passed", process.stdout)[1]) >= 250

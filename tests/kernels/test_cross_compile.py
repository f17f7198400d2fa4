"""The C++ compiles for processors that this machine does not have, wherever a compiler for them is installed."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from torch.utils import cpp_extension

from paged_backend.kernels.cpu import loader

COMPILERS = {"aarch64": "aarch64-linux-gnu-g++"}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", COMPILERS)
@pytest.mark.parametrize("source", loader._SOURCES)
def test_every_source_compiles_for(architecture, source):
    compiler = COMPILERS[architecture]
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    includes = [word for path in cpp_extension.include_paths() for word in ("-isystem", path)]
    command = [compiler, "-std=c++20", "-fsyntax-only", *loader._flags("plain"), *includes, loader._FOLDER / source]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]

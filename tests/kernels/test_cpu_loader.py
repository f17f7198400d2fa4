"""The C++ library is compiled once, by one process; without a compiler plain torch runs and says what to install."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import torch
from kernel_cases import assert_attention_close, make_case, oracle
from state_cases import check_update, expect_gated_delta, expect_selective, make_gated_delta, make_selective

from paged_backend.kernels import gated_delta_update, selective_state_update
from paged_backend.kernels.cpu import BACKEND, loader, operations, rule_arguments

_ATTEND = """
import warnings
import torch
from paged_backend.kernels import LayerCache, cpu, store_kv

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        key = torch.ones(1, 2, 8)
        cache = torch.zeros(3, 2, 4, 8)
        store_kv(key, key, LayerCache(cache, cache.clone()), torch.tensor([5]))
        assert cache[1, :, 1].eq(1).all() and cache.sum() == 16
print(cpu.is_available())
for warning in caught:
    print(warning.category.__name__, warning.message)
"""


def run_python(source: str, tmp_path, **environment: str) -> str:
    env = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path), **environment}
    run = subprocess.run([sys.executable, "-c", source], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    return run.stdout


def test_without_a_compiler_the_reference_runs_and_one_warning_says_what_to_install(tmp_path):
    lines = run_python(_ATTEND, tmp_path, CXX="no-such-compiler").splitlines()
    assert lines[0] == "False"
    assert len(lines) == 2
    assert lines[1].startswith("UnavailableWarning the C++ operations of paged_backend could not be compiled")
    assert "apt install g++" in lines[1]
    assert "no-such-compiler" in lines[1]


def test_a_folder_that_cannot_hold_the_library_is_named_with_the_way_out(tmp_path):
    (tmp_path / "file").touch()
    output = run_python(_ATTEND, tmp_path, TORCH_EXTENSIONS_DIR=str(tmp_path / "file"))
    assert output.startswith("False\nUnavailableWarning")
    assert f"they cannot be kept in {tmp_path / 'file'}" in output
    assert "TORCH_EXTENSIONS_DIR" in output
    assert "apt install" not in output


def test_a_compiler_that_fails_is_quoted_and_the_reference_runs(tmp_path):
    failing = tmp_path / "failing"
    failing.write_text('#!/bin/sh\ncase "$*" in *" -c "*) echo no joke compiles >&2; exit 1;; esac\nexec c++ "$@"\n')
    failing.chmod(0o755)
    output = run_python(_ATTEND, tmp_path, CXX=str(failing))
    assert output.startswith("False\nUnavailableWarning")
    assert "no joke compiles" in output
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.slow
def test_processes_that_start_at_once_compile_once_and_all_load_it(tmp_path):
    source = "from paged_backend.kernels import cpu; print(cpu.library().store_kv)"
    env = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", source], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    outputs = [process.communicate() for process in processes]
    assert [error for _, error in outputs] == ["", "", ""]
    assert all("paged_backend_" in output for output, _ in outputs)
    libraries = list(tmp_path.rglob("*.so"))
    assert len(libraries) == 1
    # What compiling left aside is gone.
    assert sorted(path.name for path in libraries[0].parent.iterdir()) == sorted([libraries[0].name, "lock"])
    shutil.rmtree(tmp_path)


def test_the_level_is_one_that_can_be_compiled():
    assert loader.level() in loader.LEVELS


def levels_below() -> list[str]:
    known = list(loader.LEVELS)
    return known[known.index(loader.level()) + 1 :]


@pytest.mark.slow
@pytest.mark.parametrize("level", levels_below())
def test_what_older_processors_run_equals_the_oracle_too(monkeypatch, level):
    library = loader.load(level)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for options in ({}, {"window": 20}, {"chunk": 24, "sinks": True}, {"softcap": 3.0, "group": 5}):
            options = {"group": 3, "dtype": dtype, "key_dim": 40, **options}
            decode = make_case([37, 1, 130, 16], **options)
            prefill = make_case([37, 1, 130, 16], [30, 1, 70, 16], **options)
            for operation, case in (("decode_attention", decode), ("prefill_attention", prefill)):
                starts = [] if case is decode else [case.cu_seqlens_q]
                tensors = (case.query, case.key_cache, case.value_cache, case.block_tables, *starts, case.context_lens)
                rule = rule_arguments(case.prefill_arguments[-1])
                assert_attention_close(getattr(library, operation)(*tensors, *rule), oracle(case))
        weight, x = torch.randn(70, 40).to(dtype), torch.randn(27, 40).to(dtype)
        panels = torch.nn.functional.pad(weight, (0, 0, 0, 26)).view(3, 32, 40).transpose(1, 2).contiguous()
        product = library.linear(x, panels, None, None, 70, 0)
        torch.testing.assert_close(product.float(), x.float() @ weight.float().T, atol=0.1, rtol=2e-2)
        assert library.first_argmax(weight).tolist() == weight.argmax(-1).tolist()
        monkeypatch.setattr(operations, "library", lambda: library)
        for dims in ((48, 48), (7, 33)):
            delta, selective = make_gated_delta(dims=dims, dtype=dtype), make_selective(dims=dims, dtype=dtype)
            check_update(
                lambda delta=delta: gated_delta_update(*delta, normalises=True, backend=BACKEND),
                delta,
                expect_gated_delta(delta, True),
                dtype,
            )
            check_update(
                lambda selective=selective: selective_state_update(*selective, softplus=True, backend=BACKEND),
                selective,
                expect_selective(selective, True),
                dtype,
            )

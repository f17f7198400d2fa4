"""The C++ library is compiled once, by one process; without a compiler plain torch runs and says what to install."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from kernel_cases import assert_attention_close, make_case, oracle
from state_cases import check_update, expect_gated_delta, expect_selective, make_gated_delta, make_selective

from paged_backend.kernels import LayerCache, cpu, gated_delta_update, selective_state_update, store_kv
from paged_backend.kernels.cpu import BACKEND, loader, operations, rule_arguments


@pytest.fixture
def nothing_loaded(monkeypatch, tmp_path):
    """As in a process that has not asked for the library yet, on a machine that has never compiled it."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    asked = (loader.load, loader.library, loader.is_available)
    for function in asked:
        function.cache_clear()
    yield
    for function in asked:
        function.cache_clear()


def store_twice(capfd) -> str:
    """Store tokens twice without the library; returns what the first time warns of, besides which nothing is said."""
    key = torch.ones(1, 2, 8)
    cache = torch.zeros(3, 2, 4, 8)
    with pytest.warns(loader.UnavailableWarning) as caught:
        store_kv(key, key, LayerCache(cache, cache.clone()), torch.tensor([5]))
    store_kv(key, key, LayerCache(cache, cache.clone()), torch.tensor([5]))
    assert cache[1, :, 1].eq(1).all()
    assert cache.sum() == 16
    assert not cpu.is_available()
    assert capfd.readouterr() == ("", "")
    (warning,) = caught
    return str(warning.message)


@pytest.mark.usefixtures("nothing_loaded")
def test_without_a_compiler_the_reference_runs_and_one_warning_says_what_to_install(monkeypatch, capfd):
    monkeypatch.setenv("CXX", "no-such-compiler")
    message = store_twice(capfd)
    assert message.startswith("the C++ operations of paged_backend could not be compiled")
    assert "apt install g++" in message
    assert "no-such-compiler" in message


@pytest.mark.usefixtures("nothing_loaded")
def test_a_folder_that_cannot_hold_the_library_is_named_with_the_way_out(monkeypatch, tmp_path, capfd):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    message = store_twice(capfd)
    assert f"they cannot be kept in {tmp_path / 'file'}" in message
    assert "TORCH_EXTENSIONS_DIR" in message
    assert "apt install" not in message


@pytest.mark.usefixtures("nothing_loaded")
def test_a_compiler_that_fails_is_quoted_and_the_reference_runs(monkeypatch, tmp_path, capfd):
    failing = tmp_path / "failing"
    failing.write_text('#!/bin/sh\ncase "$*" in *" -c "*) echo no joke compiles >&2; exit 1;; esac\nexec c++ "$@"\n')
    failing.chmod(0o755)
    monkeypatch.setenv("CXX", str(failing))
    assert "no joke compiles" in store_twice(capfd)
    assert not list(tmp_path.rglob("*.so"))


# In place of a compiler: notes what it is asked for, links once everybody waits for it, to a library that is there.
_LINKER = """#!/bin/sh
out=${{*##* -o }}
out=${{out%% *}}
case "$*" in
*" -c "*) echo "compiles $out" >> {log}; touch "$out";;
*" -shared "*)
    echo "links $out" >> {log}
    while [ $(ls {started} | wc -l) -lt 2 ]; do sleep 0.05; done
    sleep 0.5
    cp {library} "$out";;
*) exec c++ "$@";;
esac
"""
_START = """
import pathlib, sys
from paged_backend.kernels import cpu
pathlib.Path(sys.argv[1]).touch()
print(cpu.library().store_kv)
"""


@pytest.mark.slow
def test_processes_that_start_at_once_compile_once_and_all_load_it(tmp_path):
    loader.library()
    (library,) = (path for path in torch.ops.loaded_libraries if f"paged_backend_{loader.level()}_" in path)
    log, started, compiler, cache = (tmp_path / name for name in ("log", "started", "compiler", "cache"))
    started.mkdir()
    compiler.write_text(_LINKER.format(log=log, started=started, library=library))
    compiler.chmod(0o755)
    env = {**os.environ, "TORCH_EXTENSIONS_DIR": str(cache), "CXX": str(compiler)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _START, str(started / str(index))],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    outputs = [process.communicate() for process in processes]
    assert [error for _, error in outputs] == ["", ""]
    assert all("paged_backend_" in output for output, _ in outputs)
    steps = [line.split()[0] for line in log.read_text().splitlines()]
    assert steps == ["compiles"] * len(loader._SOURCES) + ["links"]
    (loaded,) = cache.rglob("*.so")
    # What compiling left aside is gone.
    assert sorted(path.name for path in loaded.parent.iterdir()) == sorted([loaded.name, "lock"])


def test_the_level_is_one_that_can_be_compiled():
    assert loader.level() in loader.LEVELS


@pytest.mark.parametrize(
    ("allowed", "expected"), [("avx2", "avx2"), ("default", "plain"), ("", "avx512_bf16"), ("no-such", "avx512_bf16")]
)
def test_no_better_level_is_taken_than_torch_may_use(monkeypatch, allowed, expected):
    monkeypatch.setattr(loader, "processor_level", lambda: "avx512_bf16")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", allowed)
    assert loader.level.__wrapped__() == expected


def test_torch_may_use_more_than_an_old_processor_has(monkeypatch):
    monkeypatch.setattr(loader, "processor_level", lambda: "plain")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert loader.level.__wrapped__() == "plain"


def levels_below() -> list[str]:
    known = list(loader.LEVELS)
    return known[known.index(loader.level()) + 1 :]


@pytest.fixture(scope="module")
def attention_cases():
    """What attention operations are called with and what they are to give, for every level the same."""
    cases = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for options in ({}, {"window": 20}, {"chunk": 24, "sinks": True}, {"softcap": 3.0, "group": 5}):
            options = {"group": 3, "dtype": dtype, "key_dim": 40, **options}
            decode = make_case([37, 1, 130, 16], **options)
            prefill = make_case([37, 1, 90, 16], [10, 1, 30, 16], **options)
            for operation, case in (("decode_attention", decode), ("prefill_attention", prefill)):
                starts = [] if case is decode else [case.cu_seqlens_q]
                tensors = (case.query, case.key_cache, case.value_cache, case.block_tables, *starts, case.context_lens)
                cases.append((operation, (*tensors, *rule_arguments(case.prefill_arguments[-1])), oracle(case)))
    return cases


@pytest.mark.slow
@pytest.mark.parametrize("level", levels_below())
def test_what_older_processors_run_equals_the_oracle_too(monkeypatch, level, attention_cases):
    library = loader.load(level)
    for operation, arguments, expected in attention_cases:
        assert_attention_close(getattr(library, operation)(*arguments), expected)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
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

"""What runs on a CPU and what would be faster there is told from the level, the dtype and the environment."""

from __future__ import annotations

import pytest
import torch

from paged_backend.kernels.cpu import advice


@pytest.fixture
def machine(monkeypatch):
    """A function that makes the machine one of this level, whose processor knows that of `best`."""

    def make(level: str, best: str | None = None, compiles: bool = True) -> None:
        monkeypatch.setattr(advice, "level", lambda: level)
        monkeypatch.setattr(advice, "processor_level", lambda: best or level)
        monkeypatch.setattr(advice, "is_available", lambda: compiles)

    return make


def test_without_a_compiler_nothing_else_is_worth_telling(machine):
    machine("avx2", compiles=False)
    assert advice.running() == "plain torch"
    (way,) = advice.faster(torch.bfloat16)
    assert "apt install g++" in way


def test_the_level_that_runs_is_named(machine):
    machine("avx2")
    assert advice.running() == "C++ (avx2)"


@pytest.mark.parametrize(
    ("level", "dtype", "others"),
    [
        ("avx2", torch.bfloat16, "float32"),
        ("avx512", torch.float16, "float32"),
        ("avx512_bf16", torch.float16, "float32 or bfloat16"),
        ("avx512_bf16", torch.bfloat16, None),
        ("avx2", torch.float32, None),
    ],
    ids=str,
)
def test_a_dtype_that_is_widened_for_every_step_is_told(machine, level, dtype, others):
    machine(level)
    told = [way for way in advice.faster(dtype) if way.startswith("dtype ")]
    assert len(told) == (others is not None)
    if others:
        assert told[0].startswith(f"dtype {others} where many requests")
        assert f"{level!r} multiplies no {str(dtype).removeprefix('torch.')}," in told[0]


def test_of_no_dtype_in_particular_every_one_that_is_widened_is_told(machine):
    machine("avx2")
    assert "no bfloat16 or float16" in advice.faster()[0]
    machine("avx512_bf16")
    assert "no float16," in advice.faster()[0]


def test_eight_bits_are_advised_until_there_are_eight_bits(machine):
    machine("avx2")
    assert any("int8" in way for way in advice.faster(torch.float32))
    assert not advice.faster(torch.float32, "int8")


def test_a_level_that_the_environment_forbids_is_told(machine, monkeypatch):
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    machine("avx2", best="avx512")
    assert advice.faster(torch.float32)[0] == (
        "the level 'avx512', which the processor knows: unset ATEN_CPU_CAPABILITY=avx2"
    )

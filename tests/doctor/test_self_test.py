"""The self-test finds what computes something else, and says by how much what is right is off."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paged_backend.doctor import self_test
from paged_backend.doctor.finding import Finding
from paged_backend.doctor.kernel_cases import ROUNDS
from paged_backend.doctor.self_test import error_of, try_backend
from paged_backend.kernels import Backend, cpu
from paged_backend.kernels.dispatch import REFERENCE

CPU = torch.device("cpu")


def tried(seconds: float = 60, **changed: Callable[..., Any]) -> dict[str, Finding]:
    """What is found of the reference with some operations changed, by operation."""
    backend = Backend("stand-in", {**REFERENCE.functions, **changed})
    return {finding.name.removesuffix(" (stand-in)"): finding for finding in try_backend(backend, CPU, seconds)}


def test_the_reference_agrees_with_itself_in_all_cases() -> None:
    found = tried()
    assert {finding.state for finding in found.values()} == {"ok"}
    assert found.keys() == {*REFERENCE.functions, "time"}
    assert found["decode_attention"].words.startswith(f"{len(ROUNDS)} cases agree; largest error: ")


def test_the_compiled_operations_and_their_products_agree() -> None:
    found = [*try_backend(cpu.BACKEND, CPU, 60)]
    assert {finding.state for finding in found} == {"ok"}
    assert "linear (cpu)" in {finding.name for finding in found}


BROKEN: dict[str, Callable[..., Any]] = {
    "store_kv": lambda key, *args: REFERENCE.functions["store_kv"](-key, *args),
    "rms_norm": lambda hidden, *args: REFERENCE.functions["rms_norm"](hidden, *args) * 1.1,
    "first_argmax": lambda scores: scores.nan_to_num().argmax(-1),
}


@pytest.mark.parametrize("operation", BROKEN)
def test_an_operation_that_computes_something_else_is_a_problem_and_the_others_are_none(operation: str) -> None:
    found = tried(**{operation: BROKEN[operation]})
    assert [name for name, finding in found.items() if finding.state == "problem"] == [operation]
    assert found[operation].words.startswith("WRONG in ")
    assert "allowed" in found[operation].words


def test_an_operation_that_raises_is_quoted() -> None:
    def raising(*_: Any) -> None:
        raise RuntimeError("no such instruction")

    words = tried(rms_norm=raising)["rms_norm"].words
    assert f"WRONG in {len(ROUNDS)} of {len(ROUNDS)} cases" in words
    assert "RuntimeError: no such instruction" in words


def test_an_operation_that_returns_nothing_or_another_shape_is_wrong() -> None:
    for result in (None, torch.zeros(3)):
        words = tried(rms_norm=lambda *_, result=result: result)["rms_norm"].words
        assert "the result has another shape" in words


def test_time_that_is_up_leaves_cases_out_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter(range(1000))
    monkeypatch.setattr(self_test.time, "monotonic", lambda: float(next(moments)))
    found = tried(seconds=4)
    assert found["store_kv"].words.startswith("1 cases agree")
    assert found["first_argmax"] == Finding("first_argmax (stand-in)", "note", "not tried")
    assert found["time"].state == "note"
    assert "give more --seconds" in found["time"].words


def test_no_time_leaves_it_out() -> None:
    (finding,) = self_test.self_test(0)
    assert finding.state == "note"


def test_a_machine_with_the_reference_alone_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "preferred", lambda device: REFERENCE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (finding,) = self_test.self_test(1)
    assert finding.state == "note"
    assert "nothing to be compared with" in finding.words


def test_an_error_counts_nan_on_one_side_alone() -> None:
    nan = math.nan
    assert error_of(torch.tensor([1.0, nan]), torch.tensor([1.0, nan])) == 0
    assert error_of(torch.tensor([1.0, nan]), torch.tensor([1.0, 2.0])) == math.inf
    assert error_of(torch.tensor([1.0, 2.0]), torch.tensor([1.0, nan])) == math.inf
    assert error_of(torch.tensor([3.5, 0.0]), torch.tensor([3.0, 0.25])) == 0.2
    assert error_of(torch.tensor([math.inf]), torch.tensor([math.inf])) == 0

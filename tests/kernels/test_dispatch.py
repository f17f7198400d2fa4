"""Backends: which function runs an operation, by name, by value and with "auto"."""

from __future__ import annotations

import pytest
import torch

from paged_backend.kernels import AUTO, Backend, dispatch

CPU = torch.zeros(())


def one(*_):
    return 1


def two(*_):
    return 2


@pytest.fixture
def registered(monkeypatch):
    """Two backends for the CPU, the first of which cannot run there, and the reference of one more operation."""
    monkeypatch.setattr(dispatch, "_backends", {})
    broken = Backend("broken", {"add": one}, ("cpu",), lambda device: f"no {device}")
    for backend in (broken, Backend("works", {"add": two}, ("cpu",)), Backend("elsewhere", {"add": one}, ("cuda",))):
        dispatch.register(backend)
    monkeypatch.setitem(dispatch.REFERENCE.functions, "add", one)
    monkeypatch.setitem(dispatch.REFERENCE.functions, "subtract", one)


@pytest.mark.usefixtures("registered")
def test_auto_takes_the_first_that_can_run_there_and_else_the_reference():
    for auto in ("auto", AUTO):
        assert dispatch.implementation("add", auto, CPU) is two
        assert dispatch.implementation("subtract", auto, CPU) is one


@pytest.mark.usefixtures("registered")
def test_a_name_runs_its_own_function():
    assert dispatch.implementation("add", "broken", CPU) is one
    assert [backend.name for backend in dispatch.backends()] == ["auto", "broken", "works", "elsewhere", "reference"]


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("name", ["works", "mine"])
def test_the_name_of_a_backend_without_the_operation_is_refused_with_those_that_have_it(name):
    with pytest.raises(ValueError, match=rf"subtract has no backend '{name}'; use one of \('auto', 'reference'\)"):
        dispatch.implementation("subtract", name, CPU)


@pytest.mark.usefixtures("registered")
def test_a_backend_that_nobody_registered_runs_its_own_functions_and_the_rest_as_auto():
    mine = Backend("mine", {"add": one})
    assert dispatch.implementation("add", mine, CPU) is one
    assert dispatch.implementation("subtract", mine, CPU) is one
    assert dispatch.implementation("add", Backend("other", {}), CPU) is two


@pytest.mark.usefixtures("registered")
def test_what_auto_prefers_is_the_first_that_can_run_there():
    assert dispatch.preferred(torch.device("cpu")).name == "works"
    assert dispatch.preferred(torch.device("cuda")).name == "elsewhere"
    assert dispatch.preferred(torch.device("meta")) is dispatch.REFERENCE

"""Choose the backend that the kernel tests run, and let no test pass on memory that a kernel never wrote."""

from __future__ import annotations

import pytest
import torch

from paged_backend.kernels.triton import support as triton_support

# The same tests hold every backend to the oracle: Triton's in a process of its own, see test_interpreter.py.
BACKENDS = ["triton"] if triton_support.interpreted else ["reference", "cpu"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """A backend that runs on this process's tensors."""
    return request.param


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what `torch.empty` and `new_empty` return with NaN."""

    def poisoned(allocate):
        def filled(*arguments, **options):
            tensor = allocate(*arguments, **options)
            return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

        return filled

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))

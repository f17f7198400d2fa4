"""silu_mul and gelu_mul against torch's activation followed by a product."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import TOLERANCE

from paged_backend.kernels import gelu_mul, silu_mul

pytestmark = pytest.mark.usefixtures("poisoned_memory")

ACTIVATIONS = {
    "silu": (lambda gate, up, backend: silu_mul(gate, up, backend=backend), F.silu),
    "gelu": (lambda gate, up, backend: gelu_mul(gate, up, backend=backend), F.gelu),
    "gelu_tanh": (
        lambda gate, up, backend: gelu_mul(gate, up, approximate="tanh", backend=backend),
        lambda gate: F.gelu(gate, approximate="tanh"),
    ),
}


def make(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(shape[-1])
    # Wide enough to reach where the activations are flat.
    gate = torch.randn(*shape, generator=generator) * 10
    return gate.to(dtype), torch.randn(*shape, generator=generator).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [1, 63, 1025])
def test_the_product_equals_torchs(backend, name, dtype, dim):
    gate, up = make(2, 3, dim, dtype=dtype)
    run, activation = ACTIVATIONS[name]
    assert_close(run(gate, up, backend), activation(gate) * up)


def test_the_two_gelus_are_told_apart(backend):
    gate, up = make(4, 64)
    with pytest.raises(AssertionError):
        assert_close(gelu_mul(gate / 10, up, backend=backend), F.gelu(gate / 10, approximate="tanh") * up)


def test_halves_of_one_projection_are_read_in_place(backend):
    gate, up = make(5, 40)
    merged = torch.cat((gate, up), -1)
    assert_close(silu_mul(merged[:, :40], merged[:, 40:], backend=backend), F.silu(gate) * up)


def test_unlike_halves_and_unknown_approximations_are_refused():
    gate, up = make(5, 40)
    with pytest.raises(ValueError, match="must be alike"):
        silu_mul(gate, up[:, :39])
    with pytest.raises(ValueError, match="'none' or 'tanh', got 'erf'"):
        gelu_mul(gate, up, approximate="erf")

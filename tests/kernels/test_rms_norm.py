"""rms_norm and add_rms_norm against transformers' own modules and plain float32 arithmetic."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import TOLERANCE
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from paged_backend.kernels import add_rms_norm, rms_norm

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def make(*shape: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(shape[-1])
    return (torch.randn(*shape, generator=generator) * 3).to(dtype), torch.rand(shape[-1], generator=generator).to(
        dtype
    )


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [1, 63, 64, 576, 1025])
def test_the_norm_equals_llamas(backend, dim, dtype):
    hidden, weight = make(1, 5, dim, dtype=dtype)
    module = LlamaRMSNorm(dim, eps=1e-5).to(dtype)
    module.weight.data = weight
    assert_close(rms_norm(hidden, weight, eps=1e-5, backend=backend), module(hidden).detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_with_unit_offset_the_norm_equals_gemmas(backend, dtype):
    hidden, weight = make(7, 96, dtype=dtype)
    module = GemmaRMSNorm(96, eps=1e-6).to(dtype)
    module.weight.data = weight
    assert_close(rms_norm(hidden, weight, eps=1e-6, unit_offset=True, backend=backend), module(hidden).detach())
    with pytest.raises(AssertionError):
        assert_close(rms_norm(hidden, weight, eps=1e-6, backend=backend), module(hidden).detach())


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_residual_is_added_first_and_the_sum_returned(backend, dtype, unit_offset):
    hidden, weight = make(3, 2, 80, dtype=dtype)
    residual = hidden.flip(0)
    normed, total = add_rms_norm(hidden, residual, weight, eps=1e-6, unit_offset=unit_offset, backend=backend)
    assert total.equal(hidden + residual)
    assert_close(normed, rms_norm(total, weight, eps=1e-6, unit_offset=unit_offset, backend=backend))


def test_rows_may_be_slices_of_wider_ones(backend):
    hidden, weight = make(4, 64, dtype=torch.float32)
    wide = torch.cat((torch.full_like(hidden, torch.nan), hidden), -1)
    assert_close(
        rms_norm(wide[:, 64:], weight, eps=1e-6, backend=backend), rms_norm(hidden, weight, eps=1e-6, backend=backend)
    )


def test_a_float32_weight_promotes_half_precision_rows_as_in_transformers(backend):
    hidden, weight = make(4, 64, dtype=torch.float16)
    module = LlamaRMSNorm(64, eps=1e-5)
    module.weight.data = weight.float()
    normed = rms_norm(hidden, weight.float(), eps=1e-5, backend=backend)
    assert normed.dtype == torch.float32
    # The row was rounded to float16 on the way.
    torch.testing.assert_close(normed, module(hidden).detach(), atol=4e-3, rtol=4e-3)


def test_no_rows_give_no_rows(backend):
    assert rms_norm(torch.empty(0, 8), torch.ones(8), eps=1e-6, backend=backend).shape == (0, 8)


def test_weights_and_residuals_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"weight must be \(8,\).*got \(7,\)"):
        rms_norm(torch.zeros(2, 8), torch.ones(7), eps=1e-6)
    with pytest.raises(ValueError, match=r"residual must be torch\.float32"):
        add_rms_norm(torch.zeros(2, 8), torch.zeros(2, 8, dtype=torch.float16), torch.ones(8), eps=1e-6)

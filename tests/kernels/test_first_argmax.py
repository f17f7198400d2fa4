"""The greedy token of a row is torch.argmax's, its first maximum, in every dtype and backend."""

from __future__ import annotations

import math

import pytest
import torch

from paged_backend.kernels import cpu, first_argmax

BACKENDS = ["reference", pytest.param("cpu", marks=pytest.mark.skipif(not cpu.is_available(), reason="no compiler"))]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 15, 16, 17, 31, 100, 256, 1000, 4099])
def test_the_first_of_equal_maxima_is_the_one(size, dtype, backend):
    # Few distinct values, so that most rows have several maxima.
    scores = torch.randint(-4, 5, (40, size)).to(dtype) / 4
    expected = [row.index(max(row)) for row in scores.tolist()]
    assert first_argmax(scores, backend=backend).tolist() == expected


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", [0, 20, 1000, 1020])
def test_a_row_with_nan_of_either_sign_or_nothing_above_minus_infinity_has_no_maximum(place, dtype, backend):
    scores = torch.full((5, 1021), -math.inf, dtype=dtype)
    scores[0, place] = math.nan
    scores[1] = torch.randn(1021).to(dtype)
    scores[1, place] = -torch.tensor(math.nan)
    scores[3, place] = -1000
    scores[4, place] = math.inf
    assert first_argmax(scores, backend=backend).tolist() == [-1, -1, -1, place, place]


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_a_larger_matrix_are_taken_as_they_lie(backend):
    scores = torch.randn(6, 300)[:, ::2]
    assert first_argmax(scores, backend=backend).tolist() == scores.argmax(-1).tolist()


def test_an_unknown_backend_is_refused_by_name():
    with pytest.raises(ValueError, match="first_argmax has no backend 'gpu'"):
        first_argmax(torch.zeros(1, 3), backend="gpu")

"""Cells come back as what they were before Arrow, pandas and numpy had them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paged_backend.integrations.ray.cells import is_missing, objects, plain


@pytest.mark.parametrize("cell", [None, math.nan, np.float64("nan"), np.float32("nan").item()])
def test_none_and_nan_are_missing(cell: object) -> None:
    assert is_missing(cell)


@pytest.mark.parametrize("cell", ["", 0, 0.0, [], np.array([])])
def test_what_is_empty_is_not_missing(cell: object) -> None:
    assert not is_missing(cell)


def test_arrays_and_numpys_scalars_become_pythons_at_any_depth() -> None:
    part = {"tokens": np.array([1, 2]), "n": np.int64(3)}
    assert plain(np.array([part, None], dtype=object)) == [{"tokens": [1, 2], "n": 3}, None]
    assert type(plain({"n": np.int64(3)})["n"]) is int


def test_keys_that_arrow_added_for_other_rows_are_gone() -> None:
    assert plain({"role": "user", "tool_calls": None, "score": math.nan, "inner": {"a": None}}) == {
        "role": "user",
        "inner": {},
    }


def test_lists_of_one_length_stay_lists_in_a_column() -> None:
    column = objects([[1, 2], [3, 4]])
    assert column.shape == (2,)
    assert column[1] == [3, 4]

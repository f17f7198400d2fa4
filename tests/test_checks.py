"""Values that callers give: what is let through, and what an error says of the rest."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from paged_backend.checks import (
    MAX_REPR,
    as_number,
    checked_amount,
    checked_flag,
    checked_int,
    checked_number,
    describe,
)
from paged_backend.errors import ConfigError


def short(value: object) -> str:
    return describe(value)[:9]


class Unprintable:
    """Fails to say what it is."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __repr__(self) -> str:
        raise self.error


@pytest.mark.parametrize("value", ["no", 1, 0, None])
def test_a_flag_is_a_bool_and_nothing_that_is_only_true_or_false_in_an_if(value: Any):
    assert checked_flag("x", True) is True
    with pytest.raises(ConfigError, match=f"^x must be True or False, got {value!r}$"):
        checked_flag("x", value)


def test_whole_numbers_of_any_kind_become_ints():
    number = checked_int("x", np.int64(3), 0)
    assert (number, type(number)) == (3, int)
    assert [checked_int("x", value, 2, 4) for value in (2, 4)] == [2, 4]


@pytest.mark.parametrize("value", [1, 5, 3.0, "3", True, None])
def test_an_int_of_another_kind_or_out_of_range_is_told_the_range(value: Any):
    with pytest.raises(ConfigError, match=f"^x must be an int from 2 to 4, got {value!r}$"):
        checked_int("x", value, 2, 4)


def test_an_int_without_a_largest_value_is_told_the_least():
    assert checked_int("x", 10**30, 2) == 10**30
    with pytest.raises(ConfigError, match=r"^x must be an int of at least 2, got 1$"):
        checked_int("x", 1, 2)


def test_real_numbers_of_any_kind_become_floats():
    assert checked_number("x", Fraction(1, 2), 0, 1) == 0.5
    assert [type(checked_number("x", value, 0, 1)) for value in (0, 1, np.float32(0.5))] == [float] * 3


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, math.inf, 10**400, "0.5", False, 1j], ids=short)
def test_a_number_of_another_kind_or_out_of_range_is_told_the_range(value: Any):
    with pytest.raises(ConfigError, match=r"^x must be a number from 0 to 1, got "):
        checked_number("x", value, 0, 1)


@pytest.mark.parametrize("value", [-1, math.inf, math.nan, 10**400, "1", True], ids=short)
def test_an_amount_is_finite_and_not_negative(value: Any):
    assert checked_amount("x", 0) == 0.0
    with pytest.raises(ConfigError, match=r"^x must be a finite number of at least 0, got "):
        checked_amount("x", value)


def test_a_positive_amount_is_not_zero():
    assert checked_amount("x", 1e-300, positive=True) == 1e-300
    with pytest.raises(ConfigError, match=r"^x must be a finite number above 0, got 0$"):
        checked_amount("x", 0, positive=True)


def test_what_is_no_number_is_nan_and_what_is_too_large_is_infinite():
    assert math.isnan(as_number("1"))
    assert math.isnan(as_number(True))
    assert as_number(10**400) == math.inf


def test_a_long_value_is_described_by_its_beginning():
    assert describe("x" * (MAX_REPR - 2)) == "'" + "x" * (MAX_REPR - 2) + "'"
    assert describe("x" * MAX_REPR) == "'" + "x" * (MAX_REPR - 1) + "..."


@pytest.mark.parametrize("error", [ZeroDivisionError(), SystemExit()])
def test_a_value_that_cannot_be_printed_is_described_by_its_class(error: BaseException):
    assert "Unprintable object at 0x" in describe(Unprintable(error))


def test_ctrl_c_while_a_value_is_described_is_passed_on():
    with pytest.raises(KeyboardInterrupt):
        describe(Unprintable(KeyboardInterrupt()))

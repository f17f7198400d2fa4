"""What values that callers give may be; each error names the value's name, the value and what is allowed."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

from paged_backend.errors import ConfigError

MAX_REPR = 200


def checked_flag(name: str, value: Any) -> bool:
    """The value, which must be True or False: of a text such as "no" nobody could tell. Raises ConfigError."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, got {describe(value)}")
    return value


def checked_int(name: str, value: Any, least: int, most: int | None = None) -> int:
    """The value, which must be a whole number from ``least`` to ``most``. Raises ConfigError."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or int(value) < least or (most is not None and int(value) > most):
        allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigError(f"{name} must be an int {allowed}, got {describe(value)}")
    return int(value)


def checked_number(name: str, value: Any, least: float, most: float) -> float:
    """The value, which must be a number from ``least`` to ``most``. Raises ConfigError."""
    number = as_number(value)
    if not least <= number <= most:
        raise ConfigError(f"{name} must be a number from {least:g} to {most:g}, got {describe(value)}")
    return number


def checked_amount(name: str, value: Any, *, positive: bool = False) -> float:
    """The value, which must be a finite number of at least 0, or above it. Raises ConfigError."""
    number = as_number(value)
    if not (number > 0 if positive else number >= 0) or number == math.inf:
        allowed = "above 0" if positive else "of at least 0"
        raise ConfigError(f"{name} must be a finite number {allowed}, got {describe(value)}")
    return number


def as_number(value: Any) -> float:
    """The value as a float; NaN, which is in no range, for what is no number, and infinity for what is too large."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def describe(value: object) -> str:
    """``repr`` for messages: short, and of anything."""
    try:
        text = repr(value)
    except KeyboardInterrupt:
        raise
    except BaseException:
        text = object.__repr__(value)
    return text if len(text) <= MAX_REPR else f"{text[:MAX_REPR]}..."

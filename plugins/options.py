"""What the options of policies may be; each error names the option, its value and what is allowed."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

from paged_backend.errors import ConfigError


def checked_flag(name: str, value: Any) -> bool:
    """The value, which must be True or False: of a text such as "no" nobody could tell."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, got {value!r:.200}")
    return value


def checked_count(name: str, value: Any, least: int) -> int:
    """The value, which must be a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise ConfigError(f"{name} must be an int of at least {least}, got {value!r:.200}")
    return int(value)


def checked_number(name: str, value: Any, least: float, most: float) -> float:
    """The value, which must be a number from ``least`` to ``most``."""
    number = _number(value)
    if not least <= number <= most:
        raise ConfigError(f"{name} must be a number from {least:g} to {most:g}, got {value!r:.200}")
    return number


def checked_amount(name: str, value: Any, *, positive: bool = False) -> float:
    """The value, which must be a finite number of at least 0, or above it."""
    number = _number(value)
    if not (number > 0 if positive else number >= 0) or number == math.inf:
        allowed = "above 0" if positive else "of at least 0"
        raise ConfigError(f"{name} must be a finite number {allowed}, got {value!r:.200}")
    return number


def _number(value: Any) -> float:
    """NaN, which is in no range, for what is no number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf

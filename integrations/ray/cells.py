"""The values of a batch's cells as plain Python, whatever Arrow, pandas and numpy made of them on their way."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np


def is_missing(cell: Any) -> bool:
    """Whether a cell holds nothing: None, or the NaN that pandas and numpy write for it."""
    return cell is None or (isinstance(cell, float) and math.isnan(cell))


def plain(cell: Any) -> Any:
    """Arrays as lists, numpy's scalars as Python's, and mappings without the keys that hold nothing.

    All mappings of an Arrow column have the keys that any of them has.
    """
    if isinstance(cell, (np.ndarray, np.generic)):
        return plain(cell.tolist())
    if isinstance(cell, Mapping):
        return {key: plain(value) for key, value in cell.items() if not is_missing(value)}
    if isinstance(cell, (list, tuple)):
        return [plain(value) for value in cell]
    return cell


def objects(values: list[Any]) -> np.ndarray[Any, Any]:
    """A column of any values, [len(values)], which numpy would make two-dimensional of lists of equal length."""
    column = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        column[index] = value
    return column

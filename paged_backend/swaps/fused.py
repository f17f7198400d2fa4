"""Fused: the base of the modules that compute in C++ what modules of transformers compute."""

from __future__ import annotations

import math
from typing import Any

from torch import nn


class Fused(nn.Module):
    """Stands in for ``original``, whose attributes it still answers for and which runs where C++ would be slower.

    most_rows: tokens up to which C++ is faster. num_bytes: of packed weights held beside the original ones.
    """

    most_rows: float = math.inf
    num_bytes = 0

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original = original

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("original"), name)

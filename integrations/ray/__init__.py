"""Ray Data over the paged engine: PagedPredictor answers the rows of a dataset, one engine an actor."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paged_backend.integrations.ray.predictor import PagedPredictor as PagedPredictor

__all__ = ["PagedPredictor"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        importlib.import_module("ray.data")
    except ImportError as error:
        raise ImportError(
            f"{__name__}.{name} needs Ray Data ({error}): pip install 'paged-backend[ray]'", name="ray"
        ) from error
    return getattr(importlib.import_module("paged_backend.integrations.ray.predictor"), name)

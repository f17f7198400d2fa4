"""ModelLoader: serves the model as it is now, and notices when it has become another."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

from paged_backend.engine.served_model import ServedModel

logger = logging.getLogger("paged_backend")


class ModelLoader:
    """Loads a model, again when it changed; does not keep it alive.

    serve: what makes a model one that can be served. served: what runs now.
    """

    def __init__(self, model: Any, serve: Callable[[Any], ServedModel]) -> None:
        self._model = weakref.ref(model)
        self._serve = serve
        # Why it has to be loaded before anything else is computed, from a reload that failed.
        self._pending: str | None = None
        self.served = serve(model)
        self.served.make_cache()

    def stale_reason(self, *, at_a_glance: bool) -> str | None:
        """Why the model has to be loaded again, or None; ``at_a_glance`` as the twin takes it."""
        return self._pending or self.served.twin.stale_reason(at_a_glance=at_a_glance)

    def reload(self, reason: str) -> None:
        """Serve the model as it is now, with an empty cache and the same prefixes pinned.

        When that raises, it has to be tried again before anything runs.
        """
        logger.info("loading the model again: %s", reason)
        self._pending = reason
        model = self._model()
        # A model that is gone can have changed no more, but its twin may have lost its cache.
        served = self.served if model is None else self._serve(model)
        pinned = list(self.served.blocks.pins)
        # The old cache goes first, since there may be no memory for both.
        served.make_cache(self.served.drop_cache())
        served.blocks.pins.take_over(pinned)
        self.served = served
        self._pending = None

"""ModelLoader: serves the model as it is now, and notices when it has become another."""

from __future__ import annotations

import logging
import weakref
from typing import Any

from paged_backend.config import EngineConfig
from paged_backend.plugin_manager import PluginManager
from paged_backend.policy_errors import PolicyErrors
from paged_backend.served_model import ServedModel

logger = logging.getLogger("paged_backend")


class ModelLoader:
    """Loads a model for an engine, again whenever it changed; does not keep it alive.

    served: what runs now. stale_reason: why it has to be loaded again before anything else is computed, or None.
    """

    def __init__(
        self, model: Any, config: EngineConfig, plugins: PluginManager, policy_errors: PolicyErrors, *, elastic: bool
    ) -> None:
        self._model = weakref.ref(model)
        self._config = config
        self._plugins = plugins
        self._policy_errors = policy_errors
        self.elastic = elastic and config.kv_cache_memory is None
        self.stale_reason: str | None = None
        self.served = self._load(model)
        self.served.make_cache()

    def look(self) -> None:
        """Compare the model with what it was when it was loaded."""
        if self.stale_reason is None:
            self.stale_reason = self.served.twin.stale_reason()

    def reload(self) -> None:
        """Serve the model as it is now, with an empty cache; the owner clears ``stale_reason`` when it has taken over.

        Raises what kept it from being loaded; what was served may have lost its cache then, and nothing may run before
        another ``reload`` succeeds.
        """
        model = self._model()
        if model is not None:
            logger.info("loading the model again: %s", self.stale_reason)
            served = self._load(model)
            # First, since there may be no memory for both.
            served.make_cache(self.served.drop_cache())
            self.served = served

    def _load(self, model: Any) -> ServedModel:
        return ServedModel(model, self._config, self._plugins, self._policy_errors, elastic=self.elastic)

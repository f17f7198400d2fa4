"""ModelLoader: serves the model as it is now, and notices when it has become another."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

from paged_backend.config import EngineConfig
from paged_backend.engine.request_table import RequestTable
from paged_backend.engine.scheduler import Scheduler
from paged_backend.engine.served_model import ServedModel
from paged_backend.memory.pins import PrefixPins
from paged_backend.policy.plugin_manager import PluginManager
from paged_backend.policy.policy_errors import PolicyErrors

logger = logging.getLogger("paged_backend")


class ModelLoader:
    """Loads a model for an engine, again whenever it changed; does not keep it alive.

    served: what runs now. stale_reason: why it has to be loaded again before anything else is computed, or None.
    """

    _scheduler: Scheduler
    _requests: RequestTable
    _pins: PrefixPins

    def __init__(
        self,
        model: Any,
        config: EngineConfig,
        plugins: PluginManager,
        policy_errors: PolicyErrors,
        clock: Callable[[], float],
        *,
        elastic: bool,
    ) -> None:
        self._model = weakref.ref(model)
        self._clock = clock
        self._config = config
        self._plugins = plugins
        self._policy_errors = policy_errors
        self.elastic = elastic and config.kv_cache_memory is None
        self.stale_reason: str | None = None
        self.served = self._load(model)
        self.served.make_cache()

    def keep_in_step(self, scheduler: Scheduler, requests: RequestTable, pins: PrefixPins) -> None:
        """Name those that work with what is served, so that a reload can bring them along."""
        self._scheduler, self._requests, self._pins = scheduler, requests, pins

    def refresh(self) -> None:
        """Before anything is computed: look at the model, at a glance while requests run; load a changed one again."""
        if self.stale_reason is None:
            self.stale_reason = self.served.twin.stale_reason(at_a_glance=self._scheduler.has_work())
        if self.stale_reason is not None:
            self.reload(self.stale_reason)

    def reload(self, reason: str) -> None:
        """Serve the model as it is now; the requests compute everything again.

        When that fails they end with ``"error"`` and the cause, which is raised, and nothing runs before it succeeds.
        """
        self.stale_reason = reason
        logger.info("loading the model again: %s", reason)
        self._scheduler.restart(self._clock())
        model = self._model()
        try:
            # A model that is gone can have changed no more, but its twin may have lost its cache.
            served = self.served if model is None else self._load(model)
            # The old cache goes first, since there may be no memory for both.
            served.make_cache(self.served.drop_cache())
        except Exception as error:
            for request in self._requests:
                self._requests.fail(request, error)
            raise
        self.served = served
        self._scheduler.blocks = served.blocks
        self._pins.renew(served.blocks)
        self.stale_reason = None

    def _load(self, model: Any) -> ServedModel:
        return ServedModel(model, self._config, self._plugins, self._policy_errors, elastic=self.elastic)

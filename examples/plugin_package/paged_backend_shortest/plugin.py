"""What paged_backend finds through the entry point: two policies by name, and a listener."""

from __future__ import annotations

import logging
import os

from paged_backend_shortest.policies import ByClass, ShortestPredicted

from paged_backend import hookimpl

# The version of the hooks that this was written for; another one is refused in words.
HOOK_API_VERSION = 2

logger = logging.getLogger(__name__)
SLOW_S = float(os.environ.get("PAGED_BACKEND_SLOW_REQUEST_S", "30"))


@hookimpl
def register_schedulers(register) -> None:
    """scheduler="shortest_predicted"."""
    register("shortest_predicted", ShortestPredicted)


@hookimpl
def register_evictions(register) -> None:
    """eviction="by_class"."""
    register("by_class", ByClass)


@hookimpl
def request_finished(request, output) -> None:
    """Say which requests took long."""
    seconds = output.metrics.finished_time - request.arrival_time
    if seconds > SLOW_S:
        logger.warning("request %s took %.1f s, %d tokens", request.request_id, seconds, request.num_output_tokens)

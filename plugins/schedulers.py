"""The built-in scheduling policies; each is imported when it is chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paged_backend.hookspecs import hookimpl


@hookimpl
def register_schedulers(register: Callable[[str, Any], None]) -> None:
    """Offer the policies of this folder."""
    register("fifo", "paged_backend.plugins.fifo:Fifo")
    register("starvation_aware", "paged_backend.plugins.starvation_aware:StarvationAware")
    register("deadline", "paged_backend.plugins.deadline:Deadline")
    register("priority", "paged_backend.plugins.priority:Priority")
    register("fair", "paged_backend.plugins.fair:Fair")
    register("static", "paged_backend.plugins.batches:Static")
    register("window", "paged_backend.plugins.batches:Window")

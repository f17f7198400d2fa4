"""The built-in scheduling policies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paged_backend.hookspecs import hookimpl
from paged_backend.policies import KeyedPolicy, RequestView


class Fifo(KeyedPolicy):
    """First come, first served.

    Guarantee: a request never starts before one that arrived earlier and still waits. A preempted request goes before
    all later arrivals. A large request at the head blocks the rest until it fits, so nothing is ever overtaken.
    """

    lookahead = 0

    def key(self, request: RequestView) -> int:
        return request.order


@hookimpl
def register_schedulers(register: Callable[[str, Any], None]) -> None:
    """Offer the policies of this module."""
    register("fifo", Fifo)

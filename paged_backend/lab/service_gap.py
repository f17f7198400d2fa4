"""ServiceGap: how far apart clients come that all have requests waiting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import numpy as np

# Beyond this many clients only those with the most requests are compared.
MAX_CLIENTS = 16
# What a token counts, as in the plugin ``fair`` and in VTC (arXiv:2401.00588).
PROMPT_COST, OUTPUT_COST = 1.0, 2.0


class ServiceGap:
    """Of two clients, each of which has requests waiting all the while, how much more service one got than the other.

    Service is a prompt's tokens when it begins for the first time, and twice the tokens generated.
    """

    def __init__(self, requests_of: Counter[str]) -> None:
        self._places = {client: place for place, (client, _) in enumerate(requests_of.most_common(MAX_CLIENTS))}
        size = len(self._places)
        self._service = np.zeros(size)
        self._waiting = [0] * size
        self._together = np.zeros((size, size), bool)
        self._lead = np.zeros((size, size))
        self._behind = np.zeros((size, size))
        self.largest = 0.0

    def waits(self, client: str | None, count: int = 1) -> None:
        """So many requests more of this client wait."""
        place = self._places.get(client or "")
        if place is not None:
            self._waiting[place] += count

    def serve(self, client: str | None, amount: float) -> None:
        """This client got that much."""
        place = self._places.get(client or "")
        if place is not None:
            self._service[place] += amount

    def look(self) -> None:
        """A step is over."""
        if len(self._places) < 2:
            return
        waiting = np.array(self._waiting) > 0
        together = waiting[:, None] & waiting
        apart = self._service[:, None] - self._service
        began = together & ~self._together
        self._lead = np.where(began, apart, np.maximum(self._lead, apart))
        self._behind = np.where(began, apart, np.minimum(self._behind, apart))
        self._together = together
        gap = np.where(together, self._lead - self._behind, 0.0).max()
        self.largest = max(self.largest, float(gap))


def clients_of(clients: Collection[str | None]) -> Counter[str]:
    """How many requests each client has, those without a client as one of no name."""
    return Counter(client or "" for client in clients)

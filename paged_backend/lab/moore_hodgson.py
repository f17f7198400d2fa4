"""Moore and Hodgson's rule: the most jobs that a machine can do in time."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def most_in_time(jobs: Sequence[tuple[float, float]], now: float = 0.0) -> list[int]:
    """Which jobs to do, by their places in ``jobs``, the earliest due first, so that as many as can be are in time.

    jobs: when each is due, and the seconds of work in it. The machine does one after the other from ``now`` on; all are
    there by then. In order of due dates each is taken in; when one would be late, the longest taken so far is left out.
    No other choice makes more of them (Moore, Management Science 15, 1968). O(n log n).
    """
    end = now
    # The longest work first; of equals the later one.
    taken: list[tuple[float, int]] = []
    for place in sorted(range(len(jobs)), key=lambda place: jobs[place][0]):
        due, work = jobs[place]
        heapq.heappush(taken, (-work, -place))
        end += work
        if end > due:
            end += heapq.heappop(taken)[0]
    return sorted((-place for _, place in taken), key=lambda place: jobs[place][0])

"""PolicyGuard: asks a scheduling policy, checks every answer, and stays right whatever the policy does."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from paged_backend.policies import SchedulingPolicy
from paged_backend.request import Request


class PolicyGuard:
    """Holds the waiting requests itself; the policy's answers are advice.

    An exception or an impossible answer is reported through ``on_error(policy, method, error)`` and the built-in rule
    (first come, first served; the newest is the victim) takes over for that question.
    """

    def __init__(self, policy: SchedulingPolicy, on_error: Callable[[object, str, BaseException | str], None]) -> None:
        self.policy = policy
        self._on_error = on_error
        self._waiting: dict[int, Request] = {}
        self._counts_tokens = getattr(type(policy), "on_tokens", None) is not SchedulingPolicy.on_tokens

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: Request) -> bool:
        return request.order in self._waiting

    @property
    def waiting(self) -> list[Request]:
        """The waiting requests by arrival."""
        return [self._waiting[order] for order in sorted(self._waiting)]

    @property
    def lookahead(self) -> int:
        value = self.policy.lookahead
        if isinstance(value, int) and value >= 0:
            return value
        self._on_error(self.policy, "lookahead", f"is {value!r}; it must be an int of at least 0")
        return SchedulingPolicy.lookahead

    def add(self, request: Request, now: float) -> None:
        self._waiting[request.order] = request
        self._ask("add", request, now)

    def remove(self, request: Request) -> None:
        del self._waiting[request.order]
        self._ask("remove", request)

    def candidates(self, now: float) -> Generator[Request]:
        """The policy's order as far as it is sound, then the rest of the waiting requests by arrival."""
        seen: set[int] = set()
        iterator: Any = None
        try:
            iterator = iter(self.policy.candidates(now))
            for request in iterator:
                problem = self._problem(request, seen)
                if problem is not None:
                    self._on_error(self.policy, "candidates", problem)
                    break
                seen.add(request.order)
                yield request
            else:
                # A policy may hold requests back on purpose.
                return
        except Exception as error:
            self._on_error(self.policy, "candidates", error)
        finally:
            close = getattr(iterator, "close", None)
            if close is not None:
                close()
        for request in self.waiting:
            if request.order not in seen:
                yield request

    def _problem(self, request: object, seen: set[int]) -> str | None:
        if not isinstance(request, Request) or self._waiting.get(request.order) is not request:
            return f"yielded {request!r}, which does not wait"
        if request.order in seen:
            return f"yielded {request!r} twice"
        return None

    def rank_prefills(self, prefilling: Sequence[Request], now: float) -> list[Request]:
        answer = self._ask("rank_prefills", list(prefilling), now)
        known = set(prefilling)
        try:
            ranked = list(dict.fromkeys(answer))
        except TypeError:
            ranked = [None]
        if any(request not in known for request in ranked) or len(ranked) != len(answer):
            self._on_error(
                self.policy, "rank_prefills", f"returned {answer!r}, not an order of the requests it was given"
            )
            return list(prefilling)
        return ranked + [request for request in prefilling if request not in set(ranked)]

    def victim(self, running: Sequence[Request], now: float) -> Request:
        answer = self._ask("victim", list(running), now)
        if any(answer is request for request in running):
            return answer
        self._on_error(self.policy, "victim", f"returned {answer!r}, which is not running")
        return running[-1]

    def preempts(self, candidate: Request, running: Sequence[Request], now: float) -> Request | None:
        answer = self._ask("preempts", candidate, list(running), now)
        if answer is None or any(answer is request for request in running):
            return answer
        self._on_error(self.policy, "preempts", f"returned {answer!r}, which is not running")
        return None

    def on_tokens(self, request: Request, num_tokens: int, now: float) -> None:
        if self._counts_tokens:
            self._ask("on_tokens", request, num_tokens, now)

    def _ask(self, method: str, *args: Any) -> Any:
        try:
            return getattr(self.policy, method)(*args)
        except Exception as error:
            self._on_error(self.policy, method, error)
            return None

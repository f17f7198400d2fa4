"""PolicyGuard: asks a scheduling policy, checks every answer, and stays right whatever the policy does."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Sequence
from itertools import islice
from typing import Any

from paged_backend.checks import describe
from paged_backend.policies import RequestView, SchedulingPolicy
from paged_backend.policy.policy_errors import FAILED, ErrorHandler, ask, begin_answer, call, report_if_slow
from paged_backend.request.request import Request
from paged_backend.request.state import RequestState

# Longer than this nobody is held back while nothing runs; a policy that would is not waited for again.
MAX_HOLD_S = 60.0


class PolicyGuard:
    """Holds the waiting requests itself; the policy's answers are advice.

    The policy sees views, so it cannot change a request. An exception or an impossible answer is reported through
    ``on_error(policy, method, error)`` and the built-in rule (first come, first served; the newest is the victim) takes
    over for that question.
    """

    def __init__(self, policy: SchedulingPolicy, on_error: ErrorHandler) -> None:
        self.policy = policy
        self._on_error = on_error
        self._waiting: dict[RequestView, Request] = {}
        # Requests that the policy does not know, because its add() failed.
        self._lost: dict[RequestView, Request] = {}
        self._held_since: float | None = None
        self._may_hold = True
        self.ranks_prefills = self._overrides("rank_prefills")
        self.can_preempt = self._overrides("preempts")
        self._counts_tokens = self._overrides("on_tokens")
        self._counts_steps = self._overrides("on_step")
        self._hears_of_ends = self._overrides("on_finished")
        self._names_doomed = self._overrides("doomed")
        self._holds_back = self._overrides("next_wakeup")

    def _overrides(self, method: str) -> bool:
        default = getattr(SchedulingPolicy, method)
        in_class = getattr(type(self.policy), method, default) is not default
        return in_class or method in getattr(self.policy, "__dict__", ())

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: Request) -> bool:
        return request.view in self._waiting

    @property
    def waiting(self) -> list[Request]:
        """The waiting requests by arrival."""
        return sorted(self._waiting.values(), key=lambda request: request.order)

    @property
    def lookahead(self) -> int:
        value = call(self._on_error, self.policy, "lookahead", lambda: self.policy.lookahead)
        if isinstance(value, int) and value >= 0:
            return value
        if value is not FAILED:
            self._report("lookahead", f"is {describe(value)}; it must be an int of at least 0")
        return SchedulingPolicy.lookahead

    def add(self, request: Request, now: float) -> None:
        """``request`` waits."""
        self._waiting[request.view] = request
        if self._ask("add", request.view, now) is FAILED:
            self._lost[request.view] = request

    def remove(self, request: Request) -> None:
        """``request`` was admitted or ends."""
        del self._waiting[request.view]
        # Whoever gives up waiting does not end the wait of the others.
        if request.state is not RequestState.WAITING or not self._waiting:
            self._held_since = None
        if self._lost.pop(request.view, None) is None:
            self._ask("remove", request.view)

    def candidates(self, now: float) -> Generator[Request]:
        """The policy's order as far as it is sound, then the rest of the waiting requests by arrival."""
        seen = set(self._lost)
        yield from list(self._lost.values())
        counts_all = not self._waiting or self._counts_all()
        # A policy may hold requests back on purpose, but then it counts them.
        if (yield from self._offered(seen, now)) and (counts_all or len(seen) == len(self._waiting)):
            return
        yield from (request for request in self.by_arrival() if request.view not in seen)

    def _counts_all(self) -> bool:
        """Whether the policy has as many requests as it should have."""
        count, expected = self._ask("__len__"), len(self._waiting) - len(self._lost)
        if count not in (expected, FAILED):
            self._report("__len__", f"returned {describe(count)}, but {expected} requests that it was given wait")
        return bool(count == expected)

    def by_arrival(self) -> Generator[Request]:
        """The built-in order."""
        yield from self.waiting

    def _offered(self, seen: set[RequestView], now: float) -> Generator[Request, None, bool]:
        """What the policy yields; returns whether it ended well."""
        answer = self._ask("candidates", now)
        if answer is FAILED:
            return False
        iterator: Any = call(self._on_error, self.policy, "candidates", lambda: iter(answer))
        if iterator is FAILED:
            return False
        end = object()
        try:
            while True:
                view = call(self._on_error, self.policy, "candidates", lambda: next(iterator, end))
                if view is end or view is FAILED:
                    return view is end
                request = self._waiting_request(view)
                if request is None:
                    self._report("candidates", f"yielded {describe(view)}, which does not wait")
                    return False
                if view in seen:
                    self._report("candidates", f"yielded {describe(view)} twice")
                    return False
                seen.add(view)
                yield request
        finally:
            call(self._on_error, self.policy, "candidates", lambda: getattr(iterator, "close", _do_nothing)())

    def _waiting_request(self, view: object) -> Request | None:
        """The waiting request that ``view`` shows, if it shows one."""
        return self._waiting.get(view) if type(view) is RequestView else None

    def rank_prefills(self, prefilling: Sequence[Request], now: float) -> list[Request]:
        """The order in which these requests get the token budget."""
        if not self.ranks_prefills or len(prefilling) < 2:
            return list(prefilling)
        requests = {request.view: request for request in prefilling}
        answer = self._several("rank_prefills", len(requests), list(requests), now)
        if answer is None:
            return list(prefilling)
        ranked = {view: requests[view] for view in answer if type(view) is RequestView and view in requests}
        if not len(ranked) == len(answer) == len(requests):
            what = f"returned {describe(answer)}, not an order of the {len(requests)} requests it was given, each once"
            self._report("rank_prefills", what)
            return list(prefilling)
        return list(ranked.values())

    def victim(self, running: Sequence[Request], now: float) -> Request:
        """Who of ``running`` gives up its blocks."""
        return self._one_of(running, "victim", now) or running[-1]

    def preempts(self, candidate: Request, running: Sequence[Request], now: float) -> Request | None:
        """Whom the policy would set aside for ``candidate``, if anybody."""
        return self._one_of(running, "preempts", now, candidate.view) if running else None

    def _one_of(self, running: Sequence[Request], method: str, now: float, *args: Any) -> Request | None:
        answer = self._ask(method, *args, [request.view for request in running], now)
        chosen = next((request for request in running if request.view is answer), None)
        if chosen is None and answer is not FAILED and (answer is not None or method == "victim"):
            self._report(method, f"returned {describe(answer)}, which is not running")
        return chosen

    def hold_until(self, now: float) -> float | None:
        """Until when the policy keeps everybody waiting though nothing runs; None when somebody must start now."""
        if not self._may_hold:
            return None
        answer = self._ask("next_wakeup", now) if self._holds_back else None
        since = now if self._held_since is None else self._held_since
        if isinstance(answer, (int, float)) and math.isfinite(answer) and now < answer <= since + MAX_HOLD_S:
            self._held_since = since
            return answer
        waiting = f"while {len(self)} requests wait and nothing runs"
        limit = f"at most {MAX_HOLD_S:g} s after it began to hold them back"
        what = f"returned {describe(answer)} at {now} {waiting}; it must name a time after now, {limit}"
        if self._held_since is not None:
            # It would do the same to every batch.
            self._may_hold = False
            what = f"held everybody back from {since} on, then {what}; it is waited for no more"
        if answer is not FAILED:
            self._report("next_wakeup", what)
        return None

    def doomed(self, now: float) -> list[Request]:
        """Waiting requests that the policy gives up."""
        if not self._names_doomed or not self._waiting:
            return []
        answer = self._several("doomed", len(self._waiting), now) or []
        requests = [self._waiting_request(view) for view in answer]
        if None in requests or len(set(requests)) != len(requests):
            self._report("doomed", f"returned {describe(answer)}, not a set of waiting requests")
            return []
        return [request for request in requests if request is not None]

    def on_tokens(self, counts: Iterable[tuple[Request, int]], now: float) -> None:
        """A step computed this many tokens of each request."""
        if not self._counts_tokens:
            return
        time = begin_answer(self._on_error)
        for request, num_tokens in counts:
            try:
                self.policy.on_tokens(request.view, num_tokens, now)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                self._report("on_tokens", error)
        report_if_slow(self._on_error, self.policy, "on_tokens", time)

    def on_step(self, num_decodes: int, num_prefill_tokens: int, seconds: float) -> None:
        """A step is over."""
        if self._counts_steps:
            self._ask("on_step", num_decodes, num_prefill_tokens, seconds)

    def on_finished(self, request: Request, now: float) -> None:
        """A request ended."""
        if self._hears_of_ends:
            self._ask("on_finished", request.view, now)

    def _several(self, method: str, at_most: int, *args: Any) -> list[Any] | None:
        """An answer of several things as a list, None if it is none; an endless one is cut short."""
        answer = self._ask(method, *args)
        if answer is FAILED:
            return None
        items = call(self._on_error, self.policy, method, lambda: list(islice(iter(answer), at_most + 1)))
        return None if items is FAILED else items

    def _ask(self, method: str, *args: Any) -> Any:
        return ask(self._on_error, self.policy, method, *args)

    def _report(self, method: str, error: BaseException | str) -> None:
        self._on_error(self.policy, method, error)


def _do_nothing() -> None: ...

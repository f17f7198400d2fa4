"""RequestOptions: what a caller may say of a request besides its prompt and sampling parameters, checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

from torch import Tensor

from paged_backend.checks import as_number, checked_int, describe
from paged_backend.errors import ConfigError, RequestRefused
from paged_backend.request.lockstep import Lockstep
from paged_backend.request.request import Request

MAX_PRIORITY = 2**63 - 1


class RequestOptions(TypedDict, total=False):
    """All may be left out; the seconds count from now.

    request_id: a name of its own among the unfinished requests; None gives it a number.
    priority: the smaller number goes first under ``scheduler="priority"``, as in vLLM, and gives up its memory last
        under the victim rule ``"lowest_priority"``; 0 unless given, and other policies may ignore it.
    deadline_s: seconds by which the caller would like it finished; policies may order by it.
    timeout_s: seconds after which it ends with ``"timeout"``, wherever it is.
    queue_timeout_s: seconds after which it ends with ``"timeout"`` if it has not begun to run.
    client_id: whose request it is, for policies that share out service.
    cache_salt: prefixes are shared only under an equal salt.
    stop_condition: called with the Request after each token; True ends it with ``"stop"``.
    metadata: anything, for the caller and policies.
    lockstep: shared by requests that choose each token together.
    prompt_embeds: [num_prompt_tokens, D] floats that the model is fed in place of the prompt's tokens, which then only
        tell penalties and processors what was said; prefixes of such a prompt are not shared.
    """

    request_id: str | None
    priority: int
    deadline_s: float | None
    timeout_s: float | None
    queue_timeout_s: float | None
    client_id: str | None
    cache_salt: str | None
    stop_condition: Callable[[Request], bool] | None
    metadata: Any
    lockstep: Lockstep | None
    prompt_embeds: Tensor | None


_MOMENTS = {"deadline_s": "deadline", "timeout_s": "time_limit", "queue_timeout_s": "queue_limit"}


def request_fields(options: Mapping[str, Any], now: float) -> dict[str, Any]:
    """The fields of a Request that ``options`` stand for.

    Raises RequestRefused, which names the option, the value and what is allowed, for one that cannot be used.
    """
    if unknown := sorted(options.keys() - RequestOptions.__annotations__.keys()):
        known = ", ".join(RequestOptions.__annotations__)
        raise RequestRefused(f"unknown request option {unknown[0]!r}; choose from {known}")
    fields = dict(options)
    for name in ("request_id", "client_id", "cache_salt"):
        if fields.get(name) is not None:
            check_text(name, fields[name])
    try:
        fields["priority"] = checked_int("priority", fields.get("priority", 0), -MAX_PRIORITY, MAX_PRIORITY)
    except ConfigError as error:
        raise RequestRefused(f"{error}; the smallest goes first") from None
    if fields.get("request_id") == "":
        raise RequestRefused("request_id must not be empty; leave it out, and the request gets a number")
    condition = fields.get("stop_condition")
    if condition is not None and not callable(condition):
        raise RequestRefused(f"stop_condition must be called with a Request, or be None, got {describe(condition)}")
    lockstep = fields.get("lockstep")
    if lockstep is not None and not isinstance(lockstep, Lockstep):
        raise RequestRefused(f"lockstep must be a Lockstep that its requests share, or None, got {describe(lockstep)}")
    for name, field in _MOMENTS.items():
        fields[field] = _moment(now, name, fields.pop(name, None))
    return fields


def check_salt(salt: Any) -> None:
    """Raise RequestRefused unless ``salt`` is a text or None."""
    if salt is not None:
        check_text("cache_salt", salt)


def check_text(name: str, value: Any) -> None:
    """Raise RequestRefused unless ``value`` is a text."""
    if not isinstance(value, str):
        raise RequestRefused(f"{name} must be a text, got {describe(value)}")


def _moment(now: float, name: str, seconds: Any) -> float | None:
    """The time ``seconds`` from now, or None; RequestRefused unless it is a positive finite number."""
    if seconds is None:
        return None
    number = as_number(seconds)
    if not 0 < number < math.inf:
        raise RequestRefused(f"{name} must be a positive number of seconds or None, got {describe(seconds)}")
    return now + number

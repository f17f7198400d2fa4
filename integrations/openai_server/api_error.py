"""ApiError: what went wrong as OpenAI's API tells it, with a status code and a JSON object."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from paged_backend.errors import (
    ConfigError,
    ContextOverflow,
    DeadlineExceeded,
    EngineClosed,
    PagedBackendError,
    QueueFull,
    RequestRefused,
)

# Seconds after which a client that was sent away may come again.
RETRY_AFTER_S = 1
# Whatever a client sent, an answer about it stays short.
MAX_MESSAGE = 1000
# What pydantic calls the alternatives of a field, in the place of an error.
_ALTERNATIVES = frozenset(
    (
        *("str", "constrained-str", "NamedTool", "NamedFunction"),
        *("InputMessage", "FunctionCallItem", "FunctionCallOutput", "ReasoningItem"),
    )
)


class ApiError(Exception):
    """Answered with ``status`` and ``{"error": {"message", "type", "param", "code"}}``.

    type: by default what OpenAI calls the kind of error of that status.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type or ("server_error" if status >= 500 else "invalid_request_error")
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        message = str(self)
        if len(message) > MAX_MESSAGE:
            message = f"{message[:MAX_MESSAGE]}..."
        return {"error": {"message": message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return json_response(self.body, self.status, self.headers)


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """JSON in UTF-8; half of a surrogate pair, which a client's text may hold, becomes a question mark."""
    body = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(errors="replace")
    return Response(body, status, headers, media_type="application/json")


def rate_limited(message: str) -> ApiError:
    """There is too much to do; the client may come again."""
    return ApiError(
        429,
        message,
        type="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"Retry-After": str(RETRY_AFTER_S)},
    )


def unavailable(message: str) -> ApiError:
    """The engine, or the server, takes nothing at the moment."""
    return ApiError(503, message, code="service_unavailable", headers={"Retry-After": str(RETRY_AFTER_S)})


def timed_out(message: str) -> ApiError:
    """A request was not done within a time that it named."""
    # By this header OpenAI's clients do not ask again for what is late already.
    return ApiError(408, message, type="timeout_error", code="timeout", headers={"x-should-retry": "false"})


def as_api_error(error: Exception) -> ApiError:
    """What an error of the engine or of the framework is to a client; anything else is a server's error."""
    match error:
        case ApiError():
            return error
        case ContextOverflow():
            return ApiError(400, str(error), code="context_length_exceeded")
        case QueueFull():
            return rate_limited(str(error))
        case RequestRefused() | ConfigError():
            return ApiError(400, str(error))
        case DeadlineExceeded():
            return timed_out(str(error))
        case EngineClosed():
            return unavailable(str(error))
        case PagedBackendError():
            return ApiError(500, str(error))
        case RequestValidationError():
            return _of_validation(error.errors())
        case HTTPException(status_code=400):
            # What the framework says of bytes that are no text, and of JSON that is nested too deep.
            return ApiError(400, f"the body is not JSON in UTF-8 that can be read: {error.detail}")
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=error.headers)
        case _:
            return ApiError(500, "the server failed; its log says how")


def _of_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    # Of the alternatives of one field, whichever got further than the type says what is wrong.
    error = next((error for error in errors if not error["type"].endswith("_type")), errors[0])
    where, *place = error["loc"]
    if error["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {error['ctx']['error']}")
    if not place:
        return ApiError(400, "the body must be a JSON object, with content-type: application/json")
    path = ""
    for part in place:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in _ALTERNATIVES and "[" not in part:
            path += f".{part}" if path else part
    param = str(place[0])
    if error["type"] == "extra_forbidden":
        return ApiError(400, f"unknown argument {path!r}", param=param, code="unknown_parameter")
    message = error["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    given = f", got {error['input']!r:.100}" if error["type"] not in ("missing", "too_long") else ""
    place_of = f"{where} {path}" if where != "body" else path
    return ApiError(400, f"{place_of}: {message}{given}", param=param)

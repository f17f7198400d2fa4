"""Errors in OpenAI's form."""

from __future__ import annotations

import json

import pytest
from starlette.exceptions import HTTPException

from paged_backend.errors import (
    ConfigError,
    ContextOverflow,
    DeadlineExceeded,
    EngineClosed,
    EngineFailed,
    QueueFull,
    RequestFailed,
    RequestRefused,
)
from paged_backend.integrations.openai_server.api_error import MAX_MESSAGE, ApiError, as_api_error, json_response


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (RequestRefused("x"), 400, "invalid_request_error", None),
        (ConfigError("x"), 400, "invalid_request_error", None),
        (ContextOverflow("x"), 400, "invalid_request_error", "context_length_exceeded"),
        (QueueFull("x"), 429, "rate_limit_error", "rate_limit_exceeded"),
        (DeadlineExceeded("x"), 408, "timeout_error", "timeout"),
        (EngineClosed("x"), 503, "server_error", "service_unavailable"),
        (EngineFailed("x"), 503, "server_error", "service_unavailable"),
        (RequestFailed("x"), 500, "server_error", None),
        (HTTPException(413, "x"), 413, "invalid_request_error", None),
        (ApiError(401, "x", code="y"), 401, "invalid_request_error", "y"),
    ],
)
def test_each_error_has_its_status_and_its_kind(error: Exception, status: int, kind: str, code: str | None):
    told = as_api_error(error)
    assert told.status == status
    assert told.body == {"error": {"message": "x", "type": kind, "param": None, "code": code}}


def test_what_nobody_foresaw_is_not_told_to_clients():
    told = as_api_error(KeyError("/etc/secret"))
    assert (told.status, told.body["error"]["message"]) == (500, "the server failed; its log says how")


def test_who_may_come_again_is_told_when_and_who_is_late_is_told_not_to():
    for error in (QueueFull("x"), EngineClosed("x")):
        assert as_api_error(error).response().headers["retry-after"] == "1"
    assert as_api_error(DeadlineExceeded("x")).response().headers["x-should-retry"] == "false"


def test_a_long_message_is_cut():
    message = ApiError(400, "x" * 10 * MAX_MESSAGE).body["error"]["message"]
    assert len(message) == MAX_MESSAGE + 3


def test_half_of_a_surrogate_pair_can_be_answered():
    assert json.loads(json_response({"text": "a\ud800é"}).body) == {"text": "a?é"}

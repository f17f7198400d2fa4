"""Connections without a request."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from server_checks import Running, running, text_body
from service_checks import PATIENCE_S, wait_until

from paged_backend.integrations.openai_server import patient_protocol


@pytest.fixture
def impatient(app: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setattr(patient_protocol, "HEAD_PATIENCE_S", 0.05)
    with running(app) as server:
        yield server


def connect(server: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), PATIENCE_S)


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def test_a_connection_that_says_nothing_is_closed(impatient: Running):
    with connect(impatient) as connection:
        assert is_closed(connection)


def test_a_head_that_does_not_end_is_given_up(impatient: Running):
    with connect(impatient) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        assert is_closed(connection)


def test_a_second_head_that_does_not_end_is_given_up_too(impatient: Running):
    with connect(impatient) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b""
        while b'"ok"}' not in answer:
            answer += connection.recv(1000)
        connection.sendall(b"GET /hea")
        assert is_closed(connection)


def test_a_request_may_take_longer_than_its_head(impatient: Running, service: Any):
    service.pause()
    try:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{impatient.url}/completions", json=text_body(), timeout=0.3)
    finally:
        service.resume()


def test_what_is_no_http_is_refused(impatient: Running):
    with connect(impatient) as connection:
        connection.sendall(b"\x16\x03\x01 is no HTTP\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 400")


def test_connections_without_a_request_make_room_for_others(app: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(patient_protocol, "MAX_CONNECTIONS", 5)
    with running(app) as server:
        idle = [connect(server) for _ in range(30)]
        wait_until(lambda: len(server.server.server_state.connections) == 5)
        assert httpx.get(f"{server.url}/models").status_code == 200
        # Long before anybody's patience ends.
        for connection in idle:
            connection.settimeout(0.5)
        # The question itself took a place too.
        assert 30 - 5 <= sum(map(is_closed, idle)) <= 30 - 5 + 1
        for connection in idle:
            connection.close()

"""Who gets in."""

from __future__ import annotations

from typing import Any

import pytest
from server_checks import MODEL, chat_body, client_of

from paged_backend.integrations.openai_server import ApiKeys, create_app
from paged_backend.integrations.openai_server.gate import Gate, GateKeeper


@pytest.fixture
def locked(service: Any) -> Any:
    return create_app(service, model_names=[MODEL], api_keys=ApiKeys({"secret": "ann"}))


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Basic secret", "secret", "Bearer", "Bearer secret secret"])
async def test_without_a_key_nothing_but_the_health_is_told(locked: Any, header: str | None):
    headers = {} if header is None else {"Authorization": header}
    async with client_of(locked) as client:
        for path in ("/v1/models", "/metrics", "/openapi.json", "/nothing"):
            answer = await client.get(path, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), path
        assert (await client.get("/health", headers=headers)).status_code == 200


@pytest.mark.parametrize("header", ["Bearer secret", "bearer secret"])
async def test_with_a_key_all_is_open(locked: Any, header: str):
    async with client_of(locked) as client:
        assert (await client.get("/v1/models", headers={"Authorization": header})).status_code == 200


async def test_while_it_drains_requests_are_sent_elsewhere_and_the_health_says_so(service: Any):
    app = create_app(service, model_names=[MODEL])
    app.state.gate.is_draining = True
    async with client_of(app) as client:
        answer = await client.post("/v1/chat/completions", json=chat_body())
        health = await client.get("/health")
    assert (answer.status_code, health.status_code) == (503, 503)
    assert answer.headers["retry-after"] == "1"
    assert answer.headers["connection"] == "close"


async def test_it_is_idle_when_the_last_is_out_even_by_an_error():
    gate = Gate()

    async def inside(scope: Any, receive: Any, send: Any) -> None:
        assert not gate.idle.is_set()
        raise KeyError

    with pytest.raises(KeyError):
        await GateKeeper(inside, gate)({"type": "http", "path": "/", "headers": []}, None, None)
    assert gate.idle.is_set()

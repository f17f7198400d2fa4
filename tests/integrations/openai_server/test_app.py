"""The application: its routes, and what cannot harm it."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from prometheus_client import CollectorRegistry
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)
from scripted_engine import ScriptedService, scripted_service
from server_checks import HI, MODEL, Exchange, chat_body, client_of, text_body
from service_checks import assert_idle, wait_until

from paged_backend.integrations.openai_server import create_app
from paged_backend.plugins.observers import Prometheus

JSON = {"content-type": "application/json"}


async def test_the_models_are_listed_and_found_by_their_names(service: ScriptedService):
    async with client_of(create_app(service, model_names=["org/model", "short"])) as client:
        listed = (await client.get("/v1/models")).json()
        assert [each["id"] for each in listed["data"]] == ["org/model", "short"]
        assert (await client.get("/v1/models/org/model")).json() == listed["data"][0]
        assert listed["data"][0]["max_model_len"] == 4096
        missing = await client.get("/v1/models/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_the_health_is_told(client: httpx.AsyncClient):
    assert (await client.get("/health")).json() == {"status": "ok"}


async def test_metrics_are_those_of_the_registry():
    registry = CollectorRegistry()
    service = scripted_service(lambda prompt, params: "ok", plugins=[Prometheus(registry)])
    async with client_of(create_app(service, model_names=[MODEL], registry=registry)) as client:
        await client.post("/v1/chat/completions", json=chat_body())
        answer = await client.get("/metrics")
    assert 'paged_backend_tokens_total{kind="generated"} 3.0' in answer.text
    assert answer.headers["content-type"].startswith("text/plain")
    service.close()
    service.engine.close()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/", 404), ("GET", "/v1/other", 404), ("GET", "/docs", 404), ("GET", "/v1/completions", 405)],
)
async def test_what_there_is_not_is_told_as_openai_does(client: httpx.AsyncClient, method: str, path: str, status: int):
    answer = await client.request(method, path)
    assert answer.status_code == status
    assert f"there is no {method} {path}" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b'{"model": ',
        b"\xff\xfe\x00",
        b'{"model": "tiny", "prompt": "\xff"}',
        b'{"model": "tiny", "prompt": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "\\ud800"}',
        b'{"\\ud800": 1}',
        b'{"model": "tiny", "temperature": NaN}',
        b'{"model": "tiny", "temperature": -Infinity}',
        b'{"model": "tiny", "seed": ' + b"9" * 5000 + b"}",
        b'{"model": "tiny", "metadata": ' + b"[" * 50000 + b"}",
        b'{"model": "tiny", "logit_bias": {"1": 1e999}}',
    ],
)
async def test_a_body_that_is_none_is_answered_with_400(client: httpx.AsyncClient, path: str, content: bytes):
    answer = await client.post(path, content=content, headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert len(answer.content) < 2000


async def test_texts_of_tools_and_variables_that_are_no_unicode_are_refused(client: httpx.AsyncClient):
    half = b'{"type": "function", "function": {"name": "f", "parameters": {"description": "\\ud800"}}}'
    for field in (b'"tools": [' + half + b"]", b'"chat_template_kwargs": {"x": "\\ud800"}, "max_tokens": 1'):
        body = b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], ' + field + b"}"
        answer = await client.post("/v1/chat/completions", content=body, headers=JSON)
        assert answer.status_code in (200, 400), answer.text


async def test_a_body_of_another_type_is_refused(client: httpx.AsyncClient):
    answer = await client.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"})
    assert "content-type: application/json" in answer.json()["error"]["message"]


async def test_an_error_of_the_servers_own_is_answered_and_not_told(app: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(app.state.backend, "check_model", lambda name: 1 / 0)
    async with client_of(app) as client:
        answer = await client.post("/v1/chat/completions", json=chat_body())
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    assert "division" not in answer.text


def test_no_body_that_the_schema_allows_or_forbids_breaks_it(app: Any, service: ScriptedService):
    service.writer = lambda prompt, params: "ok"
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)

    @schema.include(method="POST").parametrize()
    @settings(
        max_examples=15,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def run(case: Any) -> None:
        checks = (
            *(not_a_server_error, status_code_conformance, content_type_conformance),
            *(response_schema_conformance, negative_data_rejection),
        )
        case.call_and_validate(checks=list(checks))


async def test_nothing_is_left_of_many_requests_of_which_many_go_wrong(app: Any, service: ScriptedService):
    """Clients go away before, while and after they are answered, and others ask for what cannot be."""
    drawn = random.Random(7)
    kinds = [
        ("/v1/completions", text_body(max_tokens=12, ignore_eos=True)),
        ("/v1/completions", text_body(prompt=["a", "b"], n=2, temperature=1, seed=1)),
        ("/v1/completions", text_body(prompt="x" * 5000)),
        ("/v1/chat/completions", chat_body(stream=True)),
        ("/v1/chat/completions", chat_body(stream=True, n=2, temperature=1, max_tokens=2000, ignore_eos=True)),
        ("/v1/chat/completions", chat_body(timeout_s=0.001, max_tokens=2000, ignore_eos=True)),
        ("/v1/chat/completions", {"model": MODEL, "messages": HI, "top_q": 1}),
    ]

    async def one() -> int | None:
        path, body = drawn.choice(kinds)
        endless = body.get("max_tokens") == 2000 and "timeout_s" not in body
        patience = drawn.choice([0, 0.001, 0.01, 0.05] if endless else [0, 0.001, 0.01, None])
        exchange = Exchange(app, path, body)
        if patience is not None:
            await asyncio.sleep(patience)
            exchange.go_away()
        await exchange.task
        return exchange.status

    statuses = await asyncio.gather(*(one() for _ in range(120)))
    assert {200, 400} <= set(statuses) <= {200, 400, 408, 499}
    await asyncio.to_thread(wait_until, lambda: service.num_unfinished == 0)
    assert app.state.gate.idle.is_set()
    assert len(asyncio.all_tasks()) == 1
    service.pause()
    service.stats()
    assert_idle(service.engine)
    service.resume()


def test_without_its_extra_the_server_says_what_to_install():
    code = "import sys\nsys.modules['fastapi'] = None\nimport paged_backend.integrations.openai_server"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "the server needs the fastapi package: pip install 'paged-backend[serve]'" in result.stderr

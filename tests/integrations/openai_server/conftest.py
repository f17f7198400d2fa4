"""A scripted model behind a server, and what is left of its requests: nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from fastapi import FastAPI
from scripted_engine import ScriptedService, scripted_service
from server_checks import MODEL, client_of
from service_checks import assert_idle, wait_until

from paged_backend.integrations.openai_server import create_app


@pytest.fixture(scope="package")
def shared_service() -> Iterator[ScriptedService]:
    service = scripted_service(lambda prompt, params: None)
    yield service
    service.close(graceful=False)
    service.engine.close()


@pytest.fixture
def service(shared_service: ScriptedService) -> Iterator[ScriptedService]:
    """Says what its random weights say, unless a test gives it a ``writer``."""
    yield shared_service
    shared_service.writer = lambda prompt, params: None
    shared_service.prompts.clear()
    shared_service.params.clear()
    wait_until(lambda: shared_service.num_unfinished == 0)
    shared_service.pause()
    try:
        shared_service.stats()
        assert_idle(shared_service.engine)
    finally:
        shared_service.resume()


@pytest.fixture(scope="package")
def shared_app(shared_service: ScriptedService) -> FastAPI:
    return create_app(shared_service, model_names=[MODEL])


@pytest.fixture
def app(service: ScriptedService, shared_app: FastAPI) -> FastAPI:
    """For tests that leave it open."""
    return shared_app


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(app) as client:
        yield client

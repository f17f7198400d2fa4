"""The application: OpenAI's routes over one engine."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException

import paged_backend
from paged_backend.checks import checked_int
from paged_backend.errors import ConfigError, PagedBackendError
from paged_backend.integrations.chat.tool_formats import FORMATS
from paged_backend.integrations.openai_server.api_error import ApiError, as_api_error, unavailable
from paged_backend.integrations.openai_server.api_keys import ApiKeys
from paged_backend.integrations.openai_server.backend import Backend
from paged_backend.integrations.openai_server.bodies import ChatBody, CompletionBody
from paged_backend.integrations.openai_server.body_limit import BodyLimit
from paged_backend.integrations.openai_server.chat_completions import ChatSettings, complete_chat
from paged_backend.integrations.openai_server.completions import complete
from paged_backend.integrations.openai_server.disconnect import ClientGone
from paged_backend.integrations.openai_server.gate import Gate, GateKeeper
from paged_backend.integrations.openai_server.response_body import ResponseBody
from paged_backend.integrations.openai_server.responses import respond

if TYPE_CHECKING:
    from paged_backend import AsyncEngine, Engine

# Bytes. Of one body, enough for 100,000 words of any language; of all at once, a part of any machine's memory.
MAX_BODY_BYTES = 4 * 2**20
MAX_HELD_BYTES = 256 * 2**20


class ErrorDetail(BaseModel):
    """What went wrong, with which argument."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is no success."""

    error: ErrorDetail


def create_app(
    engine: Engine | AsyncEngine,
    *,
    model_names: Sequence[str] = (),
    api_keys: ApiKeys | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    max_prompt_tokens: int | None = None,
    chat_template: str | None = None,
    tool_parser: str | None = None,
    reasoning_tags: tuple[str, str] | Literal["auto"] | None = "auto",
    registry: Any = None,
) -> FastAPI:
    """An ASGI application that serves an engine to clients of OpenAI's API.

    engine: an Engine, which the application runs from its start to its end, or an AsyncEngine that its owner started.
    model_names: what clients may call the model; by default as its tokenizer does.
    api_keys: who may use it; None lets anybody.
    max_body_bytes: largest body of a request. max_prompt_tokens: longest prompt; None leaves it to the model.
    chat_template: instead of the tokenizer's own.
    tool_parser: how the model writes tool calls: "hermes", "llama3", "mistral" or "json"; by default what the template
        shows.
    reasoning_tags: what stands around reasoning; by default ``<think>`` and ``</think>``, or ``[THINK]`` and
        ``[/THINK]``, where the template has them.
    registry: a ``prometheus_client`` registry that ``/metrics`` serves, such as one of the plugin Prometheus; None
        serves the default one.

    Raises ConfigError for an engine without a tokenizer, an unknown ``tool_parser``, and a limit that is no count.
    """
    max_body_bytes = checked_int("max_body_bytes", max_body_bytes, 1)
    if max_prompt_tokens is not None:
        max_prompt_tokens = checked_int("max_prompt_tokens", max_prompt_tokens, 1)
    if tool_parser is not None and tool_parser not in FORMATS:
        raise ConfigError(f"tool_parser={tool_parser!r} is unknown; choose from {', '.join(FORMATS)}, or leave it out")
    backend = Backend(engine, model_names, max_prompt_tokens)
    gate = Gate(api_keys)
    settings = ChatSettings(backend.names[0], chat_template, tool_parser, reasoning_tags)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        backend.start()
        yield
        await backend.aclose()

    app = FastAPI(
        title="paged_backend",
        version=paged_backend.__version__,
        lifespan=lifespan,
        # Their pages load scripts from elsewhere; /openapi.json is the same.
        docs_url=None,
        redoc_url=None,
        responses={400: {"model": ErrorBody}, 401: {"model": ErrorBody}},
    )
    created = int(time.time())
    failures: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorBody} for status in (404, 408, 413, 429, 500, 503)
    }
    streamed: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {}, "text/event-stream": {}}}}

    @app.post("/v1/chat/completions", responses={**streamed, **failures}, response_class=Response)
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        return await complete_chat(backend, settings, body, request)

    @app.post("/v1/completions", responses={**streamed, **failures}, response_class=Response)
    async def completions(body: CompletionBody, request: Request) -> Response:
        return await complete(backend, body, request)

    @app.post("/v1/responses", responses={**streamed, **failures}, response_class=Response)
    async def responses(body: ResponseBody, request: Request) -> Response:
        return await respond(backend, settings, body, request)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(backend, name, created) for name in backend.names]}

    @app.get("/v1/models/{model:path}", responses={404: {"model": ErrorBody}})
    async def model(model: str) -> dict[str, Any]:
        backend.check_model(model)
        return _model(backend, model, created)

    @app.get("/health", responses={503: {"model": ErrorBody}})
    async def health() -> dict[str, str]:
        if gate.is_draining:
            raise unavailable("the server is shutting down")
        backend.check_health()
        return {"status": "ok"}

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        return _metrics(registry)

    async def tell(request: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    async def tell_nobody(request: Request, error: Exception) -> Response:
        # nginx' code for a client that closed the connection.
        return Response(status_code=499)

    async def tell_of_path(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code in (404, 405) and error.detail in ("Not Found", "Method Not Allowed"):
            told = f"there is no {request.method} {request.url.path}; see /openapi.json for what there is"
            return ApiError(error.status_code, told, headers=error.headers).response()
        return await tell(request, error)

    for kind in (ApiError, PagedBackendError, RequestValidationError, Exception):
        app.add_exception_handler(kind, tell)
    app.add_exception_handler(HTTPException, tell_of_path)
    app.add_exception_handler(ClientGone, tell_nobody)

    # What is added last comes first.
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes, max_held_bytes=MAX_HELD_BYTES)
    app.add_middleware(GateKeeper, gate=gate)
    app.state.backend, app.state.gate = backend, gate
    return app


def _model(backend: Backend, name: str, created: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "paged_backend",
        "max_model_len": backend.engine.max_model_len,
    }


def _metrics(registry: Any) -> Response:
    try:
        import prometheus_client
    except ImportError:
        raise ApiError(501, "metrics need prometheus_client: pip install 'paged-backend[metrics]'") from None
    text = prometheus_client.generate_latest(prometheus_client.REGISTRY if registry is None else registry)
    return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)

"""The engine behind a server, and what its requests are made of."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from server_checks import MODEL, client_of, text_body
from service_checks import PATIENCE_S, Broken, break_steps, repair_steps
from starlette.datastructures import Headers
from tiny_models import make_tiny
from tiny_tokenizers import byte_tokenizer

from paged_backend import AsyncEngine, Engine, tokenizer_lock
from paged_backend.errors import ConfigError, ContextOverflow, EngineClosed, QueueFull
from paged_backend.integrations.openai_server import create_app
from paged_backend.integrations.openai_server.api_error import ApiError
from paged_backend.integrations.openai_server.api_keys import Client
from paged_backend.integrations.openai_server.backend import Backend
from paged_backend.integrations.openai_server.bodies import CompletionBody
from paged_backend.integrations.openai_server.completions import encode


def asked(client: Client | None = None, **headers: str) -> Any:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return SimpleNamespace(headers=Headers(named), state=SimpleNamespace(client=client))


def body(**fields: Any) -> CompletionBody:
    return CompletionBody(**text_body(**fields))


@pytest.fixture
def backend(shared_service: Any) -> Backend:
    return Backend(shared_service, [MODEL], None)


def test_the_body_or_a_header_says_who_asks_and_how_urgently(backend: Backend):
    wanted = {"priority": -3, "deadline_s": 1.5, "client_id": "ann"}
    assert backend.options(body(**wanted), asked()) == wanted
    assert backend.options(body(), asked(x_priority="-3", x_deadline_s="1.5", x_client_id="ann")) == wanted
    assert backend.options(body(priority=1), asked(x_priority="2"))["priority"] == 1
    assert backend.options(body(timeout_s=2.0, queue_timeout_s=1), asked()) == {"timeout_s": 2.0, "queue_timeout_s": 1}


@pytest.mark.parametrize(
    ("header", "value", "wanted"),
    [
        ("x_priority", "high", "an integer"),
        ("x_priority", "1.5", "an integer"),
        ("x_deadline_s", "soon", "a positive number of seconds"),
        ("x_deadline_s", "nan", "a positive number of seconds"),
        ("x_deadline_s", "-1", "a positive number of seconds"),
        ("x_deadline_s", "inf", "a positive number of seconds"),
    ],
)
def test_a_header_that_says_nothing_is_refused_by_name(backend: Backend, header: str, value: str, wanted: str):
    with pytest.raises(ApiError, match=f"header {header.replace('_', '-')} must be {wanted}, got '{value}'"):
        backend.options(body(), asked(**{header: value}))


def test_a_key_says_whose_request_it_is_and_nobody_can_take_anothers_name(backend: Backend):
    ann = Client("ann")
    assert backend.options(body(), asked(ann))["client_id"] == "ann"
    assert backend.options(body(client_id="ann"), asked(ann))["client_id"] == "ann"
    for request in (asked(ann, x_client_id="bob"), asked(Client("bob"))):
        with pytest.raises(ApiError, match="client_id is that of the API key"):
            backend.options(body(client_id=None if "x-client-id" in request.headers else "ann"), request)


def test_clients_share_no_prefix_with_each_other_whatever_salt_they_give(backend: Backend):
    salts = [
        backend.options(body(cache_salt=salt), asked(client))["cache_salt"]
        for client in (Client("a"), Client("ab"), Client('a", "b'))
        for salt in (None, "None", "null", "b", "bb", 'b"')
    ]
    assert len(set(salts)) == len(salts)
    assert "cache_salt" not in backend.options(body(), asked())
    assert backend.options(body(cache_salt="s"), asked())["cache_salt"] == "s"


def test_prompts_wait_for_no_answer_that_is_being_spelt(backend: Backend):
    with tokenizer_lock(backend.engine.tokenizer), ThreadPoolExecutor() as pool:
        assert pool.submit(encode, backend.tokenizer, "hi").result(PATIENCE_S)


def test_a_prompt_may_be_bounded(shared_service: Any):
    backend = Backend(shared_service, [MODEL], 3)
    backend.check_prompt([1, 2, 3])
    with pytest.raises(ContextOverflow, match="the prompt has 4 tokens, and this server takes 3"):
        backend.check_prompt([1, 2, 3, 4])


def test_the_model_goes_by_its_names_or_by_its_tokenizers(shared_service: Any):
    backend = Backend(shared_service, ["a", "b"], None)
    backend.check_model("b")
    with pytest.raises(ApiError, match="there is no model 'c' here; the model is called 'a'"):
        backend.check_model("c")
    shared_service.engine.tokenizer.name_or_path = "some/model"
    assert Backend(shared_service, [], None).names == ("some/model",)


def test_what_is_no_engine_and_an_engine_without_a_tokenizer_are_refused():
    with pytest.raises(ConfigError, match="needs an Engine or an AsyncEngine, got 'model'"):
        create_app("model")
    with Engine(make_tiny("llama")) as engine, pytest.raises(ConfigError, match="needs an engine with a tokenizer"):
        create_app(engine)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"max_body_bytes": 0}, "max_body_bytes must be"),
        ({"max_prompt_tokens": -1}, "max_prompt_tokens must be"),
        ({"tool_parser": "mine"}, "tool_parser='mine' is unknown; choose from hermes"),
    ],
)
def test_an_option_that_cannot_be_used_is_refused_by_name(shared_service: Any, options: dict[str, Any], why: str):
    with pytest.raises(ConfigError, match=why):
        create_app(shared_service, **options)


@pytest.fixture
def engine() -> Any:
    tokenizer = byte_tokenizer()
    with Engine(
        make_tiny("llama", vocab_size=len(tokenizer)), tokenizer, kv_cache_memory="4MiB", max_waiting=1
    ) as made:
        yield made


async def test_an_engine_runs_from_the_applications_start_to_its_end(engine: Engine):
    app = create_app(engine, model_names=[MODEL])
    async with app.router.lifespan_context(app):
        async with client_of(app) as client:
            assert (await client.post("/v1/completions", json=text_body())).status_code == 200
        assert engine.keeper is not None
    assert engine.keeper is None
    async with client_of(app) as client:
        assert (await client.get("/health")).status_code == 503
        assert (await client.post("/v1/completions", json=text_body())).status_code == 503
    app.state.backend.close_at_once()


async def test_an_engine_that_failed_is_started_again_and_only_those_that_ran_hear_of_it(engine: Engine):
    app = create_app(engine, model_names=[MODEL])
    async with app.router.lifespan_context(app), client_of(app) as client:
        break_steps(engine, Broken("of the test"))
        answer = await client.post("/v1/completions", json=text_body())
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "service_unavailable")
        repair_steps(engine)
        assert (await client.post("/v1/completions", json=text_body())).status_code == 200


async def test_a_service_of_somebody_elses_is_neither_started_nor_closed(engine: Engine):
    service = AsyncEngine(engine)
    app = create_app(service, model_names=[MODEL])
    async with app.router.lifespan_context(app), client_of(app) as client:
        answer = await client.post("/v1/completions", json=text_body())
        assert (answer.status_code, "not started" in answer.json()["error"]["message"]) == (503, True)
        service.start()
        assert (await client.post("/v1/completions", json=text_body())).status_code == 200
    app.state.backend.close_at_once()
    assert engine.keeper is not None
    service.close()


async def test_a_full_queue_sends_away_before_a_prompt_is_looked_at(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    with AsyncEngine(engine) as service:
        app = create_app(service, model_names=[MODEL])
        # Paused, the service takes requests and runs none.
        service.pause()
        waiting = service.submit([5, 6], {"max_tokens": 4})
        monkeypatch.setattr(Backend, "tokenizer", property(lambda backend: pytest.fail("a prompt was looked at")))
        service.stats()
        with pytest.raises(QueueFull):
            app.state.backend.check()
        async with client_of(app) as client:
            answer = await client.post("/v1/completions", json=text_body())
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert json.loads(answer.text)["error"]["type"] == "rate_limit_error"
        service.resume()
        assert (await waiting).finished


async def test_of_several_prompts_of_which_some_find_no_room_none_runs(engine: Engine):
    with AsyncEngine(engine) as service:
        service.pause()
        async with client_of(create_app(service, model_names=[MODEL])) as client:
            answer = await client.post("/v1/completions", json=text_body(prompt=["a", "b", "c"]))
        assert answer.status_code == 429
        service.resume()
        assert engine.stats is not None
    assert service.num_unfinished == 0


def test_a_closed_engine_is_not_well(engine: Engine):
    service = AsyncEngine(engine).start()
    backend = Backend(service, [MODEL], None)
    backend.check_health()
    service.close()
    engine.close()
    with pytest.raises(EngineClosed):
        backend.check_health()

"""Backend: the engine behind a server, what its requests are made of, and how they end."""

from __future__ import annotations

import asyncio
import copy
import json
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from paged_backend.checks import describe
from paged_backend.errors import ConfigError, ContextOverflow
from paged_backend.integrations.openai_server.api_error import ApiError, timed_out, unavailable
from paged_backend.integrations.openai_server.bodies import SamplingBody

if TYPE_CHECKING:
    from paged_backend import AsyncEngine, Engine, Handle, RequestOutput, SamplingParams

# Fields that a body shares with SamplingParams.
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "n", "min_tokens", "ignore_eos", "stop", "bad_words"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "include_stop_str_in_output", "regex", "grammar"),
)
_OPTIONS = ("priority", "deadline_s", "timeout_s", "queue_timeout_s", "client_id")
# What a header may say where the body does not.
_HEADERS = {"x-priority": ("priority", int), "x-deadline-s": ("deadline_s", float), "x-client-id": ("client_id", str)}


class Backend:
    """Runs an Engine for as long as the server lives, or uses an AsyncEngine that its owner started.

    An engine whose thread failed is started again by the next request, if it is run here.
    """

    def __init__(self, engine: Engine | AsyncEngine, names: Sequence[str], max_prompt_tokens: int | None) -> None:
        from paged_backend import AsyncEngine, Engine

        if not isinstance(engine, (Engine, AsyncEngine)):
            raise ConfigError(f"a server needs an Engine or an AsyncEngine, got {describe(engine)}")
        self._is_own = isinstance(engine, Engine)
        self._service = AsyncEngine(engine) if isinstance(engine, Engine) else engine
        self.engine = self._service.engine
        if self.engine.tokenizer is None:
            raise ConfigError("a server needs an engine with a tokenizer; make it with Engine(model, tokenizer)")
        self.names = tuple(names) or (getattr(self.engine.tokenizer, "name_or_path", "") or "paged",)
        self.max_prompt_tokens = max_prompt_tokens
        self._is_closed = False

    @cached_property
    def tokenizer(self) -> Any:
        """One for prompts alone: a tokenizer is locked while it works, so a long one would hold up the engine's."""
        return copy.deepcopy(self.engine.tokenizer)

    # Life

    def start(self) -> None:
        if self._is_own and not self._is_closed:
            self._service.start()

    async def aclose(self) -> None:
        """Finish what runs, and end what was started here."""
        self._is_closed = self._is_own
        if self._is_own:
            await self._service.aclose()

    def close_at_once(self) -> None:
        """Abort what runs, and end what was started here; from outside of an event loop."""
        self._is_closed = self._is_own
        if self._is_own:
            self._service.close(graceful=False)

    def check_health(self) -> None:
        """Raise what every request would hear: that the engine is closed, or does not start again."""
        if self._is_closed:
            raise unavailable("the server is shutting down")
        self.start()
        self.engine.check_open()

    def check(self) -> None:
        """Raise, before a prompt is looked at, what ``submit`` would after it: EngineClosed or QueueFull."""
        self.check_health()
        self.engine.check_queue()

    # Requests

    def check_model(self, name: str) -> None:
        if name not in self.names:
            raise ApiError(
                404,
                f"there is no model {name!r:.200} here; the model is called {self.names[0]!r}",
                param="model",
                code="model_not_found",
            )

    def check_prompt(self, prompt: Sequence[int]) -> None:
        if self.max_prompt_tokens is not None and len(prompt) > self.max_prompt_tokens:
            raise ContextOverflow(
                f"the prompt has {len(prompt)} tokens, and this server takes {self.max_prompt_tokens}; shorten it"
            )

    def room(self, num_prompt_tokens: int, most: int) -> int:
        """How many tokens an answer may have that says nothing of it."""
        limit = self.engine.max_model_len
        return most if limit is None else max(1, min(most, limit - num_prompt_tokens))

    def params(self, body: SamplingBody, **more: Any) -> SamplingParams:
        """What ``body`` says of sampling, as the engine takes it; ``more`` comes on top.

        Raises ConfigError for what cannot be followed.
        """
        from paged_backend import SamplingParams

        # OpenAI's default draws tokens as they are.
        fields = {"temperature": 1.0}
        fields |= {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
        if body.logit_bias is not None:
            more["logit_bias"] = _biases(body.logit_bias)
        return SamplingParams(**{**fields, **more})

    def options(self, body: SamplingBody, request: Request) -> dict[str, Any]:
        """What ``body``, the headers and the API key say of the request itself."""
        options = {name: value for name in _OPTIONS if (value := getattr(body, name)) is not None}
        for header, (name, kind) in _HEADERS.items():
            text = request.headers.get(header)
            if text is not None and name not in options:
                options[name] = _number(header, text, kind)
        client = getattr(request.state, "client", None)
        if client is None:
            if body.cache_salt is not None:
                options["cache_salt"] = body.cache_salt
            return options
        if options.get("client_id", client.name) != client.name:
            raise ApiError(400, "client_id is that of the API key; leave it out", param="client_id")
        # Of the two, so that nobody can name another client's.
        salt = json.dumps([client.name, body.cache_salt])
        return {**options, "client_id": client.name, "cache_salt": salt}

    async def submit(self, prompt: Sequence[int], params: SamplingParams, options: Mapping[str, Any]) -> Handle:
        """Queue a prompt; a schema takes a while to be looked at, so not in the event loop."""
        if params.is_constrained:
            return await asyncio.to_thread(self._service.submit, prompt, params, **options)
        return self._service.submit(prompt, params, **options)


def check_end(output: RequestOutput) -> None:
    """Raise ApiError for an output that did not come to its end by itself."""
    if output.finish_reason == "timeout":
        raise timed_out(
            f"the request was not done in time: it had {len(output.token_ids)} tokens; allow more by timeout_s, "
            "queue_timeout_s or deadline_s"
        )
    if output.finish_reason == "abort":
        raise unavailable("the server was shut down before the request was done")


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in given.items()}
    except ValueError:
        raise ApiError(400, "logit_bias must map token ids to numbers", param="logit_bias") from None


def _number(header: str, text: str, kind: type) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if isinstance(value, float) and not 0 < value < math.inf:
        wanted = "an integer" if kind is int else "a positive number of seconds"
        raise ApiError(400, f"header {header} must be {wanted}, got {text!r:.100}")
    return value

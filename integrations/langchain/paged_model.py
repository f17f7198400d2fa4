"""PagedModel: the fields and the way to the engine that the chat class and the LLM class have in common."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from langchain_core.runnables import Runnable
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from paged_backend.integrations.langchain.argument_names import hint
from paged_backend.integrations.langchain.cancel_scope import CancelScope
from paged_backend.integrations.langchain.engines import (
    KEEP_ALIVE,
    EngineHandle,
    handle_of,
    shared_handle,
    without_token,
)
from paged_backend.integrations.langchain.errors import (
    PagedClosedError,
    PagedInvalidRequestError,
    PagedTimeoutError,
    translated,
)

if TYPE_CHECKING:
    from paged_backend import Delta, Handle, RequestOutput, SamplingParams

# Output tokens of a request that does not say; a short model or a long prompt leaves fewer.
DEFAULT_MAX_TOKENS = 1024

SAMPLING = (
    *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n", "ignore_eos"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "stop_token_ids"),
    *("json_schema", "regex", "grammar", "logits_processors"),
)
# What changes when and whether a request is served but not its output, and so takes no part in cache keys.
SCHEDULING = ("priority", "deadline_s", "timeout", "queue_timeout_s", "client_id", "cache_salt")
# Fields that are checked whenever they change.
PARAMETERS = frozenset({*SAMPLING, *SCHEDULING, "logprobs", "top_logprobs", "stop", "keep_alive"})
# Constructor arguments of models behind a service, which have no meaning here.
IGNORED = frozenset({"api_key", "base_url", "max_retries"})
# Fields by which the engine is found.
NAMES_ENGINE = frozenset({"model", "engine_kwargs", "engine", "keep_alive"})

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Texts = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]


class PagedModel(BaseModel):
    """Fields shared by ChatPaged and PagedLLM; each of SAMPLING and SCHEDULING may also be given per call.

    What no request could have is refused wherever it is given, with the reason: a pydantic ValidationError from the
    constructor, PagedInvalidRequestError from an assignment, ``model_copy`` or a call.
    """

    model: str = Field(alias="model_name")
    """A model folder or hub id, for ``Engine.from_pretrained``."""
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of ``Engine.from_pretrained``: the engine's options, and ``model_kwargs``."""
    engine: Any = Field(default=None, exclude=True, repr=False)
    """The shared handle on the engine, found by ``model`` and ``engine_kwargs``; it loads nothing before it is used."""
    keep_alive: Annotated[float, Field(ge=0)] = KEEP_ALIVE
    """Seconds that a loaded engine stays for the next object when the last one is gone; 0 frees it at once. Of objects
    that share an engine, the one that was made or used last decides."""

    max_tokens: int | None = None
    """Most output tokens; by default 1024, or as many as the model has room for."""
    min_tokens: int | None = None
    temperature: float | None = None
    """0 is greedy, the default."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    bad_words: list[Any] | None = None
    stop: Texts | None = Field(default=None, alias="stop_sequences")
    """A text or texts that end the output and are no part of it; those of a call come on top."""
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    n: int | None = None
    """Outputs per prompt; a stream shows the first."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    json_schema: Any = None
    regex: str | None = None
    grammar: str | None = None
    logits_processors: list[Callable[..., Any]] | None = Field(default=None, exclude=True, repr=False)

    priority: int | None = None
    deadline_s: Seconds | None = None
    """Seconds by which the caller would like it done; the scheduling policy may order by it."""
    timeout: Seconds | None = None
    """Seconds after which the request ends with ModelTimeoutError."""
    queue_timeout_s: Seconds | None = None
    client_id: str | None = None
    cache_salt: SecretStr | None = None
    """Only requests of the same salt share cached prefixes."""

    streaming: bool = False
    """Produce the output token by token, for callbacks, also where it is not asked for as a stream."""

    model_config = ConfigDict(populate_by_name=True, protected_namespaces=(), arbitrary_types_allowed=True)

    # Further keyword arguments that a call may have.
    call_arguments: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _take_known_fields(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        names = set(cls.model_fields) | {field.alias for field in cls.model_fields.values() if field.alias}
        for name in values:
            if name not in names and name not in IGNORED:
                raise ValueError(f"unknown field {name!r}{hint(name, names)}")
        kept = {name: value for name, value in values.items() if name not in IGNORED}
        if "engine" in kept:
            # Before others' validators, which ask it.
            kept["engine"] = _as_handle(kept["engine"], kept.get("model", kept.get("model_name")))
        return kept

    @model_validator(mode="after")
    def _begin_with_an_engine(self) -> Self:
        self._check_parameters()
        self._find_engine()
        return self

    def _find_engine(self) -> EngineHandle:
        """The engine that the fields name, which is this model's from now on."""
        handle = _as_handle(self.engine, self.model)
        if handle is None or not (handle.is_given or handle.serves(self.model, self.engine_kwargs)):
            handle = shared_handle(self.model, self.engine_kwargs)
        handle.keep_alive = self.keep_alive
        self.__dict__["engine"] = handle
        return handle

    @classmethod
    def from_engine(cls, engine: Any, **fields: Any) -> Self:
        """A model over an Engine, which a thread then runs for all models over it, or over a started AsyncEngine.

        The thread has the engine to itself, so that other calls of it raise EngineBusy until the last such model is
        gone. Its owner may close it whenever none of them runs a request; they raise EngineClosed from then on.

        Raises PagedClosedError for an engine that is closed.
        """
        if "model" not in fields and "model_name" not in fields:
            tokenizer = _checked_engine(engine).tokenizer
            fields["model"] = getattr(tokenizer, "name_or_path", "") or "paged"
        return cls(engine=engine, **fields)

    # Fields that change

    def __setattr__(self, name: str, value: Any) -> None:
        if name in PARAMETERS:
            super().model_copy(update={name: value})._check_parameters()
        super().__setattr__(name, value)
        if name in NAMES_ENGINE:
            self._follow()

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with some fields replaced, and the engine that these name."""
        update = update or {}
        for name in update:
            if name not in type(self).model_fields:
                raise PagedInvalidRequestError(f"unknown field {name!r}{hint(name, type(self).model_fields)}")
        copied = super().model_copy(update=update, deep=deep)
        if not PARAMETERS.isdisjoint(update):
            copied._check_parameters()
        if not NAMES_ENGINE.isdisjoint(update):
            copied._follow()
        return copied

    def bind(self, **kwargs: Any) -> Any:
        """As every Runnable's; what the result is asked, such as a number of tokens, is told of ``model`` if given."""
        name = kwargs.get("model") or self.model
        bound: Any = self if name == self.model else self.model_copy(update={"model": name})
        return Runnable.bind(bound, **kwargs)

    def _follow(self) -> None:
        """Look again for what is found by the model's name."""
        self._find_engine()

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, without_token(value) if name == "engine_kwargs" else value

    # Parameters

    def _sampling(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """What this model and a call together say of the output, but for the stop texts."""
        names = (*SAMPLING, "logprobs", "top_logprobs")
        chosen = {name: kwargs[name] if kwargs.get(name) is not None else getattr(self, name) for name in names}
        return {name: self._checked(name, value) for name, value in chosen.items() if value is not None}

    def _check_parameters(self) -> None:
        """Raise PagedInvalidRequestError for a field that no request could have."""
        for name in (*SCHEDULING, "keep_alive"):
            self._checked(name, getattr(self, name))
        sampling = self._sampling({})
        sampling.setdefault("max_tokens", max(DEFAULT_MAX_TOKENS, sampling.get("min_tokens", 0)))
        _sampling_params(sampling, self._stops(None))

    def _stops(self, stop: Sequence[str] | str | None) -> list[str]:
        own, more = (self._checked("stop", value) or () for value in (self.stop, stop))
        return list(dict.fromkeys([*own, *more]))

    def _checked(self, name: str, value: Any) -> Any:
        """What the constructor makes of a value, wherever it was given."""
        try:
            return _type_of(type(self), name).validate_python(value)
        except ValidationError as error:
            message = error.errors()[0]["msg"]
            raise PagedInvalidRequestError(f"{name}={value!r:.200} cannot be used: {message}") from error

    def _check_arguments(self, kwargs: Mapping[str, Any]) -> None:
        known = {*SAMPLING, *SCHEDULING, "logprobs", "top_logprobs", "model", "stop", "stream", *self.call_arguments}
        for name in kwargs:
            if name not in known:
                fields = type(self).model_fields
                raise PagedInvalidRequestError(f"unknown argument {name!r}{hint(name, known, fields)}")

    def _key_params(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Everything that may change the output, for caches and traces."""
        params = {"model": kwargs.get("model") or self.model, "engine": self.engine.identity, **self._sampling(kwargs)}
        if params.pop("logits_processors", None):
            # Nobody knows what they do, so no answer stands for another.
            params["logits_processors"] = uuid.uuid4().hex
        return params

    # Requests

    def _handle(self, kwargs: Mapping[str, Any]) -> EngineHandle:
        return self._find_engine().for_model(kwargs.get("model") or self.model)

    def _submit(
        self, service: Any, prompt: list[int], stop: Sequence[str] | None, kwargs: Mapping[str, Any], **more: Any
    ) -> Handle:
        """Queue a prompt; ``more`` are sampling parameters that win over all others."""
        self._check_arguments(kwargs)
        sampling = {**self._sampling(kwargs), **more}
        if "max_tokens" not in sampling:
            limit = service.engine.max_model_len
            room = DEFAULT_MAX_TOKENS if limit is None else min(DEFAULT_MAX_TOKENS, limit - len(prompt))
            sampling["max_tokens"] = max(1, room, sampling.get("min_tokens", 0))
        if not sampling.get("ignore_eos"):
            ends = self._turn_ends(service.engine, kwargs)
            sampling["stop_token_ids"] = [*sampling.get("stop_token_ids", ()), *ends]
        options = {name: kwargs.get(name, getattr(self, name)) for name in SCHEDULING}
        options["timeout_s"] = options.pop("timeout")
        options = {name: value for name, value in options.items() if value is not None}
        if isinstance(options.get("cache_salt"), SecretStr):
            options["cache_salt"] = options["cache_salt"].get_secret_value()
        params = _sampling_params(sampling, self._stops(stop))
        with translated():
            handle: Handle = service.submit(prompt, params, **options)
        CancelScope.register(handle)
        return handle

    def _turn_ends(self, engine: Any, kwargs: Mapping[str, Any]) -> Sequence[int]:
        """Tokens that end an output beside the model's own."""
        return ()

    def _wait(self, handle: Handle) -> list[RequestOutput]:
        with translated():
            handle.result()
        return _complete(handle)

    async def _await(self, handle: Handle) -> list[RequestOutput]:
        with translated():
            await handle
        return _complete(handle)

    def _deltas(self, handle: Handle) -> Generator[Delta, None, None]:
        with translated(), closing(iter(handle)) as deltas:
            yield from deltas
        _complete(handle)

    async def _adeltas(self, handle: Handle) -> AsyncGenerator[Delta, None]:
        with translated():
            async with aclosing(aiter(handle)) as deltas:
                async for delta in deltas:
                    yield delta
        _complete(handle)

    def _tokenize(self, text: str, service: Any = None) -> list[int]:
        """The ids of a text by the tokenizer of a service, by default this model's."""
        from paged_backend import tokenizer_lock

        tokenizer = self._tokenizer(service or self._handle({}).service())
        with tokenizer_lock(tokenizer):
            ids: list[int] = tokenizer(text)["input_ids"]
        return ids

    def _tokenizer(self, service: Any) -> Any:
        tokenizer = service.engine.tokenizer
        if tokenizer is None:
            raise PagedInvalidRequestError("the engine has no tokenizer; give it one: Engine(model, tokenizer)")
        return tokenizer


def _sampling_params(sampling: dict[str, Any], stops: list[str]) -> SamplingParams:
    """What the fields and arguments of a model come to."""
    from paged_backend import SamplingParams

    wants, count = sampling.pop("logprobs", None), sampling.pop("top_logprobs", None)
    if wants or count:
        sampling["logprobs"] = count or 0
    with translated():
        return SamplingParams(stop=stops, **sampling)


def _as_handle(engine: Any, model: Any) -> EngineHandle | None:
    """The handle of a given engine, which goes by the name ``model`` from now on."""
    if engine is None or isinstance(engine, EngineHandle):
        return engine
    _checked_engine(engine)
    handle = handle_of(engine)
    handle.name(model)
    return handle


def _checked_engine(given: Any) -> Any:
    """The Engine that was given, itself or in an AsyncEngine, unless it is something else or closed."""
    engine = getattr(given, "engine", given)
    if not hasattr(engine, "tokenizer"):
        raise PagedInvalidRequestError(
            f"an Engine or an AsyncEngine is wanted, got {given!r:.200}; model='path/to/model' loads one"
        )
    with translated():
        engine.check_open()
    return engine


@cache
def _type_of(cls: type[PagedModel], name: str) -> TypeAdapter[Any]:
    field = cls.model_fields[name]
    annotation: Any = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
    return TypeAdapter(annotation)


def _complete(handle: Handle) -> list[RequestOutput]:
    """The outputs of a request that came to its end by itself."""
    outputs = handle.outputs
    for output in outputs:
        if output.finish_reason == "timeout":
            seconds = (output.metrics.finished_time or 0) - output.metrics.arrival_time
            raise PagedTimeoutError(
                f"request {output.request_id} was not done in time: it had {len(output.token_ids)} tokens after "
                f"{seconds:.3g} s; allow more by timeout, queue_timeout_s or deadline_s"
            )
        if output.finish_reason == "abort":
            raise PagedClosedError(f"request {output.request_id} was cancelled, or the engine closed under it")
    return outputs

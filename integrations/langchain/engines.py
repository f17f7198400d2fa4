"""EngineHandle: the engine behind LangChain models, loaded when it is first needed, and idle after the last model."""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from paged_backend.integrations.langchain.errors import PagedNotFoundError, translated
from paged_backend.integrations.langchain.idle_engines import IdleEngines, close

# Seconds that a loaded engine stays when the last model over it is gone.
KEEP_ALIVE = 300.0

_numbers = itertools.count(1)
_registry_lock = threading.Lock()
_loaded: weakref.WeakValueDictionary[Any, EngineHandle] = weakref.WeakValueDictionary()
_idle = IdleEngines()
_given: weakref.WeakKeyDictionary[Any, weakref.ref[EngineHandle]] = weakref.WeakKeyDictionary()


class EngineHandle:
    """What all models of one name and equal engine options share; its copies are itself.

    Use ``shared_handle`` or ``handle_of``. identity: tells outputs of different engines apart in caches. keep_alive:
    for how many seconds the engine stays, if it was loaded here, when the last model is gone.
    """

    def __init__(self, model: str | None, options: Mapping[str, Any], given: Any = None) -> None:
        self.model = model
        self.options = options
        self.identity = _identity(options) if given is None else f"engine {next(_numbers)} of this process"
        self._lock = threading.Lock()
        self._service: Any = None
        self._given = given
        self._names: set[str] = set()
        # Apart from the handle, whose end it outlives.
        self._terms = {"keep_alive": KEEP_ALIVE}
        self._others: dict[str, EngineHandle] = {}

    @property
    def keep_alive(self) -> float:
        return self._terms["keep_alive"]

    @keep_alive.setter
    def keep_alive(self, seconds: float) -> None:
        self._terms["keep_alive"] = seconds

    @property
    def is_given(self) -> bool:
        """The engine was given, and not loaded by name."""
        return self._given is not None

    @property
    def is_loaded(self) -> bool:
        return self._service is not None

    @property
    def given_engine(self) -> Any:
        """The Engine, if it was given and not loaded by name."""
        return getattr(self._given, "engine", self._given)

    @property
    def max_num_seqs(self) -> int:
        """How many requests can run at once."""
        engine = self._service.engine if self._service is not None else self.given_engine
        if engine is not None:
            return int(engine.config.max_num_seqs)
        from paged_backend import EngineConfig

        return int(self.options.get("max_num_seqs", EngineConfig.max_num_seqs))

    def service(self) -> Any:
        """The running AsyncEngine; loads the model at first, and starts its thread again after a failure."""
        with self._lock, translated():
            if self._service is None:
                self._service = self._start()
            elif not self._is_foreign:
                self._service.start()
            return self._service

    async def aservice(self) -> Any:
        """``service`` without holding up the event loop while a model loads."""
        if self._service is None:
            return await asyncio.to_thread(self.service)
        return self.service()

    def name(self, model: str) -> None:
        """Let an engine that was given go by this name too."""
        self._names.add(model)

    def serves(self, model: str, options: Mapping[str, Any]) -> bool:
        """Whether this is the engine of a model with these options; a given one has its own."""
        if self._given is not None:
            return model in self._names
        return (self.model, _key(self.options)) == (model, _key(options))

    def for_model(self, model: str) -> EngineHandle:
        """The handle for a model with the same options, kept as long as this one if it is another."""
        if self.serves(model, self.options):
            return self
        if self._given is not None:
            raise PagedNotFoundError(
                f"model={model!r} is not the one of the engine that was given; make another object"
            )
        if model not in self._others:
            self._others[model] = shared_handle(model, self.options)
            self._others[model].keep_alive = self.keep_alive
        return self._others[model]

    @property
    def _is_foreign(self) -> bool:
        """The service was started by its owner, who also ends it."""
        return self._given is self._service

    def _start(self) -> Any:
        from paged_backend import AsyncEngine

        if isinstance(self._given, AsyncEngine):
            return self._given
        if self._given is not None:
            service = AsyncEngine(self._given).start()
            weakref.finalize(self, close, service, with_engine=False).atexit = False
            return service
        assert self.model is not None
        key = (self.model, _key(self.options))
        service = _idle.take(key)
        service = service.start() if service is not None else _load(self.model, self.options)
        weakref.finalize(self, _retire, key, service, self.options, self._terms).atexit = False
        return service

    def __copy__(self) -> EngineHandle:
        return self

    def __deepcopy__(self, memo: Any) -> EngineHandle:
        return self

    def __reduce__(self) -> Any:
        raise TypeError("an engine stays in its process; pickle or store the model's name and options instead")

    def __repr__(self) -> str:
        return f"EngineHandle({self.model!r}, loaded={self.is_loaded})"


def shared_handle(model: str, options: Mapping[str, Any]) -> EngineHandle:
    """The one handle for this model and these options of ``Engine.from_pretrained``; nothing is loaded yet."""
    key = (model, _key(options))
    with _registry_lock:
        handle = _loaded.get(key)
        if handle is None:
            handle = _loaded[key] = EngineHandle(model, dict(options))
        return handle


def handle_of(engine: Any) -> EngineHandle:
    """The one handle for an Engine, which is then run by a thread, or for an AsyncEngine, which its owner runs."""
    with _registry_lock:
        reference = _given.get(engine)
        handle = reference() if reference is not None else None
        if handle is None:
            handle = EngineHandle(None, {}, engine)
            _given[engine] = weakref.ref(handle)
        return handle


def load_service(model: str, options: Mapping[str, Any]) -> Any:
    """Load a model folder or hub id and start its engine."""
    from paged_backend import AsyncEngine, Engine

    try:
        engine = Engine.from_pretrained(model, **options)
    except OSError as error:
        raise PagedNotFoundError(f"model={model!r} cannot be loaded: {error}") from error
    return AsyncEngine(engine).start()


def _load(model: str, options: Mapping[str, Any]) -> Any:
    """``load_service``; idle engines make room if there is not enough."""
    if isinstance(options.get("kv_cache_memory"), float):
        # A share of the free memory, of which they would have taken theirs.
        _idle.clear()
    import torch

    try:
        return load_service(model, options)
    except (MemoryError, torch.OutOfMemoryError):
        if not _idle.clear():
            raise
    return load_service(model, options)


def _retire(key: Any, service: Any, options: Mapping[str, Any], terms: Mapping[str, float]) -> None:
    _idle.put(key, service, options, terms["keep_alive"])


def _key(value: Any) -> Any:
    """Something hashable that is equal for equal options; objects are told apart by identity."""
    if isinstance(value, Mapping):
        return tuple(sorted((str(name), _key(item)) for name, item in value.items()))
    if isinstance(value, (list, tuple)):
        return ("sequence", *map(_key, value))
    return value if isinstance(value, (str, int, float, bool, type(None))) else (type(value).__name__, id(value))


def _identity(options: Mapping[str, Any]) -> str:
    return repr(_key(without_token(options)))


def without_token(options: Mapping[str, Any]) -> dict[str, Any]:
    """The same options but for the access token of the hub, which is a secret and changes no output."""
    kwargs = options.get("model_kwargs")
    if not isinstance(kwargs, Mapping) or "token" not in kwargs:
        return dict(options)
    return {**options, "model_kwargs": {name: value for name, value in kwargs.items() if name != "token"}}

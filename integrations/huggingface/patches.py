"""``model.generate(..., cache_impl="paged")``: the two patches of transformers that it takes, put in and taken out."""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from torch import nn
from transformers import GenerationMixin

from paged_backend.errors import ConfigError, UnsupportedCall
from paged_backend.integrations.huggingface.call import GenerateCall, refuse
from paged_backend.integrations.huggingface.decoding import decode
from paged_backend.integrations.huggingface.engines import release_engines

# The call that is on its way from the patched generate to the patched _sample, in this thread.
_current: ContextVar[GenerateCall | None] = ContextVar("paged_backend_generate_call", default=None)


def install() -> None:
    """Make ``cache_impl="paged"`` and ``paged_config`` arguments of every transformers model's ``generate``.

    Calls without them run stock code as before. The patches are the process's: every thread and library gets them, they
    are not counted, and installing twice is installing once.
    """
    global _patches
    with _lock:
        if _patches is None or not _patches.in_place():
            if _patches is not None:
                _patches.active = False
            _patches = _Patches()


def uninstall() -> None:
    """Give ``generate`` back exactly as it was before ``install``; does nothing when it is not installed.

    Once undoes any number of ``install``, whoever made them. Where another library has patched the same function since,
    its patch stays, with a RuntimeWarning, and ours below it lets every call through.
    """
    global _patches
    with _lock:
        if _patches is not None:
            _patches.remove()
            _patches = None


def release(model: Any) -> None:
    """Free the engines, and with them the memory, that ``generate`` keeps for ``model`` or for a model inside it.

    They are freed with the model anyway, and made anew by the next call, from the weights as they are then. Calls that
    still run are finished first. Raises ConfigError for what is no model.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"release takes the model that generate was called on, got a {type(model).__name__}")
    release_engines(model)


class _Patches:
    """The two patched functions of GenerationMixin, and what stood in their places."""

    def __init__(self) -> None:
        self.active = True
        self.originals = {name: vars(GenerationMixin)[name] for name in ("generate", "_sample")}
        self.functions = {
            "generate": self._patch_generate(self.originals["generate"]),
            "_sample": self._patch_sample(self.originals["_sample"]),
        }
        for name, function in self.functions.items():
            setattr(GenerationMixin, name, function)

    def in_place(self) -> bool:
        """Whether calls still come by, as far as other patches that wrap these say so."""
        return all(function in _wrapped(vars(GenerationMixin)[name]) for name, function in self.functions.items())

    def remove(self) -> None:
        self.active = False
        for name, function in self.functions.items():
            if vars(GenerationMixin)[name] is function:
                setattr(GenerationMixin, name, self.originals[name])
            else:
                warnings.warn(
                    f"GenerationMixin.{name} was patched again after paged_backend.install(); that patch stays, "
                    "and paged_backend's below it lets every call through",
                    RuntimeWarning,
                    stacklevel=4,
                )

    def _patch_generate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        names = list(inspect.signature(original).parameters)[1:]

        @functools.wraps(original)
        def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return original(model, *args, **kwargs)
            call = GenerateCall.read(model, {**dict(zip(names, args, strict=False)), **kwargs})
            kwargs.pop("cache_impl", None)
            kwargs.pop("paged_config", None)
            if call is not None and type(model)._sample is not GenerationMixin._sample:
                raise refuse(f"the decoding loop of its own that {type(model).__name__} has", "use another model class")
            token = _current.set(call)
            try:
                result = original(model, *args, **kwargs)
            finally:
                _current.reset(token)
            if call is not None and not call.reached:
                # A kind of generation that is newer than this code.
                raise UnsupportedCall(
                    "generate took a way past the paged engine that paged_backend does not know; "
                    "leave cache_impl out to run stock generate"
                )
            return result

        return generate

    def _patch_sample(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _sample(model: Any, *args: Any, **kwargs: Any) -> Any:
            call = _current.get()
            if not self.active or call is None or call.model is not model:
                return original(model, *args, **kwargs)
            call.reached = True
            return decode(call, *args, **kwargs)

        return _sample


def _wrapped(function: Any) -> Iterator[Any]:
    """The function itself and those it wraps, as functools.wraps tells."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


_lock = threading.Lock()
_patches: _Patches | None = None

"""The engine's errors as LangChain's, so that retries and summaries know what to do; each is both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from langchain_core.exceptions import (
    ContextOverflowError,
    ModelAPIError,
    ModelError,
    ModelInvalidRequestError,
    ModelNotFoundError,
    ModelRateLimitError,
    ModelTimeoutError,
)

from paged_backend.errors import (
    ConfigError,
    ContextOverflow,
    DeadlineExceeded,
    EngineClosed,
    PagedBackendError,
    QueueFull,
    RequestFailed,
    RequestRefused,
    UnsupportedModel,
)


class PagedInvalidRequestError(ModelInvalidRequestError, RequestRefused):
    """Messages, tools or parameters that cannot be served; the message names what, and the fix."""


class PagedContextOverflowError(ContextOverflowError, ContextOverflow):
    """The prompt and ``max_tokens`` do not fit the model or its cache."""


class PagedRateLimitError(ModelRateLimitError, QueueFull):
    """As many requests wait as the engine's ``max_waiting`` allows."""


class PagedTimeoutError(ModelTimeoutError, DeadlineExceeded):
    """The request was not done within its ``timeout``, or the scheduler gave its deadline up."""


class PagedNotFoundError(ModelNotFoundError, ConfigError):
    """There is no such model."""


class PagedClosedError(ModelAPIError, EngineClosed):
    """The engine was closed or failed; an engine that this package loaded starts again with the next request."""


class PagedRequestFailedError(ModelAPIError, RequestFailed):
    """This request failed, in its forward pass or in code of its own; ``__cause__`` says how. Others go on."""


_TRANSLATIONS: list[tuple[tuple[type[Exception], ...], type[Exception]]] = [
    ((ContextOverflow,), PagedContextOverflowError),
    ((QueueFull,), PagedRateLimitError),
    ((RequestRefused, ConfigError, UnsupportedModel), PagedInvalidRequestError),
    ((DeadlineExceeded,), PagedTimeoutError),
    ((EngineClosed,), PagedClosedError),
    ((RequestFailed,), PagedRequestFailedError),
]


@contextmanager
def translated() -> Iterator[None]:
    """Raise the engine's errors as LangChain's."""
    try:
        yield
    except ModelError:
        raise
    except PagedBackendError as error:
        for kinds, translation in _TRANSLATIONS:
            if isinstance(error, kinds):
                raise translation(str(error)) from (error.__cause__ or error)
        raise

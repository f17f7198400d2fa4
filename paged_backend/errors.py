"""Every error this package raises on purpose; each is also the builtin that a caller would catch."""

from __future__ import annotations

from paged_backend.outputs import RequestOutput


class PagedBackendError(Exception):
    """Base of all errors raised on purpose by paged_backend."""


class RequestRefused(PagedBackendError, ValueError):
    """A request was not accepted; nothing was queued and nothing else was touched."""


class QueueFull(RequestRefused):
    """As many requests wait as ``max_waiting`` allows; try again later."""


class ContextOverflow(RequestRefused):
    """A request can never fit the model's positions or the key-value cache; the message gives the numbers."""


class ConfigError(PagedBackendError, ValueError):
    """An option has a value that cannot be used; the message names the field, the value and what is allowed."""


class UnknownPolicy(ConfigError):
    """No policy of that kind has this name; the message lists the known ones."""


class ModelNotFound(ConfigError, OSError):
    """No model is where one was named, or none could be fetched from there; the message says what may be named."""


class UnsupportedModel(PagedBackendError, NotImplementedError):
    """The load probe could not prove that the model runs right on paged attention; the message says why."""


class UnsupportedCall(PagedBackendError, NotImplementedError):
    """``generate`` was asked for something the paged backend does not serve; the message names it."""


class SamplingFailed(PagedBackendError, ValueError):
    """No token could be chosen for a request: its logits, or what its logits processors made of them, are unusable."""


class DeadlineExceeded(PagedBackendError, TimeoutError):
    """A result was asked for that did not arrive in time."""


class NotPicklable(PagedBackendError, TypeError):
    """An engine, a service or a handle cannot go to another process; the message says what can be sent instead."""


class EngineClosed(PagedBackendError, RuntimeError):
    """The engine was closed, or a call came at a moment when it cannot be served."""


class EngineBusy(EngineClosed):
    """A call came in the middle of another one, from inside of it or from another thread."""


class EngineFailed(EngineClosed):
    """The thread that ran the engine is gone; ``__cause__`` is what ended it, and ``start()`` begins anew."""


class RequestFailed(PagedBackendError, RuntimeError):
    """A request ended with ``"error"``; ``__cause__`` is what went wrong, ``output`` what it got before."""

    output: RequestOutput


class DownloadFailed(PagedBackendError, OSError):
    """The sample model cannot be fetched; the message says what to do instead."""


class PluginError(PagedBackendError, RuntimeError):
    """A plugin cannot be loaded, clashes with another one, or broke its contract under ``strict_policies``."""


class IntegrityError(PagedBackendError, AssertionError):
    """The block manager's books do not agree with each other; this is always a bug."""


def contained(error: BaseException) -> Exception:
    """What a request's own code raised, as that request's result: its ``sys.exit()`` ends no other request.

    Raises KeyboardInterrupt, which is meant for the thread and not for the request.
    """
    if isinstance(error, KeyboardInterrupt):
        raise error
    if isinstance(error, Exception):
        return error
    failure = SamplingFailed(f"the request's own code called for an exit: {error!r}")
    failure.__cause__ = error
    return failure

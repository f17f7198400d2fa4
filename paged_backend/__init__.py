"""A paged key-value engine with continuous batching for unchanged transformers models."""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paged_backend.config import EngineConfig as EngineConfig
    from paged_backend.detokenizer import IncrementalDetokenizer as IncrementalDetokenizer
    from paged_backend.detokenizer import tokenizer_lock as tokenizer_lock
    from paged_backend.engine import Engine as Engine
    from paged_backend.handle import Delta as Delta
    from paged_backend.handle import Handle as Handle
    from paged_backend.hookspecs import HOOK_API_VERSION as HOOK_API_VERSION
    from paged_backend.hookspecs import hookimpl as hookimpl
    from paged_backend.integrations.batch_streamer import BatchStreamer as BatchStreamer
    from paged_backend.integrations.huggingface import install as install
    from paged_backend.integrations.huggingface import release as release
    from paged_backend.integrations.huggingface import uninstall as uninstall
    from paged_backend.integrations.paged_cache import PagedCache as PagedCache
    from paged_backend.lockstep import Lockstep as Lockstep
    from paged_backend.request import RequestOutput as RequestOutput
    from paged_backend.sampling_params import SamplingParams as SamplingParams
    from paged_backend.service import AsyncEngine as AsyncEngine
    from paged_backend.shared_engine import SharedEngine as SharedEngine

__version__ = metadata.version("paged-backend")

_HOMES = {
    "AsyncEngine": "paged_backend.service",
    "BatchStreamer": "paged_backend.integrations.batch_streamer",
    "Delta": "paged_backend.handle",
    "Engine": "paged_backend.engine",
    "EngineConfig": "paged_backend.config",
    "HOOK_API_VERSION": "paged_backend.hookspecs",
    "Handle": "paged_backend.handle",
    "IncrementalDetokenizer": "paged_backend.detokenizer",
    "Lockstep": "paged_backend.lockstep",
    "PagedCache": "paged_backend.integrations.paged_cache",
    "RequestOutput": "paged_backend.request",
    "SamplingParams": "paged_backend.sampling_params",
    "SharedEngine": "paged_backend.shared_engine",
    "hookimpl": "paged_backend.hookspecs",
    "install": "paged_backend.integrations.huggingface",
    "release": "paged_backend.integrations.huggingface",
    "tokenizer_lock": "paged_backend.detokenizer",
    "uninstall": "paged_backend.integrations.huggingface",
}
__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    # Names are imported when first used, so that importing the package stays cheap.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

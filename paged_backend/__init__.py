"""A paged key-value engine with continuous batching for unchanged transformers models."""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paged_backend.config import EngineConfig as EngineConfig
    from paged_backend.engine.engine import Engine as Engine
    from paged_backend.hookspecs import HOOK_API_VERSION as HOOK_API_VERSION
    from paged_backend.hookspecs import hookimpl as hookimpl
    from paged_backend.integrations.huggingface.paged_cache import PagedCache as PagedCache
    from paged_backend.integrations.huggingface.patches import install as install
    from paged_backend.integrations.huggingface.patches import release as release
    from paged_backend.integrations.huggingface.patches import uninstall as uninstall
    from paged_backend.integrations.huggingface.streamer import BatchStreamer as BatchStreamer
    from paged_backend.outputs import RequestOutput as RequestOutput
    from paged_backend.request.lockstep import Lockstep as Lockstep
    from paged_backend.sampling.detokenizer import IncrementalDetokenizer as IncrementalDetokenizer
    from paged_backend.sampling.detokenizer import tokenizer_lock as tokenizer_lock
    from paged_backend.sampling.turn_end import turn_end_ids as turn_end_ids
    from paged_backend.sampling_params import SamplingParams as SamplingParams
    from paged_backend.service.async_engine import AsyncEngine as AsyncEngine
    from paged_backend.service.handle import Delta as Delta
    from paged_backend.service.handle import Handle as Handle
    from paged_backend.service.shared_engine import SharedEngine as SharedEngine

__version__ = metadata.version("paged-backend")

_HOMES = {
    "AsyncEngine": "paged_backend.service.async_engine",
    "BatchStreamer": "paged_backend.integrations.huggingface.streamer",
    "Delta": "paged_backend.service.handle",
    "Engine": "paged_backend.engine.engine",
    "EngineConfig": "paged_backend.config",
    "HOOK_API_VERSION": "paged_backend.hookspecs",
    "Handle": "paged_backend.service.handle",
    "IncrementalDetokenizer": "paged_backend.sampling.detokenizer",
    "Lockstep": "paged_backend.request.lockstep",
    "PagedCache": "paged_backend.integrations.huggingface.paged_cache",
    "RequestOutput": "paged_backend.outputs",
    "SamplingParams": "paged_backend.sampling_params",
    "SharedEngine": "paged_backend.service.shared_engine",
    "hookimpl": "paged_backend.hookspecs",
    "install": "paged_backend.integrations.huggingface.patches",
    "release": "paged_backend.integrations.huggingface.patches",
    "tokenizer_lock": "paged_backend.sampling.detokenizer",
    "turn_end_ids": "paged_backend.sampling.turn_end",
    "uninstall": "paged_backend.integrations.huggingface.patches",
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

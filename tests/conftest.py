"""Set up the test process (one thread, no network) and share fixtures."""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Read when torch, tokenizers, huggingface_hub and triton are first imported. None is imported here: the process that
# only hands out tests to workers needs none of them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# A fused multiply-add rounds once where the reference rounds twice.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "0")

# A shell starts what runs in the background with Ctrl-C ignored, which tests send and their programs inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests begin first, so that no worker is left alone with one at the end."""
    items.sort(key=lambda item: [item.get_closest_marker(mark) is None for mark in ("triton_interpreter", "slow")])


def pytest_collection_finish() -> None:
    """What was imported and collected stays: each collection of garbage looks only at what tests made."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Let go of it again, or extension modules report leaks when Python ends."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def one_scan_of_what_is_installed() -> Iterator[None]:
    """Each engine looks for plugins in every installed distribution; for one search path that is done once."""
    scan = importlib.metadata.entry_points

    @functools.cache
    def scanned(path: tuple[str, ...], **chosen: str) -> importlib.metadata.EntryPoints:
        return scan(**chosen)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.metadata, "entry_points", lambda **chosen: scanned(tuple(sys.path), **chosen))
        yield


@pytest.fixture
def tiny_model() -> Callable[..., PreTrainedModel]:
    """Return `make_tiny(family, seed=0, **config_overrides)`."""
    from tiny_models import make_tiny

    return make_tiny

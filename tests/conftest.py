"""Set up the test process (one thread, no network) and share fixtures."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

# Read when torch, tokenizers, huggingface_hub and triton are first imported, so set before any of them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# A fused multiply-add rounds once where the reference rounds twice.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "0")

import pytest
import torch
from tiny_models import make_tiny
from transformers import PreTrainedModel

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
# A shell starts what runs in the background with Ctrl-C ignored, which tests send and their programs inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What runs many tests in a process of its own begins first, so that no worker is left alone with it at the end."""
    items.sort(key=lambda item: item.get_closest_marker("triton_interpreter") is None)


@pytest.fixture
def tiny_model() -> Callable[..., PreTrainedModel]:
    """Return `make_tiny(family, seed=0, **config_overrides)`."""
    return make_tiny

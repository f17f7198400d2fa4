"""The precision that a model computes in: its own, wherever it is called from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

# Those that have an autocast which can be asked for without the device.
_DEVICE_TYPES = ("cpu", "cuda")


@contextmanager
def own_precision() -> Iterator[None]:
    """Compute in the dtypes that tensors have, in a caller's ``torch.autocast`` too.

    What is cached, and what other threads' requests get, must not depend on who happens to run the step.
    """
    with ExitStack() as stack:
        for device_type in _DEVICE_TYPES:
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        yield

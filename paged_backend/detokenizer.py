"""IncrementalDetokenizer: a growing sequence of tokens as text, piece by piece."""

from __future__ import annotations

import threading
import weakref
from typing import Any

_locks: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()
_locks_lock = threading.Lock()


def tokenizer_lock(tokenizer: Any) -> threading.RLock:
    """The one lock of this tokenizer, to hold while using it: fast ones raise "Already borrowed" where threads meet."""
    with _locks_lock:
        return _locks.setdefault(tokenizer, threading.RLock())

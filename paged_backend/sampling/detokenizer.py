"""IncrementalDetokenizer: a growing sequence of tokens as text, piece by piece."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

_REPLACEMENT = "\ufffd"
# The window is cut back to the first number of tokens once it holds the second.
_KEPT_TOKENS, _MAX_TOKENS = 8, 16
# What PreTrainedTokenizerBase.clean_up_tokenization takes spaces out of; " n ' t" in two rounds.
_CLEANED_UP = (" .", " ?", " !", " ,", " ' ", " n't", " n ' t", " 'm", " 's", " 've", " 're")


class IncrementalDetokenizer:
    """Text of tokens as they come, such that the pieces join to what decoding all of them at once gives.

    ``"".join(pieces) + finish()`` equals ``tokenizer.decode(all_tokens, skip_special_tokens=True)``. A piece never
    holds part of a character: text waits while the next tokens could still change it. Only the last few tokens are
    decoded again for each new one, whatever the length of the sequence.

    hold_back: texts, such as stop strings, whose beginnings wait too, until it shows that they are not complete.
    shown: special tokens, by their texts, that are part of the text all the same.
    """

    def __init__(self, tokenizer: Any, hold_back: Iterable[str] = (), shown: Collection[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._lock = tokenizer_lock(tokenizer)
        self._decode_all = _decoder(tokenizer)
        self._byte_ids = _byte_ids(tokenizer)
        self._hidden = hidden_token_ids(tokenizer, shown)
        self._special_ids = set(tokenizer.all_special_ids) if self._hidden is None else self._hidden
        self._held_back = tuple(hold_back)
        if getattr(tokenizer, "clean_up_tokenization_spaces", False):
            self._held_back += _CLEANED_UP
        self._window: list[int] = []
        self._max_tokens = _MAX_TOKENS
        self._in_bytes = False
        self._num_done = 0
        self._num_chars = 0

    def add(self, token_ids: Sequence[int]) -> str:
        """Take in further tokens; returns the text that became certain, perhaps none."""
        self._window.extend(token_ids)
        for token in token_ids:
            if token not in self._special_ids:
                self._in_bytes = token in self._byte_ids
        # A run of byte tokens decodes to characters or, if any byte does not fit, to as many replacements as bytes:
        # nothing of it is certain, nor worth decoding, before it ends.
        if self._in_bytes or not token_ids:
            return ""
        text = self._decode(self._window)
        end = len(text) - text.endswith(_REPLACEMENT)
        if self._held_back:
            end -= _open_suffix(text[:end], self._held_back)
        piece = text[self._num_done : end]
        self._num_done += len(piece)
        self._num_chars += len(piece)
        if len(self._window) > self._max_tokens:
            self._cut_window(text)
        return piece

    def finish(self, text: str | None = None) -> str:
        """The rest: of all tokens, or of ``text``, a text that begins with the pieces so far, such as a final one."""
        if text is not None:
            return text[self._num_chars :]
        return self._decode(self._window)[self._num_done :]

    def _cut_window(self, text: str) -> None:
        rest = text[self._num_done :]
        kept = self._window[-_KEPT_TOKENS:]
        kept_text = self._decode(kept)
        # Without visible text before it the rest would be decoded as the beginning of a text, which may lose a space.
        if len(kept_text) > len(rest) and kept_text.endswith(rest):
            self._window, self._num_done, self._max_tokens = kept, len(kept_text) - len(rest), _MAX_TOKENS
        else:
            self._max_tokens = 2 * len(self._window)

    def _decode(self, token_ids: list[int]) -> str:
        with self._lock:
            return decode_without(self._hidden, self._decode_all, token_ids)


def decode_without(hidden: Collection[int] | None, decode: Callable[..., str], token_ids: Sequence[int]) -> str:
    """The text of the tokens without the ``hidden`` ones; None stands for all special tokens."""
    if hidden is None:
        return decode(token_ids, skip_special_tokens=True)
    return decode([token for token in token_ids if token not in hidden], skip_special_tokens=False)


def hidden_token_ids(tokenizer: Any, shown: Collection[str]) -> frozenset[int] | None:
    """The special tokens other than ``shown``; None for all of them, which tokenizers know by themselves."""
    if not shown:
        return None
    return frozenset(token_id for token_id, text in special_tokens(tokenizer).items() if text not in shown)


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """The tokens that are no part of a text unless they are shown, by their ids."""
    named = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    # Many checkpoints mark tokens as special that they give no name.
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return named | {token_id: str(token) for token_id, token in added.items() if token.special}


def _decoder(tokenizer: Any) -> Callable[..., str]:
    """``tokenizer.decode``; where nobody overrode it, what it ends in for a list of tokens, a third of the time."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    methods = (tokenizer.decode, getattr(tokenizer, "_decode", None))
    stock = [PreTrainedTokenizerBase.decode, getattr(PreTrainedTokenizerFast, "_decode", "gone")]
    is_stock = [getattr(method, "__func__", None) for method in methods] == stock
    cleans_up = getattr(tokenizer, "clean_up_tokenization_spaces", False)
    decode: Callable[..., str] = tokenizer.backend_tokenizer.decode if is_stock and not cleans_up else tokenizer.decode
    return decode


_locks: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()
_known_byte_ids: weakref.WeakKeyDictionary[Any, frozenset[int]] = weakref.WeakKeyDictionary()
_registry_lock = threading.Lock()


def tokenizer_lock(tokenizer: Any) -> threading.RLock:
    """The one lock of this tokenizer, to hold while using it: fast ones raise "Already borrowed" where threads meet."""
    with _registry_lock:
        return _locks.setdefault(tokenizer, threading.RLock())


def _after_fork() -> None:
    # A thread that the child does not have may have held one of them.
    global _registry_lock
    _registry_lock = threading.Lock()
    _locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _byte_ids(tokenizer: Any) -> frozenset[int]:
    """Tokens for single bytes of characters that the vocabulary lacks, in the tokenizers that spell them ``<0xE4>``."""
    with _registry_lock:
        if tokenizer not in _known_byte_ids:
            token_ids = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in range(256)])
            _known_byte_ids[tokenizer] = frozenset(token_ids) - {None, tokenizer.unk_token_id}
        return _known_byte_ids[tokenizer]


def _open_suffix(text: str, patterns: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that begins a pattern without completing it."""
    longest = max((len(pattern) for pattern in patterns), default=0)
    for length in range(min(longest - 1, len(text)), 0, -1):
        suffix = text[-length:]
        if any(len(pattern) > length and pattern.startswith(suffix) for pattern in patterns):
            return length
    return 0

"""TokenBytes: the bytes that each token adds to a text, also where they are part of a character."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenBytes:
    """Call it with a token id; the bytes of a text's tokens, special ones aside, join to the text.

    is_first: nothing comes before the token, where many tokenizers leave a space out. Hold the tokenizer's lock.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Many checkpoints mark tokens as special that they give no name.
        marked = (token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special)
        self.special_ids = frozenset((*tokenizer.all_special_ids, *marked))
        # How a tokenizer spells shows in what it makes of the spellings that there are.
        self._is_byte_level = self._text("a", "Ġa") == "a a"
        self._has_byte_tokens = self._text("a", "<0x41>") == "aA"
        # Pieces stand before another one, for some tokenizers strip the end of a text too.
        self._next = self._text("a", "a").removeprefix("a")

    def __call__(self, token_id: int, *, is_first: bool = False) -> bytes:
        piece = self._tokenizer.convert_ids_to_tokens(token_id)
        # The model's vocabulary may be larger than the tokenizer's, and tiktoken's pieces are bytes.
        if not isinstance(piece, str):
            return piece or b""
        if token_id in self.special_ids:
            return piece.encode()
        byte = _BYTE.fullmatch(piece) if self._has_byte_tokens else None
        if byte is not None:
            return bytes.fromhex(byte[1])
        if self._is_byte_level:
            letters = _byte_letters()
            is_spelt = all(letter in letters for letter in piece)
            return bytes(letters[letter] for letter in piece) if is_spelt else piece.encode()
        text = self._text(piece, "a") if is_first else self._text("a", piece, "a").removeprefix("a")
        return text.removesuffix(self._next).encode()

    def _text(self, *pieces: str) -> str:
        text: str = self._tokenizer.convert_tokens_to_string(list(pieces))
        return text


@cache
def _byte_letters() -> dict[str, int]:
    """GPT-2's letter for each byte: itself if it is visible, else the next one from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + n): byte for n, byte in enumerate(others)}

"""PrefixPins: the beginnings of prompts that callers keep in the cache, whatever becomes of the model."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from paged_backend.errors import RequestRefused
from paged_backend.memory.block_manager import BlockManager
from paged_backend.request.options import check_text

logger = logging.getLogger("paged_backend")


class PrefixPins:
    """Pins prefixes in one block manager after another, as a changed model gets another one."""

    def __init__(self) -> None:
        self._pins: dict[tuple[str | None, tuple[int, ...]], None] = {}

    def pin(self, blocks: BlockManager, token_ids: Sequence[int], salt: str | None, longest: int) -> int:
        """Keep the full blocks of a prefix; returns their tokens.

        Raises RequestRefused when it cannot be pinned, or an unfinished request, which may come to ``longest`` tokens,
        could not fit beside it.
        """
        if salt is not None:
            check_text("cache_salt", salt)
        num_tokens = blocks.pin(token_ids, salt)
        shortage = blocks.shortage(longest)
        if shortage is not None:
            blocks.unpin(token_ids, salt)
            raise RequestRefused(f"an unfinished request could not fit beside the pinned prefix: {shortage}")
        self._pins[salt, tuple(token_ids)] = None
        return num_tokens

    def unpin(self, blocks: BlockManager, token_ids: Sequence[int], salt: str | None) -> bool:
        """Take back ``pin``; False if this prefix is not pinned."""
        if salt is not None:
            check_text("cache_salt", salt)
        size = blocks.block_size

        def full_blocks(tokens: Sequence[int]) -> tuple[int, ...]:
            return tuple(tokens[: len(tokens) // size * size])

        for pinned_salt, pinned in list(self._pins):
            if (pinned_salt, full_blocks(pinned)) == (salt, full_blocks(token_ids)):
                del self._pins[pinned_salt, pinned]
        return blocks.unpin(token_ids, salt)

    def renew(self, blocks: BlockManager) -> None:
        """Pin in ``blocks``, which are new, what was pinned before; what finds no room is given up."""
        for salt, token_ids in list(self._pins):
            try:
                blocks.pin(token_ids, salt)
            except RequestRefused as error:
                logger.warning("a pinned prefix of %d tokens is given up: %s", len(token_ids), error)
                del self._pins[salt, token_ids]

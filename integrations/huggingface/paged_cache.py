"""PagedCache: a transformers Cache that keeps keys and values in blocks, for stock decoding of every kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from paged_backend.errors import ConfigError, ContextOverflow, UnsupportedModel


class PagedCache(Cache):
    """For ``model.generate(..., cache=PagedCache())`` and plain forward calls with ``cache=``.

    The rows of the batch share blocks that are equal by origin: beams fork their block tables instead of copying keys
    and values, and a block is copied only when a row that shares it writes into it. Assisted decoding takes tokens back
    by truncating the tables, and a further call goes on from what is there. All layers hold every token, so that a
    sliding window is a matter of the mask.

    Models whose layers keep more than keys and values, such as the states of convolutions or of linear attention, raise
    UnsupportedModel as soon as they ask for them.

    block_size: tokens per block. num_blocks: how many there are for all rows together; None lets them grow.
    """

    layers: list[Any]

    def __init__(self, block_size: int = 16, num_blocks: int | None = None) -> None:
        for name, value in (("block_size", block_size), ("num_blocks", num_blocks)):
            optional = name == "num_blocks" and value is None
            if not optional and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} must be an int of at least 1, got {value!r:.200}")
        super().__init__(layers=_Layers())
        self.tables = BlockTables(block_size, num_blocks)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store what a layer computed for new tokens, [B, H, T, D]; returns all of its keys and values, [B, H, L, D].

        Raises ContextOverflow, and stores nothing, when ``num_blocks`` are not enough.
        """
        if layer_idx > len(self.layers):
            # Its length counts as that of the whole cache, and it may keep something in the model itself.
            raise _not_kept(f"layer {len(self.layers)} of this model keeps none")
        if layer_idx == len(self.layers):
            self.layers.append(PagedCacheLayer(self.tables))
        keys_and_values: tuple[Tensor, Tensor] = self.layers[layer_idx].update(key_states, value_states)
        return keys_and_values

    def get_conv_state(self, *args: Any, **kwargs: Any) -> Any:
        """Refused, as are all that follow."""
        raise _not_kept("a layer of this model keeps states of convolutions or of linear attention")

    update_conv_state = get_recurrent_state = update_recurrent_state = has_previous_state = get_conv_state

    def update_indexer(self, *args: Any, **kwargs: Any) -> Any:
        """Refused."""
        raise _not_kept("a layer of this model keeps the keys of an indexer")

    def __getattr__(self, name: str) -> Any:
        raise _not_kept(f"this model looks for {name!r}")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row r goes on from what row ``beam_idx[r]`` holds."""
        self.tables.select(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows, in this order."""
        rows = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        self.tables.select(rows.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Put ``repeats`` copies of each row behind each other."""
        self.tables.select([row for row in range(len(self.tables.rows)) for _ in range(repeats)])

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens of every row.

        A positive number is how many to keep, which is what early versions of transformers 5 call it with.
        """
        kept = tokens_to_remove if tokens_to_remove > 0 else max(0, self.tables.length + tokens_to_remove)
        self.tables.truncate(min(kept, self.tables.length))
        for layer in self.layers:
            layer.length = min(layer.length, self.tables.length)

    def reset(self) -> None:
        """Forget everything."""
        self.tables.clear()
        for layer in self.layers:
            layer.length = 0

    @property
    def num_used_blocks(self) -> int:
        """Blocks that some row holds, in each layer."""
        return len(self.tables.owners)


class BlockTables:
    """Which blocks each row of the batch holds; rows are equally long, as in every batch of stock's.

    rows: the block ids of each row. owners: how many rows hold a block. length: tokens in each row.
    """

    def __init__(self, block_size: int, num_blocks: int | None) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.rows: list[list[int]] = []
        self.owners: Counter[int] = Counter()
        self.length = 0
        self._free: list[int] = []
        self._num_made = 0
        self._step: Step | None = None

    def extend(self, start: int, count: int, num_rows: int, device: torch.device) -> Step:
        """Make room for ``count`` tokens behind the first ``start`` of each row; every layer calls it in its turn."""
        if self._step is not None and self.length == start + count and self._step.start == start:
            return self._step.on(device)
        if start != self.length or (self.rows and num_rows != len(self.rows)):
            raise ValueError(
                f"keys and values of {num_rows} rows behind {start} tokens do not go on from the cache's "
                f"{len(self.rows)} rows of {self.length} tokens; call reset() before another batch"
            )
        self._check_room(count, num_rows)
        if not self.rows:
            self.rows = [[] for _ in range(num_rows)]
        copies = [] if start % self.block_size == 0 else [self._own_last(row) for row in self.rows]
        for row in self.rows:
            row += [self._take() for _ in range(self._blocks_for(start + count) - len(row))]
        self.length = start + count
        self._step = Step(start, count, self.block_size, self.rows, [pair for pair in copies if pair], device)
        return self._step

    def _blocks_for(self, length: int) -> int:
        return -(-length // self.block_size)

    def _check_room(self, count: int, num_rows: int) -> None:
        if self.num_blocks is None:
            return
        need = num_rows * (self._blocks_for(self.length + count) - self._blocks_for(self.length))
        if self.length % self.block_size:
            # Of the rows that share their last block all but one copy it.
            need += sum(self.owners[block] - 1 for block in {row[-1] for row in self.rows})
        left = self.num_blocks - len(self.owners)
        if need > left:
            raise ContextOverflow(
                f"{count} more tokens for {num_rows} rows need {need} blocks of {self.block_size} tokens; {left} of "
                f"{self.num_blocks} are free, so raise num_blocks"
            )

    def _own_last(self, row: list[int]) -> tuple[int, int] | None:
        """Give the row a copy of its last block if others hold it too: (from, to), or None."""
        last = row[-1]
        if self.owners[last] == 1:
            return None
        self.owners[last] -= 1
        row[-1] = self._take()
        return last, row[-1]

    def _take(self) -> int:
        if not self._free:
            self._free.append(self._num_made)
            self._num_made += 1
        block = self._free.pop()
        self.owners[block] = 1
        return block

    def select(self, rows: Sequence[int]) -> None:
        """Row r becomes what row ``rows[r]`` was."""
        self._replace([list(self.rows[row]) for row in rows] if self.rows else [])

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` tokens of each row."""
        self.length = length
        self._replace([row[: self._blocks_for(length)] for row in self.rows])

    def clear(self) -> None:
        self.length = 0
        self._replace([])

    def _replace(self, rows: list[list[int]]) -> None:
        held = Counter(block for row in rows for block in row)
        self._free += sorted(set(self.owners) - set(held), reverse=True)
        self.rows, self.owners, self._step = rows, held, None


class Step:
    """Where the tokens of one forward pass go and what is read with them, the same in every layer.

    tables: [B, N] block ids. blocks, offsets: [B * T], the places of new tokens, row by row. copies: blocks to copy
    first, as (from, to). num_blocks: blocks that a layer must have.
    """

    def __init__(
        self,
        start: int,
        count: int,
        block_size: int,
        rows: Sequence[Sequence[int]],
        copies: Sequence[tuple[int, int]],
        device: torch.device,
    ) -> None:
        self.start = start
        self.length = start + count
        self.copies = copies
        # There is none when an empty cache is given no tokens, which models say themselves.
        self.num_blocks = 1 + max((max(row) for row in rows if row), default=-1)
        positions = torch.arange(start, start + count, device=device)
        self.tables = torch.tensor(rows, dtype=torch.int64, device=device)
        self.blocks = self.tables[:, positions // block_size].flatten()
        self.offsets = (positions % block_size).repeat(len(rows))

    def on(self, device: torch.device) -> Step:
        """Itself, its tensors moved to where a layer is."""
        if self.tables.device != device:
            self.tables, self.blocks, self.offsets = (t.to(device) for t in (self.tables, self.blocks, self.offsets))
        return self


class PagedCacheLayer(CacheLayerMixin):
    """One layer's blocks: keys and values [num_blocks, H, block_size, D] each, of whatever width the layer has."""

    is_sliding = False
    is_croppable = True

    def __init__(self, tables: BlockTables) -> None:
        super().__init__()
        self.tables = tables
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = _no_blocks(key_states, self.tables.block_size)
        self.values = _no_blocks(value_states, self.tables.block_size)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        num_rows, _, count, _ = key_states.shape
        step = self.tables.extend(self.length, count, num_rows, key_states.device)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.length = step.length
        self.keys, keys = self._store(self.keys, key_states, step)
        self.values, values = self._store(self.values, value_states, step)
        return keys, values

    def _store(self, pool: Any, states: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """The pool with the new tokens in it, grown where it has to, and all tokens of all rows."""
        num_rows, num_heads, count, width = states.shape
        if step.num_blocks > len(pool):
            most = self.tables.num_blocks
            size = max(step.num_blocks, len(pool) * 3 // 2) if most is None else most
            pool = torch.cat([pool, pool.new_zeros(size - len(pool), *pool.shape[1:])])
        for source, target in step.copies:
            pool[target] = pool[source]
        pool[step.blocks, :, step.offsets] = states.transpose(1, 2).reshape(num_rows * count, num_heads, width)
        num_slots = step.tables.shape[1] * self.tables.block_size
        everything = pool[step.tables].transpose(1, 2).reshape(num_rows, num_heads, num_slots, width)
        return pool, everything[:, :, : step.length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        most = self.tables.num_blocks
        return -1 if most is None else most * self.tables.block_size // max(1, len(self.tables.rows))

    # Its name in early versions of transformers 5.
    get_max_cache_shape = get_max_length

    def __getattr__(self, name: str) -> Any:
        raise _not_kept(f"a layer of this model looks for {name!r}")


class _Layers(list[Any]):
    """The layers that have keys and values."""

    def __getitem__(self, index: Any) -> Any:
        try:
            return super().__getitem__(index)
        except IndexError:
            raise _not_kept(f"layer {index} of this model keeps something else before them") from None


class _NotKept(UnsupportedModel, AttributeError):
    """Also what Python expects of an attribute that is not there, so that asking whether it is goes on working."""


def _not_kept(what: str) -> _NotKept:
    return _NotKept(
        f"PagedCache holds the keys and values of every layer and nothing else, and {what}; leave the cache out, and "
        "stock makes the one that the model needs"
    )


def _no_blocks(states: Tensor, block_size: int) -> Tensor:
    return states.new_zeros(0, states.shape[1], block_size, states.shape[3])

"""copy_blocks: whole blocks to other places of the same caches, for copy on write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


def copy_blocks(
    caches: Iterable[torch.Tensor],
    source_blocks: torch.Tensor | Sequence[int],
    target_blocks: torch.Tensor | Sequence[int],
) -> None:
    """Copies block source_blocks[i] over block target_blocks[i] in every cache, in place.

    caches: tensors whose first dimension is num_blocks (keys, values and their scales, of every layer);
    source_blocks, target_blocks: int64 of equal length; all sources are read before any target is written.
    Raises ValueError when the two differ in length.
    """
    # On the host, whatever the default device is.
    source = torch.as_tensor(source_blocks, dtype=torch.long, device="cpu")
    target = torch.as_tensor(target_blocks, dtype=torch.long, device="cpu")
    if source.shape != target.shape or source.dim() != 1:
        raise ValueError(
            "source_blocks and target_blocks must be flat and of equal length, "
            f"got {tuple(source.shape)} and {tuple(target.shape)}"
        )
    if not source.numel():
        return
    for cache in caches:
        cache[target.to(cache.device)] = cache[source.to(cache.device)]

"""KVGroup: the layers whose keys and values share a block table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Whose package takes torch, which the books of blocks do without.
    from paged_backend.kernels import MaskRule


@dataclass(frozen=True)
class KVGroup:
    """The layers that share one mask rule, hence one block table per request and one share of the pool."""

    rule: MaskRule
    layers: tuple[int, ...]
    bytes_per_token: int

    def blocks_for(self, num_tokens: int, block_size: int, chunk: int) -> int:
        """The most blocks a sequence of ``num_tokens`` holds at once when fed ``chunk`` tokens a step."""
        whole = -(-num_tokens // block_size)
        if self.rule.kind == "full":
            return whole
        # What the step's first query still sees, the step's own tokens, and a block cut at either end.
        return min(whole, -(-(self.rule.size + chunk) // block_size) + 1)

"""Compute: how many operations a model's tokens take, and how many the machine does."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

# Seconds that each size of product is timed for.
_TIMED_S = 0.2
_SIZES = (256, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class TokenCost:
    """Floating-point operations of a token: ``flops``, and ``flops_per_context`` more for each token it attends to."""

    flops: float
    flops_per_context: float

    def of(self, num_prompt_tokens: int, num_output_tokens: int) -> float:
        """Of a whole request, each of whose tokens but the last goes through the model once."""
        count = num_prompt_tokens + num_output_tokens - 1
        return self.flops * count + self.flops_per_context * count * (count + 1) / 2

    @classmethod
    def of_model(cls, model: Any) -> TokenCost:
        """Two operations for each weight that a token is multiplied by, four for each number of a head's key.

        Of experts those are counted that a token goes through. Windows and recurrent states are left out of account.
        """
        import torch

        config = model.config.get_text_config()
        used = float(getattr(config, "num_experts_per_tok", None) or 1)
        counts = (getattr(config, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts"))
        experts = next((count for count in counts if count), 1)
        weights = 0.0
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                if isinstance(module, torch.nn.Embedding) or parameter.dim() < 2:
                    continue
                weights += parameter.numel() * (used / experts if parameter.dim() == 3 else 1.0)
        # A model may have no attention at all.
        heads = getattr(config, "num_attention_heads", None) or 0
        dim = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
        return cls(2 * weights, 4.0 * config.num_hidden_layers * heads * dim)


def flops_ceiling(dtypes: Iterable[Any], device: Any) -> float:
    """Operations a second of the fastest square matrix product of this machine, in the best of ``dtypes``."""
    import torch

    best = 0.0
    for dtype, size in itertools.product(dtypes, _SIZES):
        left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        left @ right
        count, start = 0, time.perf_counter()
        while (seconds := time.perf_counter() - start) < _TIMED_S:
            left @ right
            if left.device.type == "cuda":
                torch.cuda.synchronize(left.device)
            count += 1
        best = max(best, 2 * size**3 * count / seconds)
    return best

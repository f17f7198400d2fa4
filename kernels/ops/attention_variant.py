"""AttentionVariant: how a layer attends."""

from __future__ import annotations

from typing import NamedTuple

import torch

from paged_backend.kernels.mask_rule import FULL, MaskRule


class AttentionVariant(NamedTuple):
    """How a layer attends: who sees whom, and what becomes of the scores.

    scale: factor of each product of query and key. mask: the keys that a query sees. softcap: scaled scores become
    ``softcap * tanh(score / softcap)``, unless None. sinks: ``[num_heads]`` floats, a logit per head that takes part in
    the softmax and brings no value (gpt_oss), or None.

    Read it by name: it may gain fields, whose defaults leave attention as it was.
    """

    scale: float
    mask: MaskRule = FULL
    softcap: float | None = None
    sinks: torch.Tensor | None = None

"""SwapKind: which modules a kind of swap knows, what it proposes in their place, and how a proposal is tried."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paged_backend.swaps.fused import Fused
from paged_backend.swaps.weights import NoMatch, Packing

# Spread of the drawn hidden states: small, so that in half precisions a layer's residual does not drown what it adds.
_SPREAD = 0.05


@dataclass(frozen=True)
class ModuleCall:
    """How the probe saw a module called: the one tensor given, the keywords, and what came back.

    far: the keywords of a call for as many tokens at far positions, where the module attends.
    """

    x: torch.Tensor
    kwargs: dict[str, Any]
    output: Any
    far: dict[str, Any] | None = None

    @classmethod
    def of(
        cls, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, far: dict[str, Any] | None = None
    ) -> ModuleCall:
        """Raises NoMatch for any other call."""
        if len(args) != 1 or not isinstance(args[0], torch.Tensor) or not args[0].is_floating_point():
            raise NoMatch("it is not called with one tensor and keywords")
        return cls(args[0], kwargs, output, far)

    def drawn(self) -> torch.Tensor:
        """Small numbers of the shape and dtype of the tensor given, always the same ones."""
        drawn = torch.randn(
            self.x.shape, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float32, device="cpu"
        )
        return drawn.mul_(_SPREAD).to(self.x.dtype)


@dataclass(frozen=True)
class Trial:
    """What a replacement is given, and what the original made of it.

    base: what the original adds to, of which distances are no share. leniency: how many times as far apart as usual
    results may be.
    """

    x: torch.Tensor
    kwargs: dict[str, Any]
    expected: torch.Tensor
    base: torch.Tensor | None = None
    leniency: float = 1

    def distance(self, replacement: nn.Module) -> float:
        """How far the replacement's results are from the original's."""
        return self.distance_of(first_tensor(replacement(self.x, **self.kwargs)))

    def distance_of(self, actual: torch.Tensor) -> float:
        """How far ``actual`` is from the original's results, as a share of what those add to the base.

        In the worst of the rows, where the median row counts five times: a single row may owe its distance to a number
        that rounding tipped.
        """
        rows, wanted = actual.double().flatten(0, -2), self.expected.double().flatten(0, -2)
        added = wanted if self.base is None else wanted - self.base.double().flatten(0, -2)
        distances = (rows - wanted).norm(dim=-1) / added.norm(dim=-1)
        return max(distances.median().item(), distances.max().item() / 5) / self.leniency


class SwapKind(ABC):
    """One kind of swap. It lies in the file of its name, whose ``KIND`` is its class, and is named in config.SWAPS."""

    def __init__(self, packing: Packing) -> None:
        self.packing = packing

    @abstractmethod
    def wants(self, module: nn.Module) -> bool:
        """Whether ``module``, on which blocks hang where it attends, may be of this kind, to go by its looks."""

    @abstractmethod
    def propose(self, module: nn.Module, call: ModuleCall) -> Iterator[Fused]:
        """What might equal ``module``, which was called so, one after the other; NoMatch with the reason if nothing."""

    def trials(self, module: nn.Module, call: ModuleCall) -> list[Trial]:
        """What a proposal for ``module`` has to get right. Raises NoMatch for a call that no proposal can take."""
        if call.kwargs:
            raise NoMatch(f"it is called with keywords: {', '.join(call.kwargs)}")
        drawn = call.drawn()
        return [Trial(drawn, call.kwargs, first_tensor(module.forward(drawn, **call.kwargs)))]


def first_tensor(output: Any) -> torch.Tensor:
    """What a module returned, alone or first of a tuple."""
    tensor: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return tensor

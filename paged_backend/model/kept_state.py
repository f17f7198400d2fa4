"""How a module that keeps recurrent state is given one and gives the next, in transformers' two ways of keeping it."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from paged_backend.model.state_rows import StateRows

Forward = Callable[..., Any]
State = torch.Tensor | StateRows
# Where a state lies: in the cache of a layer, or in a module.
Path = tuple[str, int | None]


# The name under which the arguments of ``*args`` are, which no parameter has.
POSITIONAL = "*"


class KeptState(ABC):
    """The states of one module, in the order of ``paths``."""

    paths: Sequence[Any]

    @abstractmethod
    def call(
        self, forward: Forward, arguments: dict[str, Any], states: Sequence[State] | None
    ) -> tuple[Any, list[State]]:
        """Run ``forward`` on sequences whose ``states`` are ``[B, ...]`` each, or that begin: its output, and the
        states after. The states given may be written over."""


class CachedState(KeptState):
    """States in the cache object that a module is given: the tensors of its layer other than keys and values.

    argument: the parameter that takes the cache. fresh, used: a cache that has seen nothing, and one that this module
    has written to, of which every call gets a copy that shows its sequences alone. layer_idx: the module's own.
    """

    def __init__(self, argument: str, fresh: Any, used: Any, layer_idx: int, paths: Sequence[Path]) -> None:
        self.argument, self.fresh, self.used, self.layer_idx = argument, fresh, used, layer_idx
        self.paths = tuple(paths)

    def call(
        self, forward: Forward, arguments: dict[str, Any], states: Sequence[State] | None
    ) -> tuple[Any, list[State]]:
        view = self._view(self.fresh if states is None else self.used)
        for path, state in zip(self.paths, states or (), strict=states is not None):
            self._put(view, path, state)
        output = _call(forward, arguments | {self.argument: view})
        return output, [self.get(view, path) for path in self.paths]

    def _view(self, cache: Any) -> Any:
        """A copy of ``cache`` whose states of this layer can be changed without changing it."""
        view = copy.copy(cache)
        view.__dict__ |= {name: list(value) for name, value in vars(cache).items() if type(value) is list}
        if self.layer_idx < len(view.layers):
            layer = view.layers[self.layer_idx] = copy.copy(view.layers[self.layer_idx])
            layer.__dict__ |= {name: dict(value) for name, value in vars(layer).items() if type(value) is dict}
        return view

    def _put(self, view: Any, path: Path, state: State) -> None:
        name, index = path
        if index is None:
            getattr(view, name)[self.layer_idx] = state
        else:
            getattr(view.layers[self.layer_idx], name)[index] = state

    def get(self, view: Any, path: Path) -> torch.Tensor:
        """The state at ``path`` in a cache."""
        name, index = path
        if index is None:
            state: torch.Tensor = getattr(view, name)[self.layer_idx]
        else:
            state = getattr(view.layers[self.layer_idx], name)[index]
        return state


class Attribute(NamedTuple):
    """Where a module holds a state."""

    module: nn.Module
    name: str

    @property
    def value(self) -> Any:
        return self.module.__dict__[self.name]

    def changed(self, before: torch.Tensor) -> bool:
        """Whether the state is another one than ``before``; a table that was made for good is not."""
        return self.value.shape == before.shape and not torch.equal(self.value, before)


class HeldState(KeptState):
    """States that a module, or a child of it, holds in attributes."""

    def __init__(self, paths: Sequence[Attribute], *, takes_use_cache: bool) -> None:
        self.paths = tuple(paths)
        self._flags = {"use_cache": True} if takes_use_cache else {}

    def call(
        self, forward: Forward, arguments: dict[str, Any], states: Sequence[State] | None
    ) -> tuple[Any, list[State]]:
        for index, path in enumerate(self.paths):
            path.module.__dict__[path.name] = None if states is None else states[index]
        try:
            output = _call(forward, arguments | self._flags)
            return output, [path.value for path in self.paths]
        finally:
            for path in self.paths:
                path.module.__dict__[path.name] = None


def _call(forward: Forward, arguments: dict[str, Any]) -> Any:
    named = dict(arguments)
    return forward(*named.pop(POSITIONAL, ()), **named)

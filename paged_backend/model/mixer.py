"""Mixer: stands in for the forward of a module that keeps recurrent state, and gives each sequence its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from paged_backend.memory.state_cache import StateCache, StateSpec
from paged_backend.memory.state_slots import NO_SLOT
from paged_backend.model.batch import Batch
from paged_backend.model.kept_state import POSITIONAL, Attribute, CachedState, HeldState, KeptState, State
from paged_backend.model.state_rows import StateRows

# How a chunk that goes on from a state is run: in one call, or token by token as decodes are.
NATIVE, STEPPED = "native", "stepped"
# (the index of an argument or its name, then where in it) of what has a row per token.
Place = tuple[Any, ...]


class StateContext(NamedTuple):
    """What the mixers of a running forward pass share."""

    batch: Batch
    cache: StateCache


class DecodeCall(NamedTuple):
    """A call of a mixer's module for decodes: its arguments, the states ``[B, ...]`` before, and what came of it."""

    arguments: dict[str, Any]
    before: list[torch.Tensor]
    output: Any
    after: list[torch.Tensor]


class Mixer:
    """Calls the module once for all decodes of a batch, and once for each span of a prefill chunk.

    Outside a step of the engine it calls the module as it was called. specs: the states; first: the place of the first
    of them in the cache. per_token: which of its arguments have a row for each token.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        state: KeptState,
        specs: Sequence[StateSpec],
        first: int,
        per_token: frozenset[Place],
    ) -> None:
        self.name = name
        self.specs = tuple(specs)
        self.mode = NATIVE
        # Set by the model runner during a forward pass.
        self.context: StateContext | None = None
        self.forward: Callable[..., Any] = module.forward
        self._state = state
        self._indices = range(first, first + len(self.specs))
        self._per_token = per_token
        self._signature = inspect.signature(self.forward)
        self._last: Batch | None = None
        # What is called for decodes, and which states it updates where they lie.
        self._decode = self.forward
        self._in_place: frozenset[int] = frozenset()
        # Told of every call for decodes, if it is set.
        self.observer: Callable[[DecodeCall], None] | None = None
        module.__dict__["forward"] = self

    @property
    def recurrent(self) -> list[int]:
        """The numbers of the states that transformers' caches call recurrent."""
        if not isinstance(self._state, CachedState):
            return []
        return [number for number, (kind, _) in enumerate(self._state.paths) if kind == "recurrent_states"]

    @property
    def held(self) -> Sequence[Attribute]:
        """The attributes in which the module itself keeps states."""
        return self._state.paths if isinstance(self._state, HeldState) else ()

    def decode_with(self, forward: Callable[..., Any], in_place: Collection[int]) -> None:
        """Call ``forward`` for decodes, which takes some of the states, by number, as StateRows."""
        self._decode, self._in_place = forward, frozenset(in_place)

    def decode(self, arguments: dict[str, Any], states: Sequence[State]) -> tuple[Any, list[State]]:
        """The module's output for a row of one token each, and the states after."""
        return self._state.call(self._decode, arguments, states)

    def __deepcopy__(self, memo: dict[int, Any]) -> Mixer:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.context is None:
            return self.forward(*args, **kwargs)
        batch, cache = self.context
        if batch is self._last:
            raise RuntimeError(f"{self.name} runs more than once a forward pass, with one state")
        spans = batch.spans
        if spans is None:
            raise RuntimeError(f"{self.name} keeps state, and the batch does not say where")
        self._last = batch
        arguments = named_arguments(self._signature, args, kwargs)
        n = batch.num_decodes
        parts = []
        if n:
            decoded = self._run(cache, arguments, slice(0, n), spans.sources, spans.targets, as_rows=True)
            parts.append(_transposed(decoded))
        for begin, end, source, target in spans.chunks:
            targets = torch.tensor([target])
            sources = None if source == NO_SLOT else torch.tensor([source])
            step = 1 if sources is not None and self.mode == STEPPED else end - begin
            for at in range(begin, end, step):
                parts.append(self._run(cache, arguments, slice(at, at + step), sources, targets))
                # The next token goes on from what this one left.
                sources = targets
        return _joined(parts)

    def _run(
        self,
        cache: StateCache,
        arguments: dict[str, Any],
        tokens: slice,
        sources: torch.Tensor | None,
        targets: torch.Tensor,
        *,
        as_rows: bool = False,
    ) -> Any:
        """Call the module on some of the tokens, as one sequence or as a row each."""
        taken = {name: self._taken(value, (name,), tokens, as_rows) for name, value in arguments.items()}
        if as_rows and sources is not None:
            output, after = self._run_decodes(cache, taken, sources, targets)
        else:
            read = None if sources is None else [cache.read(index, sources) for index in self._indices]
            output, after = self._state.call(self.forward, taken, read)
        for index, rows in zip(self._indices, after, strict=True):
            if not isinstance(rows, StateRows):
                cache.write(index, targets, rows)
        return output

    def _run_decodes(
        self, cache: StateCache, arguments: dict[str, Any], sources: torch.Tensor, targets: torch.Tensor
    ) -> tuple[Any, list[State]]:
        states: list[State] = []
        for number, index in enumerate(self._indices):
            in_place = number in self._in_place
            pool = cache.pools[index]
            states.append(StateRows.of(pool, sources, targets) if in_place else cache.read(index, sources))
        if self.observer is None:
            return self.decode(arguments, states)
        # The call may write over them.
        before = [state.clone() for state in states if isinstance(state, torch.Tensor)]
        output, after = self.decode(arguments, states)
        left = [state for state in after if isinstance(state, torch.Tensor)]
        self.observer(DecodeCall(arguments, before, output, left))
        return output, after

    def _taken(self, value: Any, place: Place, tokens: slice, as_rows: bool) -> Any:
        if place in self._per_token:
            return value[0, tokens].unsqueeze(1) if as_rows else value[:, tokens]
        if type(value) in (tuple, list):
            return type(value)(self._taken(v, (*place, i), tokens, as_rows) for i, v in enumerate(value))
        if type(value) is dict:
            return {key: self._taken(v, (*place, key), tokens, as_rows) for key, v in value.items()}
        return value


def named_arguments(signature: inspect.Signature, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, those of ``**kwargs`` among them, those of ``*args`` as a tuple of that name."""
    bound = signature.bind(*args, **kwargs)
    arguments = dict(bound.arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= arguments.pop(parameter.name, {})
        elif parameter.kind is parameter.VAR_POSITIONAL:
            arguments[POSITIONAL] = arguments.pop(parameter.name, ())
    return arguments


def shapes_of(arguments: dict[str, Any]) -> dict[Place, tuple[int, ...]]:
    """The shape of each tensor among ``arguments``, in tuples, lists and dictionaries too, by its place."""
    shapes = {}
    pending: list[tuple[Place, Any]] = [((name,), value) for name, value in arguments.items()]
    while pending:
        place, value = pending.pop()
        if isinstance(value, torch.Tensor):
            shapes[place] = tuple(value.shape)
        elif type(value) in (tuple, list):
            pending += [((*place, index), item) for index, item in enumerate(value)]
        elif type(value) is dict:
            pending += [((*place, key), item) for key, item in value.items()]
    return shapes


def _transposed(output: Any) -> Any:
    """An output of rows of one token each, as one of a row of tokens."""
    if isinstance(output, tuple):
        return tuple(map(_transposed, output))
    return output.transpose(0, 1) if isinstance(output, torch.Tensor) and output.dim() > 1 else output


def _joined(parts: Sequence[Any]) -> Any:
    """Outputs for some tokens each, as one for all; of a tuple, what has no row per token is left out."""
    if not isinstance(parts[0], tuple):
        return parts[0] if len(parts) == 1 else torch.cat(list(parts), 1)
    hidden = [part[0] for part in parts]
    columns = []
    for column in zip(*parts, strict=True):
        per_token = all(
            isinstance(item, torch.Tensor) and item.dim() >= 3 and item.shape[:2] == rows.shape[:2]
            for item, rows in zip(column, hidden, strict=True)
        )
        columns.append(torch.cat(column, 1) if per_token else None)
    return tuple(columns)

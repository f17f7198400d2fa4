"""Fingerprint: whether a model still is what it was, without reading all of its weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from paged_backend.model.foreign_code import code_identities, hooked
from paged_backend.model.model_copy import accelerate_hooks, shared_tensors

# Tensors of up to this many elements are compared whole: norms, biases, small adapters.
_WHOLE = 1 << 14
# Elements read of a larger one: an in-place change of the whole tensor cannot hide from them.
_SAMPLES = 64
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SCALARS = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device})
_CONTAINERS = (dict, list, tuple, set, frozenset)
# Entries of a module's __dict__ that are described apart or that a forward pass of the twin does not read.
_SKIPPED = frozenset({"training", "_parameters", "_buffers", "_modules", "_compiled_call_impl"})


class Fingerprint:
    """Describes a model: its modules, their plain attributes and hooks, its tensors and a sample of their contents.

    The training flag is left out: the twin is in eval mode whatever the model is in. Tensors are told by identity,
    memory, dtype, device and version; since ``p.data.add_()`` bumps no version, samples of the contents are compared
    too: tensors of up to 16,384 elements whole, larger ones in 64 elements spread over them. An edit through ``.data``
    of a larger one that touches none of those stays unseen; to read all weights would cost a step's time each time.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._kept: frozenset[tuple[str, str]] = frozenset()
        self._facts = [fact for _, fact in _facts(model)]
        self._weights = [_samples(tensor) for tensor in _weights(model)]
        self._contents = _contents(self._weights)
        # Views share the counter of what they view.
        self._counted = [view for views in self._weights for view in views if not view.is_inference()]
        self._versions = self._count_versions()
        self._buffers = _contents([_samples(tensor) for tensor in _written_buffers(model)])

    def leave_out(self, model: PreTrainedModel, kept: frozenset[tuple[str, str]]) -> None:
        """Do not look at these attributes, each the name of a module and its own, in which ``model`` keeps states.

        It is as it was when this was made.
        """
        if kept:
            self._kept = kept
            self._facts = [fact for _, fact in _facts(model, kept)]

    def was_written(self) -> bool:
        """Whether a weight saw an in-place operation since; costs a few hundredths of a millisecond."""
        return self._count_versions() != self._versions

    def _count_versions(self) -> int:
        # Counters only grow, so that no two changes cancel out.
        return sum(view._version for view in self._counted)

    def difference(self, model: PreTrainedModel) -> str | None:
        """What changed since, in words, or None. Waits for the device once per dtype and device."""
        facts = [fact for _, fact in _facts(model, self._kept)]
        if facts != self._facts:
            return self._first_difference(model)
        # The weights are the same memory as before, so the views taken then still read them.
        if not _equal(_contents(self._weights), self._contents):
            return "weights were modified in place"
        if not _equal(_contents([_samples(tensor) for tensor in _written_buffers(model)]), self._buffers):
            return "a buffer was modified in place"
        return None

    def _first_difference(self, model: PreTrainedModel) -> str:
        for (where, new), old in itertools.zip_longest(
            _facts(model, self._kept), self._facts, fillvalue=("the modules", None)
        ):
            if new != old:
                return f"{where} changed"
        return "the modules changed"


def _facts(model: PreTrainedModel, kept: frozenset[tuple[str, str]] = frozenset()) -> Iterator[tuple[str, Any]]:
    """What can be compared without reading a weight, as (where, fact), but for attributes that are ``kept`` states."""
    configs: dict[int, PreTrainedConfig] = {}
    for name, module in model.named_modules():
        attributes = []
        read_by_hooks = hooked(module) is not None
        for key, value in module.__dict__.items():
            if key in _SKIPPED or (name, key) in kept:
                continue
            kind = type(value)
            if kind in _SCALARS:
                attributes.append((key, value))
            elif isinstance(value, _CONTAINERS):
                if value:
                    # The keys of hooks are never used twice in a process.
                    attributes.append((key, list(value) if key.endswith("_hooks") else _plain(value)))
            elif isinstance(value, PreTrainedConfig):
                configs[id(value)] = value
            elif read_by_hooks:
                # The twin shares it, so that its identity is no other's.
                attributes.append((key, id(value)))
            elif not isinstance(value, torch.Tensor):
                # A tensor here is something that the module computed and keeps.
                attributes.append((key, _plain(value)))
        yield name or "the model", (id(module), type(module), attributes)
        hooks = accelerate_hooks(module)
        if any(hook.offload for hook in hooks):
            # Placeholders stand in for these weights, new ones after every forward pass.
            for hook in hooks:
                for key, tensor in _offloaded(module, hook).items():
                    yield f"{name}.{key}", _tensor_fact(tensor)
        else:
            for key, tensor in shared_tensors(module).items():
                yield f"{name}.{key}", _tensor_fact(tensor)
    for config in configs.values():
        yield "the configuration", _config_fact(config)
    yield "code that the model runs", code_identities(model)


def _plain(value: Any) -> Any:
    """``value`` reduced to what can be compared without calling into it: scalars, containers of them, identities."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if isinstance(value, dict):
        return [(key if type(key) in _SCALARS else id(key), _plain(value[key])) for key in value]
    if isinstance(value, _CONTAINERS):
        return [kind, *map(_plain, value)]
    if kind in (FunctionType, BuiltinFunctionType):
        return id(value)
    return kind


def _config_fact(config: PreTrainedConfig) -> list[Any]:
    # The attention implementation is the one thing that the twin replaces.
    return [
        (key, _config_fact(value) if isinstance(value, PreTrainedConfig) else _plain(value))
        for key, value in vars(config).items()
        if key != "_attn_implementation_internal"
    ]


def _tensor_fact(tensor: torch.Tensor) -> tuple[Any, ...]:
    version = None if tensor.is_inference() else tensor._version
    pointers = [part.data_ptr() for part in _parts(tensor)]
    return id(tensor), pointers, version, tensor.dtype, tensor.device


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors inside a tensor subclass (quantised, distributed), or the tensor itself."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [tensor]
    inner = [getattr(tensor, name) for name in flatten()[0]]
    return [part for value in inner if isinstance(value, torch.Tensor) for part in _parts(value)]


def _offloaded(module: nn.Module, hook: Any) -> dict[str, torch.Tensor]:
    """The weights in memory that an accelerate hook lends to ``module``; those on disk are not looked at."""
    source, prefix = hook.weights_map, ""
    while hasattr(source, "dataset"):
        source, prefix = source.dataset, source.prefix + prefix
    source = getattr(source, "state_dict", source)
    if not isinstance(source, Mapping):
        return {}
    names = [
        name
        for name, _ in itertools.chain(
            module.named_parameters(recurse=hook.place_submodules), module.named_buffers(recurse=hook.place_submodules)
        )
    ]
    return {name: source[prefix + name] for name in names if prefix + name in source}


def _weights(model: PreTrainedModel) -> Iterator[torch.Tensor]:
    for module in model.modules():
        hooks = accelerate_hooks(module)
        for hook in hooks:
            yield from _offloaded(module, hook).values()
        if not any(hook.offload for hook in hooks):
            yield from shared_tensors(module).values()


def _written_buffers(model: PreTrainedModel) -> Iterator[torch.Tensor]:
    """The buffers that a forward pass may replace or rewrite; only their contents matter."""
    for module in model.modules():
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers.get(name)
            if buffer is not None:
                yield buffer


def _samples(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Integer views of ``tensor``, or of about ``_SAMPLES`` elements spread over it if it is large."""
    views = []
    for part in _parts(tensor):
        if part.device.type == "meta" or not part.numel():
            continue
        part = torch.view_as_real(part.detach()) if part.is_complex() else part.detach()
        if part.numel() <= _WHOLE:
            pass
        elif part.is_contiguous():
            part = part.as_strided((_SAMPLES,), (part.numel() // _SAMPLES,))
        else:
            each = max(1, round(_SAMPLES ** (1 / part.dim())))
            part = part[tuple(slice(None, None, max(1, size // each)) for size in part.shape)]
        views.append(part.view(_INTEGERS[part.element_size()]))
    return views


def _contents(samples: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """The sampled elements, one tensor per dtype and device. Compared as bits, so that NaN equals NaN."""
    groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for view in itertools.chain.from_iterable(samples):
        groups.setdefault((view.dtype, view.device), []).append(view)
    return [torch.cat([view.reshape(-1) for view in views]) for views in groups.values()]


def _equal(new: list[torch.Tensor], old: list[torch.Tensor]) -> bool:
    return len(new) == len(old) and all(
        a.shape == b.shape and a.device == b.device and torch.equal(a, b) for a, b in zip(new, old, strict=True)
    )

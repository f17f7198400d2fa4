"""The state probe: two short forward passes with a model's own cache, that tell which modules keep recurrent state."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedModel

from paged_backend.memory.state_cache import StateSpec
from paged_backend.model.kept_state import Attribute, CachedState, HeldState, KeptState
from paged_backend.model.layer_probe import Unprovable
from paged_backend.model.mixer import Mixer, Place, named_arguments, shapes_of

# The last two names are those of earlier versions of transformers.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
# The states of a layer, by number, as transformers' caches hold them.
_STATES = ("conv_states", "recurrent_states")


def find_mixers(model: PreTrainedModel, token_ids: torch.Tensor) -> list[Mixer]:
    """The modules of ``model`` that keep state beside keys and values, their forwards replaced; none for most models.

    ``token_ids`` is ``[num_tokens]``. Runs all but the last of them, then the last one. Raises Unprovable for a state
    that nobody could keep in a module's place.
    """
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    calls = _Calls(model)
    asked: Mapping[nn.Module, set[tuple[int, int]]] = {}
    with calls.recorded():
        try:
            output = run_with_cache(model, token_ids[None, :-1])
        except Exception:
            # What fails with a cache is told by the probes and the proof that follow.
            _restore(model, before)
            return []
        cache = cache_of(output)
        held = _held_states(model, before)
        if held or (isinstance(cache, Cache) and _keeps_state(cache)):
            after_first = {path: path.value.clone() for paths in held.values() for path in paths}
            with _watched(cache, calls) as asked:
                try:
                    run_with_cache(model, token_ids[None, -1:], token_ids.numel() - 1, cache)
                except Exception as error:
                    raise Unprovable(f"it cannot go on from a state of its own: {error}") from error
            held = {name: [path for path in paths if path.changed(after_first[path])] for name, paths in held.items()}
    found: list[tuple[str, nn.Module, KeptState, list[torch.Tensor]]] = []
    for name, module in model.named_modules():
        if module in asked:
            cached = _cached_state(name, calls.cache_names[module], model, cache, asked[module])
            found.append((name, module, cached, [cached.get(cache, path) for path in cached.paths]))
    for name, paths in held.items():
        if not paths:
            continue
        module = model.get_submodule(name)
        takes_use_cache = "use_cache" in inspect.signature(module.forward).parameters
        found.append((name, module, HeldState(paths, takes_use_cache=takes_use_cache), [path.value for path in paths]))
    _restore(model, before)
    mixers, first = [], 0
    for name, module, kept, tensors in found:
        specs = [
            StateSpec(f"{name} {index}", tuple(tensor.shape[1:]), tensor.dtype, tensor.device)
            for index, tensor in enumerate(tensors)
        ]
        mixers.append(Mixer(name, module, kept, specs, first, calls.per_token(name, module)))
        first += len(specs)
    return mixers


def cache_of(output: Any) -> Any:
    """The cache in a model's output, None if there is none."""
    return next((getattr(output, name) for name in CACHE_NAMES if getattr(output, name, None) is not None), None)


def run_with_cache(model: nn.Module, ids: torch.Tensor, position: int = 0, cache: Any = None) -> Any:
    """The output of ``model`` for token ids ``[1, num_tokens]`` from ``position`` on, which it adds to its ``cache``.

    Without a cache it makes one, if it can. With one it is told positions, as ``generate`` tells it, since some models
    count them wrongly by themselves.
    """
    parameters = inspect.signature(model.forward).parameters
    kwargs: dict[str, Any] = {"use_cache": True}
    if cache is not None:
        kwargs[next(name for name in CACHE_NAMES if name in parameters)] = cache
        if "position_ids" in parameters:
            kwargs["position_ids"] = torch.arange(position, position + ids.shape[1], device=ids.device)[None]
    return model(input_ids=ids, **kwargs)


class _Calls:
    """How the modules of a model are called, pass by pass, by which name with a cache, and which of them runs now."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.running: list[nn.Module] = []
        self.cache_names: dict[nn.Module, str | None] = {}
        self._shapes: dict[nn.Module, list[dict[Place, tuple[int, ...]]]] = defaultdict(list)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        def enter(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            self.running.append(module)
            arguments = named_arguments(inspect.signature(module.forward), args, kwargs)
            self._shapes[module].append(shapes_of(arguments))
            self.cache_names[module] = next((name for name in CACHE_NAMES if name in arguments), None)

        def leave(module: nn.Module, *_: Any) -> None:
            self.running.pop()

        with ExitStack() as hooks:
            for module in self._model.modules():
                hooks.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(leave).remove)
            yield

    def per_token(self, name: str, module: nn.Module) -> frozenset[Place]:
        """The tensors among the arguments of ``module`` that had as many rows as the pass had tokens."""
        if len(self._shapes[module]) != 2:
            raise Unprovable(f"{name} keeps state and does not run once a forward pass")
        many, one = self._shapes[module]
        cache_name = self.cache_names[module]
        return frozenset(
            place
            for place, shape in many.items()
            if place[0] != cache_name and shape[:1] == (1,) and one.get(place) == (1, 1, *shape[2:]) != shape
        )


def _keeps_state(cache: Cache) -> bool:
    """Whether there is a tensor in ``cache`` that is neither a key nor a value."""
    # A cache for encoders and decoders has no layers, but two caches.
    in_layers = (getattr(layer, name, None) for layer in getattr(cache, "layers", ()) for name in _STATES)
    if any(value is not None for states in in_layers if states for value in states.values()):
        return True
    return any(True for _ in _per_layer_lists(cache))


def _per_layer_lists(cache: Cache) -> Iterator[str]:
    """The attributes of ``cache`` that are lists of a tensor a layer."""
    for name, value in vars(cache).items():
        if type(value) is list and any(isinstance(item, torch.Tensor) for item in value):
            yield name


@contextmanager
def _watched(cache: Any, calls: _Calls) -> Iterator[Mapping[nn.Module, set[tuple[int, int]]]]:
    """While active, notices which module asks ``cache`` for, or gives it, the state of which layer and number.

    Those are the calls of a method of the cache with a ``layer_idx``, but for those about keys, values and lengths.
    """
    asked: dict[nn.Module, set[tuple[int, int]]] = defaultdict(set)
    if cache is None:
        yield asked
        return
    common = {name for name, _ in inspect.getmembers(Cache, inspect.isfunction)}
    for name, method in inspect.getmembers(cache, inspect.ismethod):
        about_state = "state" in name and "previous" not in name if name in common else not name.startswith("_")
        if not about_state or "layer_idx" not in inspect.signature(method).parameters:
            continue

        def noted(*args: Any, _method: Any = method, **kwargs: Any) -> Any:
            arguments = inspect.signature(_method).bind(*args, **kwargs).arguments
            if calls.running:
                asked[calls.running[-1]].add((arguments["layer_idx"], arguments.get("state_idx", 0)))
            return _method(*args, **kwargs)

        cache.__dict__[name] = noted
    try:
        yield asked
    finally:
        for name, value in list(cache.__dict__.items()):
            if inspect.isfunction(value):
                del cache.__dict__[name]


def _cached_state(
    name: str, argument: str | None, model: PreTrainedModel, cache: Any, asked: set[tuple[int, int]]
) -> CachedState:
    layers = {layer for layer, _ in asked}
    if argument is None or len(layers) != 1:
        raise Unprovable(f"{name} keeps state of layers {sorted(layers)} in a cache that it is not given")
    index = layers.pop()
    paths: list[tuple[str, int | None]] = []
    if index < len(cache.layers):
        for kind in _STATES:
            states = getattr(cache.layers[index], kind, None) or {}
            written = [number for number in sorted(states) if states[number] is not None]
            paths += [(kind, number) for number in written if (index, number) in asked]
    for attribute in _per_layer_lists(cache):
        if index < len(getattr(cache, attribute)) and isinstance(getattr(cache, attribute)[index], torch.Tensor):
            paths.append((attribute, None))
    if not paths:
        raise Unprovable(f"{name} keeps something in its cache that is no state of layer {index}")
    return CachedState(argument, _fresh(cache, model), cache, index, paths)


def _fresh(cache: Any, model: PreTrainedModel) -> Any:
    """A cache of the same kind that has seen nothing."""
    if "config" in inspect.signature(type(cache)).parameters:
        return type(cache)(config=model.config.get_text_config(decoder=True))
    return type(cache)()


def _held_states(model: PreTrainedModel, before: Mapping[str, dict[str, Any]]) -> dict[str, list[Attribute]]:
    """The attributes that became tensors of one sequence in a pass, by the outermost module that holds some."""
    found: dict[str, list[Attribute]] = {}
    for name, module in model.named_modules():
        for attribute, value in module.__dict__.items():
            is_new = isinstance(value, torch.Tensor) and before[name].get(attribute) is not value
            if is_new and value.shape[:1] == (1,):
                outer = next((known for known in found if name == known or name.startswith(f"{known}.")), name)
                found.setdefault(outer, []).append(Attribute(module, attribute))
    return found


def _restore(model: PreTrainedModel, before: Mapping[str, dict[str, Any]]) -> None:
    for name, module in model.named_modules():
        for attribute in [name for name, value in module.__dict__.items() if isinstance(value, torch.Tensor)]:
            if attribute in before[name]:
                module.__dict__[attribute] = before[name][attribute]
            else:
                del module.__dict__[attribute]

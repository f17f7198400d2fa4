"""Foreign code: hooks and patches of the user's own in a model, which may read what nobody else can know of."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn
from torch.nn import functional
from torch.nn.modules import module as global_hooks

# Libraries whose hooks and patches follow from the model's modules, attributes and weights.
_KNOWN = sys.stdlib_module_names | {
    "accelerate",
    "bitsandbytes",
    "huggingface_hub",
    "numpy",
    "peft",
    "safetensors",
    "torch",
    "torchao",
    "transformers",
}
_FUNCTIONS = (FunctionType, BuiltinFunctionType)


def hooked(module: nn.Module) -> str | None:
    """What of the user's own runs in this module's calls: a hook, or a forward that was replaced; None if nothing."""
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        if not _is_known(hook):
            return "a hook"
    forward = module.__dict__.get("forward")
    if forward is not None and "_hf_hook" not in module.__dict__ and not _is_known(forward):
        return "a forward that was replaced"
    return None


def patched(model: nn.Module) -> str | None:
    """Which class, function or hook of the process that ``model`` runs through is the user's own; None if none is."""
    for hook in (*global_hooks._global_forward_pre_hooks.values(), *global_hooks._global_forward_hooks.values()):
        if not _is_known(hook):
            return "a hook on all modules"
    classes = {type(module) for module in model.modules()}
    for cls in sorted(classes, key=lambda cls: cls.__qualname__):
        owner, forward = _forward_of(cls)
        if owner is not None and not _belongs(forward, owner.__module__):
            return f"{owner.__qualname__}.forward"
    for namespace in _namespaces(classes):
        for name, function in _functions(namespace):
            if not _belongs(function, namespace.__name__):
                return f"{namespace.__name__}.{name}"
    return None


def code_identities(model: nn.Module) -> list[Any]:
    """What tells that a class, function or hook of the process which ``model`` runs through was replaced.

    Functions by weak reference, for another may come to lie at the place of one that is gone.
    """
    classes = {type(module): None for module in model.modules()}
    identities: list[Any] = [list(global_hooks._global_forward_pre_hooks), list(global_hooks._global_forward_hooks)]
    identities += [_reference(_forward_of(cls)[1]) for cls in classes]
    for namespace in _namespaces(classes):
        identities += [(name, _reference(function)) for name, function in _functions(namespace)]
    return identities


def _forward_of(cls: type) -> tuple[type | None, Any]:
    """The class that ``cls`` has its forward from, and the forward."""
    return next(((base, vars(base)["forward"]) for base in cls.__mro__ if "forward" in vars(base)), (None, None))


def _namespaces(classes: Iterable[type]) -> list[ModuleType]:
    """Where transformers' model classes look up the functions they call, and torch's functions."""
    names = dict.fromkeys(cls.__module__ for cls in classes if cls.__module__.startswith("transformers."))
    return [functional, *(sys.modules[name] for name in names if name in sys.modules)]


def _functions(namespace: ModuleType) -> Iterator[tuple[str, Any]]:
    for name, value in list(vars(namespace).items()):
        if isinstance(value, (*_FUNCTIONS, functools.partial, MethodType)):
            yield name, value


def _belongs(function: Any, home: str) -> bool:
    """Whether ``function`` is of the package of ``home``, or of a known one."""
    return _is_known(function) or _package_of(function) == home.partition(".")[0]


def _is_known(function: Any) -> bool:
    return _package_of(function) in _KNOWN


def _package_of(function: Any) -> str:
    """The top package that a function, or the class of an object that is called, was written in."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, (MethodType, staticmethod, classmethod)):
            function = function.__func__
        elif hasattr(function, "_torchdynamo_orig_callable"):
            function = function._torchdynamo_orig_callable
        else:
            break
    named = function if isinstance(function, _FUNCTIONS) else type(function)
    return (getattr(named, "__module__", None) or "builtins").partition(".")[0]


def _reference(function: Any) -> Any:
    try:
        return weakref.ref(function)
    except TypeError:
        return id(function)

"""Foreign code: hooks and patches of the user's own in a model, which may read what nobody else can know of."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
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
# What a call of a module runs through.
_CALLED = ("__call__", "_wrapped_call_impl", "_call_impl", "forward")


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
        for name in _CALLED:
            owner, method = _inherited(cls, name)
            if owner is not None and not _belongs(method, owner.__module__):
                return f"{owner.__qualname__}.{name}"
    for home, name, function in _functions(classes):
        if not _belongs(function, home):
            return f"{home}.{name}"
    return None


def code_identities(model: nn.Module) -> list[Any]:
    """What tells that a class, function or hook of the process which ``model`` runs through was replaced.

    Functions by weak reference, for another may come to lie at the place of one that is gone.
    """
    classes = {type(module): None for module in model.modules()}
    identities: list[Any] = [list(global_hooks._global_forward_pre_hooks), list(global_hooks._global_forward_hooks)]
    identities += [_reference(_inherited(cls, name)[1]) for cls in classes for name in _CALLED]
    identities += [(name, _reference(function)) for _, name, function in _functions(classes)]
    return identities


def _inherited(cls: type, name: str) -> tuple[type | None, Any]:
    """The class that ``cls`` has a method from, and the method."""
    return next(((base, vars(base)[name]) for base in cls.__mro__ if name in vars(base)), (None, None))


def _functions(classes: Iterable[type]) -> Iterator[tuple[str, str, Any]]:
    """Where, under which name and what the functions are that transformers' model classes look up: those of their
    files, torch's functional ones, and what their code names of torch and of tensors."""
    names = dict.fromkeys(cls.__module__ for cls in classes if cls.__module__.startswith("transformers."))
    files = [sys.modules[name] for name in names if name in sys.modules]
    for namespace in (functional, *files):
        for name, value in list(vars(namespace).items()):
            if isinstance(value, (*_FUNCTIONS, functools.partial, MethodType)):
                yield namespace.__name__, name, value
    for name in sorted(set().union(*map(_names_of_torch, files))):
        for home in (torch, torch.Tensor):
            # Methods of tensors are inherited from C, so that one of its own is there only where Python defines it.
            function = vars(home).get(name)
            if isinstance(function, (*_FUNCTIONS, functools.partial, MethodType)):
                yield "torch" if home is torch else "torch.Tensor", name, function


@functools.cache
def _names_of_torch(file: ModuleType) -> frozenset[str]:
    """What the code of a file looks up by a name that torch or tensors have too."""
    own = [value for value in vars(file).values() if getattr(value, "__module__", None) == file.__name__]
    methods = [method for cls in own if isinstance(cls, type) for method in vars(cls).values()]
    pending = [getattr(function, "__code__", None) for function in (*own, *methods)]
    names: set[str] = set()
    while pending:
        code = pending.pop()
        if isinstance(code, CodeType):
            names.update(code.co_names)
            pending += code.co_consts
    return frozenset(name for name in names if hasattr(torch, name) or hasattr(torch.Tensor, name))


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

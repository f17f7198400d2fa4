"""A structural copy of a model: the same weights, and nothing else that a forward pass may change."""

from __future__ import annotations

import copy
import functools
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from paged_backend.model.foreign_code import hooked

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
# Elements from which a buffer of whole numbers is worth sharing.
_MANY = 1024


def copy_model(model: PreTrainedModel) -> PreTrainedModel:
    """Copy the module tree of ``model`` in eval mode.

    Parameters and persistent buffers are the same tensor objects in both, and so are the weights that accelerate
    keeps in its hooks. Non-persistent buffers and attributes are copied, since a forward pass may write them
    (long RoPE rewrites ``inv_freq`` in place), but for long ones of whole numbers: packed weights and masks, which are
    only read. What refuses to be copied (locks, streams) is shared. Compiled
    modules and forwards are copied uncompiled. Hooks are shared; one that is a method of a module of the model
    moves to that module's copy. What a module with hooks or a forward of the user's own holds besides modules and
    configurations is shared too, since they read it, and their owner may change it.
    """
    copies = _Copies(model)
    for module, shell in copies.shells:
        read_by_hooks = hooked(module) is not None
        for name, value in module.__dict__.items():
            shared = read_by_hooks and not name.startswith("_") and name not in ("training", "forward")
            shell.__dict__[name] = value if shared and not _holds_structure(value) else copies.attribute(name, value)
    return cast(PreTrainedModel, copies.memo[id(model)])


class _Copies:
    """The memo of ``copy.deepcopy``, filled beforehand with all that must not be copied the ordinary way."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.memo: dict[Any, Any] = {}
        self.shells: list[tuple[nn.Module, nn.Module]] = []
        for module in model.modules():
            if not _is_compiled(module):
                shell = object.__new__(type(module))
                self.memo[id(module)] = shell
                self.shells.append((module, shell))
        for module in model.modules():
            if _is_compiled(module):
                self.memo[id(module)] = self.memo[id(_uncompiled(module))]
        for module, _ in self.shells:
            for tensor in (*shared_tensors(module).values(), *_packed_buffers(module)):
                self._share(tensor)
            for hook in accelerate_hooks(module):
                self.memo[id(hook.weights_map)] = hook.weights_map

    def _share(self, tensor: torch.Tensor) -> None:
        self.memo[id(tensor)] = tensor
        # Another tensor over the same memory, held as an attribute, then copies to one over the same memory.
        if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            self.memo.setdefault("torch", {})[storage._cdata] = storage

    def attribute(self, name: str, value: Any) -> Any:
        """The copy of one entry of a module's ``__dict__``."""
        if name == "training":
            return False
        if name == "_compiled_call_impl":
            return None
        if name in _HOOKS:
            hooks = copy.copy(value)
            for key in hooks:
                hooks[key] = self._moved(hooks[key])
            return hooks
        if isinstance(value, FunctionType):
            value = getattr(value, "_torchdynamo_orig_callable", value)
        known = len(self.memo)
        try:
            return copy.deepcopy(value, self.memo)
        except Exception:
            # Whatever was begun before the failure is half made: forget it.
            while len(self.memo) > known:
                self.memo.popitem()
            return value

    def _moved(self, hook: Any) -> Any:
        if isinstance(hook, MethodType) and id(hook.__self__) in self.memo:
            return MethodType(hook.__func__, self.memo[id(hook.__self__)])
        if isinstance(hook, functools.partial):
            arguments = [self.memo.get(id(argument), argument) for argument in hook.args]
            keywords = {key: self.memo.get(id(argument), argument) for key, argument in hook.keywords.items()}
            return functools.partial(self._moved(hook.func), *arguments, **keywords)
        return hook


def _holds_structure(value: Any) -> bool:
    """Whether ``value`` is, or is a container of, what the copy has its own of."""
    if isinstance(value, dict):
        return any(map(_holds_structure, value.values()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(map(_holds_structure, value))
    return isinstance(value, (nn.Module, PreTrainedConfig))


def shared_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and persistent buffers that ``module`` itself owns, by name."""
    tensors: dict[str, torch.Tensor] = {name: p for name, p in module._parameters.items() if p is not None}
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            tensors[name] = buffer
    return tensors


def _packed_buffers(module: nn.Module) -> list[torch.Tensor]:
    """The non-persistent buffers that hold many whole numbers; a counter is none of them."""
    buffers = [module._buffers.get(name) for name in module._non_persistent_buffers_set]
    return [buffer for buffer in buffers if buffer is not None and buffer.numel() >= _MANY and not _is_real(buffer)]


def _is_real(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def accelerate_hooks(module: nn.Module) -> list[Any]:
    """The hooks of accelerate on ``module`` that place weights, out of a sequence of hooks too."""
    hook = module.__dict__.get("_hf_hook")
    if hook is None:
        return []
    return [h for h in (hook, *getattr(hook, "hooks", ())) if hasattr(h, "weights_map")]


def plain_model(model: nn.Module) -> nn.Module:
    """The model below the wrappers of ``torch.compile`` and of PEFT adapters that live inside its layers."""
    inner: Any = model
    while True:
        if _is_compiled(inner):
            inner = _uncompiled(inner)
        elif not getattr(getattr(inner, "active_peft_config", None), "is_prompt_learning", True):
            inner = inner.get_base_model()
        else:
            return cast(nn.Module, inner)


def _is_compiled(module: nn.Module) -> bool:
    return "_orig_mod" in getattr(module, "_modules", ())


def _uncompiled(module: nn.Module) -> nn.Module:
    while _is_compiled(module):
        module = cast(nn.Module, module._modules["_orig_mod"])
    return module

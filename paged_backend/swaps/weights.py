"""Weights: those that C++ can read, and how they are packed for it."""

from __future__ import annotations

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from paged_backend.kernels import cpu
from paged_backend.swaps.fused import Fused

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class NoMatch(Exception):
    """A module does not have the shape that a kind of swap knows; the message says where it differs."""


class Packing:
    """How weights are packed: rounded to ``int8`` or as they are, or not at all where ``packs`` is False."""

    def __init__(self, *, int8: bool, packs: bool) -> None:
        self.int8 = int8
        self.packs = packs
        self._arena = cpu.Arena() if packs else None

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> cpu.PackedLinear:
        """The weight ``[num_columns, depth]`` of one product."""
        self._check()
        return cpu.pack(weight, bias, int8=self.int8, arena=self._arena)

    def pack_gated(
        self, gate: torch.Tensor, up: torch.Tensor, gate_bias: torch.Tensor | None, up_bias: torch.Tensor | None
    ) -> cpu.PackedLinear:
        """The weights of a product whose columns are gated by as many others."""
        self._check()
        if gate.shape[0] % 16:
            raise NoMatch(f"{gate.shape[0]} columns of a gate are no multiple of 16")
        return cpu.pack_gated(gate, up, gate_bias, up_bias, int8=self.int8, arena=self._arena)

    def up_to_crossover(self, fused: Fused, dtype: torch.dtype) -> Fused:
        """``fused``, told up to how many tokens it is faster than products of ``dtype``."""
        # Rounded weights must give the same results whatever else is in a batch.
        if not self.int8:
            fused.most_rows = cpu.most_rows(dtype, torch.get_num_threads())
        return fused

    def _check(self) -> None:
        if not self.packs:
            raise NoMatch("packing its weights would take memory for a copy of them")


def check_plain(module: nn.Module) -> None:
    """Raise NoMatch unless nothing but the module's own code and plain weights on the CPU take part in its forward."""
    for name, part in module.named_modules():
        where = name or "it"
        if part._forward_hooks or part._forward_pre_hooks:
            raise NoMatch(f"{where} has hooks")
        if "forward" in part.__dict__ or "_hf_hook" in part.__dict__:
            raise NoMatch(f"the forward of {where} was replaced")
        for tensor in part._parameters.values():
            if tensor is None:
                continue
            if type(tensor) not in (nn.Parameter, torch.Tensor) or tensor.dtype not in DTYPES:
                raise NoMatch(f"a weight of {where} is a {type(tensor).__name__} of {tensor.dtype}")
            if tensor.device.type != "cpu":
                raise NoMatch(f"{where} is on {tensor.device.type}")


def weight_of(module: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight ``[num_columns, depth]`` and bias of a plain linear layer."""
    if type(module) is nn.Linear:
        return module.weight, module.bias
    if type(module) is Conv1D:
        return module.weight.T, module.bias
    raise NoMatch(f"a {type(module).__name__} is no plain linear layer")


def joined(weights: tuple[torch.Tensor, ...], biases: tuple[torch.Tensor | None, ...]) -> torch.Tensor | None:
    """The biases of several weights in one tensor, or None where none has any."""
    if all(bias is None for bias in biases):
        return None
    return torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)])


def child_of(module: nn.Module, name: str) -> nn.Module:
    """The child of this name; NoMatch where there is none."""
    child = module._modules.get(name)
    if child is None:
        raise NoMatch(f"a {type(module).__name__} has no {name}")
    return child


def num_parameters(module: nn.Module, *names: str) -> int:
    """Elements of the parameters of ``module``, or of its children of these names."""
    parts = [module._modules.get(name) for name in names] if names else [module]
    return sum(p.numel() for part in parts if part is not None for p in part.parameters())

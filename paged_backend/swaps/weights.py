"""Weights: those that C++ can read, and how they are packed for it."""

from __future__ import annotations

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from paged_backend.kernels import cpu
from paged_backend.model.quantised_tensor import QuantisedTensor
from paged_backend.swaps.fused import Fused

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_KINDS = (nn.Parameter, torch.Tensor, QuantisedTensor)


class NoMatch(Exception):
    """A module does not have the shape that a kind of swap knows; the message says where it differs."""


Product = cpu.PackedLinear | cpu.QuantisedLinear


class Packing:
    """How weights are packed: rounded to 8 or 4 bits or as they are, or not at all where ``packs`` is False.

    bits: 8, 4, or None for weights as they are. Those of a model that are quantised already are taken as they lie,
    which takes no memory.
    """

    def __init__(self, *, bits: int | None = None, packs: bool) -> None:
        self.bits = bits
        self.packs = packs
        self._arena = cpu.Arena() if packs else None

    def pack(self, *pairs: tuple[torch.Tensor, torch.Tensor | None]) -> Product:
        """The weights ``[num_columns, depth]`` and biases of one product, whose columns follow each other."""
        weights, biases = zip(*pairs, strict=True)
        if any(isinstance(weight, QuantisedTensor) for weight in weights):
            return _in_place(weights, biases)
        self._check()
        weight, bias = (torch.cat(weights), joined(weights, biases)) if len(pairs) > 1 else pairs[0]
        if self.bits == 4 and _fits_int4(weight):
            return cpu.QuantisedLinear((cpu.int4(weight, self._arena),), (_float(bias),))
        return cpu.pack(weight, bias, int8=self.bits is not None, arena=self._arena)

    def pack_gated(
        self, gate: torch.Tensor, up: torch.Tensor, gate_bias: torch.Tensor | None, up_bias: torch.Tensor | None
    ) -> Product:
        """The weights of a product whose columns are gated by as many others."""
        if isinstance(gate, QuantisedTensor) or isinstance(up, QuantisedTensor):
            return _in_place((gate, up), (gate_bias, up_bias))
        self._check()
        if self.bits == 4 and _fits_int4(gate):
            weights = cpu.int4(gate, self._arena), cpu.int4(up, self._arena)
            return cpu.QuantisedLinear(weights, (_float(gate_bias), _float(up_bias)))
        if gate.shape[0] % 16:
            raise NoMatch(f"{gate.shape[0]} columns of a gate are no multiple of 16")
        return cpu.pack_gated(gate, up, gate_bias, up_bias, int8=self.bits is not None, arena=self._arena)

    def up_to_crossover(self, fused: Fused, dtype: torch.dtype) -> Fused:
        """``fused``, told up to how many tokens it is faster than products of ``dtype``."""
        # Rounded weights must give the same results whatever else is in a batch, and quantised ones have no other way.
        quantised = any(isinstance(parameter, QuantisedTensor) for parameter in fused.original.parameters())
        if self.bits is None and not quantised:
            fused.most_rows = cpu.most_rows(dtype, torch.get_num_threads())
        return fused

    def _check(self) -> None:
        if not self.packs:
            raise NoMatch("packing its weights would take memory for a copy of them")


def _in_place(weights: tuple[torch.Tensor, ...], biases: tuple[torch.Tensor | None, ...]) -> cpu.QuantisedLinear:
    """A product with weights of a model that are quantised already."""
    quantised = tuple(weight.quantised for weight in weights if isinstance(weight, QuantisedTensor))
    if len(quantised) < len(weights):
        raise NoMatch("some of the weights that go together are quantised and some are not")
    return cpu.QuantisedLinear(quantised, tuple(map(_float, biases)), owned=False)


def _fits_int4(weight: torch.Tensor) -> bool:
    return weight.shape[1] % 32 == 0


def _float(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.detach().float()


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
            if type(tensor) not in _KINDS or tensor.dtype not in DTYPES:
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


def halves(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The first and the second half of a weight's columns. Raises NoMatch where panels of a quantised one are cut."""
    if not isinstance(weight, QuantisedTensor):
        return weight.chunk(2)
    half = len(weight) // 2
    try:
        parts = weight.quantised.split(half, half)
    except ValueError as error:
        raise NoMatch(str(error)) from error
    return tuple(QuantisedTensor(part, weight.dtype) for part in parts)


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

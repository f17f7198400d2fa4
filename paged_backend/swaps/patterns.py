"""Patterns: which modules of transformers C++ knows, and what is proposed to stand in for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import gelu, silu
from transformers.pytorch_utils import Conv1D

from paged_backend.kernels import AUTO, AttentionVariant, Backend, cpu
from paged_backend.model.attention import PagedLayer
from paged_backend.swaps.fused import Fused, FusedLayer, FusedLinear, FusedMLP, FusedNorm

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def can_fuse(backend: Backend) -> bool:
    """Whether fused modules may be made where attention runs on ``backend``."""
    return backend in (AUTO, cpu.BACKEND) and cpu.is_available()


class NoMatch(Exception):
    """A module does not have the shape that a pattern knows; the message says where it differs."""


class Proposals:
    """Proposes fused modules. Each method yields what might equal a module, or raises NoMatch with the reason."""

    def __init__(self, *, int8: bool, packs: bool) -> None:
        self.int8 = int8
        self.packs = packs
        self.arena = cpu.Arena() if packs else None

    def linear(self, module: nn.Module) -> Iterator[Fused]:
        weight, bias = _weight_of(module)
        yield self._up_to_crossover(FusedLinear(module, self._pack(weight, bias)), weight.dtype)

    def norm(self, module: nn.Module) -> Iterator[Fused]:
        weight, epsilon = _norm_weight(module)
        yield FusedNorm(module, weight, epsilon)

    def mlp(self, module: nn.Module) -> Iterator[Fused]:
        activation = _activation(module)
        gates, down = self._mlp_weights(module)
        if _num_parameters(module) != sum(p.numel() for name in _MLP_NAMES for p in _parameters(module, name)):
            raise NoMatch("it has weights beside those of gate, up and down projection")
        yield self._up_to_crossover(FusedMLP(module, gates, down, activation), next(module.parameters()).dtype)

    def layer(self, module: nn.Module, attention: nn.Module, call: LayerCall) -> Iterator[Fused]:
        """``attention``: the module within the layer that calls attention. ``call``: how the layer was called."""
        names = [name for name, child in module.named_children() if child is attention]
        if not names:
            raise NoMatch("attention lies deeper inside it")
        mlp = next((child for name, child in module.named_children() if name in ("mlp", "feed_forward")), None)
        if mlp is None:
            raise NoMatch("it has no child called mlp")
        activation = _activation(mlp)
        norms, epsilon = _layer_norms(module, attention)
        known: list[torch.Tensor] = [p for norm in _named_norms(module, attention).values() for p in norm.parameters()]
        for name in _MLP_NAMES:
            known += _parameters(mlp, name)
        for name in _ATTENTION_NAMES:
            known += _parameters(attention, name)
        if _num_parameters(module) != sum(p.numel() for p in known):
            raise NoMatch("it has weights that the pattern does not know")
        gates, down = self._mlp_weights(mlp)
        weights = [self._qkv(attention), self._pack(*_weight_of(_child(attention, "o_proj"))), gates, down]
        for rotates in (True, False):
            if rotates and not call.has_rotation():
                continue
            fused = FusedLayer(
                module,
                attention,
                norms,
                epsilon,
                weights,
                call.num_heads,
                activation,
                rotates,
                cpu.rule_arguments(call.variant),
                call.returns_tuple,
            )
            yield self._up_to_crossover(fused, call.hidden.dtype)

    def _up_to_crossover(self, fused: Fused, dtype: torch.dtype) -> Fused:
        # Rounded weights must give the same results whatever else is in a batch.
        if not self.int8:
            fused.most_rows = cpu.most_rows(dtype, torch.get_num_threads())
        return fused

    def _pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> cpu.PackedLinear:
        if not self.packs:
            raise NoMatch("packing its weights would take memory for a copy of them")
        return cpu.pack(weight, bias, int8=self.int8, arena=self.arena)

    def _qkv(self, attention: nn.Module) -> cpu.PackedLinear:
        if hasattr(attention, "qkv_proj"):
            return self._pack(*_weight_of(_child(attention, "qkv_proj")))
        weights, biases = zip(*(_weight_of(_child(attention, f"{n}_proj")) for n in "qkv"), strict=True)
        return self._pack(torch.cat(weights), _joined(weights, biases))

    def _mlp_weights(self, mlp: nn.Module) -> tuple[cpu.PackedLinear, cpu.PackedLinear]:
        if hasattr(mlp, "gate_up_proj"):
            both, bias = _weight_of(_child(mlp, "gate_up_proj"))
            gate, up = both.chunk(2)
            gate_bias, up_bias = (None, None) if bias is None else bias.chunk(2)
        else:
            (gate, gate_bias), (up, up_bias) = (_weight_of(_child(mlp, name)) for name in ("gate_proj", "up_proj"))
        down = self._pack(*_weight_of(_child(mlp, "down_proj")))
        if gate.shape[0] % 16:
            raise NoMatch(f"{gate.shape[0]} columns of a gate are no multiple of 16")
        return cpu.pack_gated(gate, up, gate_bias, up_bias, int8=self.int8, arena=self.arena), down


class Recorder(PagedLayer):
    """A layer's blocks, that remember how attention was called with them."""

    def __init__(self, layer: PagedLayer) -> None:
        super().__init__(layer.context, layer.cache, layer.group, layer.rule)
        self.num_heads = 0
        self.variant = AttentionVariant(1.0)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, variant: AttentionVariant
    ) -> torch.Tensor:
        """Attend as the layer does."""
        self.num_heads, self.variant = query.shape[1], variant
        return super().attend(query, key, value, variant)


class LayerCall:
    """How a decoder layer was called, and its attention, and what the layer returned."""

    def __init__(self, attention: Recorder, hidden: torch.Tensor, kwargs: dict[str, Any], output: Any) -> None:
        self.num_heads, self.variant = attention.num_heads, attention.variant
        self.hidden, self.kwargs = hidden, kwargs
        self.returns_tuple = isinstance(output, tuple)
        if hidden.dim() != 3 or (self.returns_tuple and len(output) != 1):
            raise NoMatch("it does not turn hidden states into hidden states")

    def has_rotation(self) -> bool:
        """Whether the layer was given cosines and sines for its tokens that C++ can read."""
        pair = self.kwargs.get("position_embeddings")
        return isinstance(pair, tuple) and all(
            isinstance(part, torch.Tensor)
            and part.dtype == self.hidden.dtype
            and part.shape[:-1] == self.hidden.shape[:-1]
            and part.is_contiguous()
            for part in pair
        )


_MLP_NAMES = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")
_ATTENTION_NAMES = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj")


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


def _weight_of(module: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight ``[num_columns, depth]`` and bias of a plain linear layer."""
    if type(module) is nn.Linear:
        return module.weight, module.bias
    if type(module) is Conv1D:
        return module.weight.T, module.bias
    raise NoMatch(f"a {type(module).__name__} is no plain linear layer")


def _joined(weights: tuple[torch.Tensor, ...], biases: tuple[torch.Tensor | None, ...]) -> torch.Tensor | None:
    if all(bias is None for bias in biases):
        return None
    return torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)])


def _norm_weight(module: nn.Module) -> tuple[torch.Tensor, float]:
    """The float32 weight and the epsilon of an RMS norm, some of which add one to their weight."""
    weight = module._parameters.get("weight")
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None or weight.dim() != 1 or len(module._parameters) != 1 or not isinstance(epsilon, float):
        raise NoMatch(f"a {type(module).__name__} is no RMS norm")
    x = torch.linspace(-2, 3, weight.numel())[None].to(weight.dtype)
    normed = x.float() * (x.float().square().mean() + epsilon).rsqrt()
    with torch.inference_mode():
        expected = module.forward(x).float()
    for offset in (0.0, 1.0):
        scale = weight.detach().float() + offset
        if torch.allclose(normed * scale, expected, rtol=2e-2 if weight.dtype != torch.float32 else 1e-5, atol=1e-5):
            return scale, epsilon
    raise NoMatch(f"a {type(module).__name__} computes something else than an RMS norm")


def _named_norms(layer: nn.Module, attention: nn.Module) -> dict[str, nn.Module]:
    norms = {name: child for name, child in layer.named_children() if name.endswith("norm")}
    return norms | {name: child for name, child in attention.named_children() if name.endswith("_norm")}


def _layer_norms(layer: nn.Module, attention: nn.Module) -> tuple[list[torch.Tensor | None], float]:
    """Weights for the places that decoder_layer of library.cpp knows, and the epsilon that they share."""
    norms = _named_norms(layer, attention)
    places = {
        frozenset({"input_layernorm", "post_attention_layernorm"}): (
            "input_layernorm",
            None,
            "post_attention_layernorm",
            None,
        ),
        frozenset({"post_attention_layernorm", "post_feedforward_layernorm"}): (
            None,
            "post_attention_layernorm",
            None,
            "post_feedforward_layernorm",
        ),
        frozenset(_SANDWICH): _SANDWICH,
    }
    own = frozenset(norms) - {"q_norm", "k_norm"}
    if own not in places:
        raise NoMatch(f"its norms are called {', '.join(sorted(own)) or 'nothing known'}")
    weights: list[torch.Tensor | None] = []
    epsilons = set()
    for name in (*places[own], "q_norm", "k_norm"):
        if name is None or name not in norms:
            weights.append(None)
            continue
        weight, epsilon = _norm_weight(norms[name])
        weights.append(weight)
        epsilons.add(epsilon)
    if len(epsilons) != 1:
        raise NoMatch(f"its norms differ in epsilon: {sorted(epsilons)}")
    head_dim = getattr(attention, "head_dim", None)
    for across in weights[4:]:
        if across is not None and across.numel() != head_dim:
            raise NoMatch("it norms queries and keys across heads")
    return weights, epsilons.pop()


_SANDWICH = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def _activation(mlp: nn.Module) -> int:
    """What the activation of a gated MLP is for C++, told from its values."""
    function: Callable[..., torch.Tensor] | None = getattr(mlp, "act_fn", getattr(mlp, "activation_fn", None))
    if function is None:
        raise NoMatch(f"a {type(mlp).__name__} has no act_fn")
    x = torch.linspace(-8, 8, 201)
    with torch.inference_mode():
        values = function(x)
    for code, known in ((cpu.SILU_GATE, silu(x)), (cpu.GELU_GATE, gelu(x, approximate="tanh"))):
        if torch.allclose(values, known, rtol=1e-5, atol=1e-6):
            return code
    raise NoMatch("its activation is neither silu nor gelu_tanh")


def _child(module: nn.Module, name: str) -> nn.Module:
    child = module._modules.get(name)
    if child is None:
        raise NoMatch(f"a {type(module).__name__} has no {name}")
    return child


def _parameters(module: nn.Module, child: str) -> list[torch.Tensor]:
    part = module._modules.get(child)
    return [] if part is None else list(part.parameters())


def _num_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())

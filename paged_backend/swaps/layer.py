"""Whole decoder layers, attention and its cache included, in one call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from paged_backend.kernels import QUANTISED_MAX, cpu
from paged_backend.model.attention import PagedLayer
from paged_backend.swaps.fused import Fused
from paged_backend.swaps.kind import ModuleCall, SwapKind, Trial, first_tensor
from paged_backend.swaps.mlp import MLP_NAMES, activation_of, pack_mlp
from paged_backend.swaps.norm import norm_weight
from paged_backend.swaps.probe import Recorder
from paged_backend.swaps.weights import NoMatch, Packing, Product, child_of, num_parameters, weight_of

_ATTENTION_NAMES = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj")
# How much farther apart results may be for the model's own hidden states.
_REAL_STATES = 5
# The change of a layer's results that is no change: the same operations run on the same numbers.
_SAME = 1e-3


class FusedLayer(Fused):
    """A whole decoder layer, attention and its cache included, in one call.

    norms: float32 weights of the six places of a norm, absent ones None. weights: query-key-value, output, gates and
    down. attention: the original attention module, on which the engine hangs the layer's blocks.
    """

    def __init__(
        self,
        original: nn.Module,
        attention: nn.Module,
        norms: list[torch.Tensor | None],
        epsilon: float,
        weights: list[Product],
        num_heads: int,
        activation: int,
        rotates: bool,
        rule: tuple[Any, ...],
        returns_tuple: bool,
    ) -> None:
        super().__init__(original)
        # In a tuple, lest it becomes a second child.
        self._attention = (attention,)
        self._fixed = (
            norms,
            epsilon,
            *_arguments(weights),
            num_heads,
            activation,
        )
        self._rotates = rotates
        self._rule = rule
        self._returns_tuple = returns_tuple
        self.weights = tuple(weights)
        self.num_bytes = sum(weight.num_bytes for weight in weights)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        if hidden_states.shape[1] > self.most_rows:
            return self.original(hidden_states, **kwargs)
        layer: PagedLayer = self._attention[0].__dict__["paged_layer"]
        batch = layer.context.batch
        if batch is None:
            raise RuntimeError("a fused layer was called outside a step of the engine")
        tables = batch.groups[layer.group]
        cos, sin = kwargs["position_embeddings"] if self._rotates else (None, None)
        result = cpu.library().decoder_layer(
            hidden_states,
            cos,
            sin,
            *self._fixed,
            layer.cache.key,
            layer.cache.value,
            tables.slot_mapping,
            tables.block_tables,
            batch.context_lens,
            batch.cu_seqlens_q,
            batch.num_decodes,
            *self._rule,
        )
        return (result,) if self._returns_tuple else result


class LayerSwap(SwapKind):
    """Decoder layers of attention and a gated MLP, each with norms before it, behind it or both, and a residual."""

    def wants(self, module: nn.Module) -> bool:
        return _attention_in(module) is not None

    def propose(self, module: nn.Module, call: ModuleCall) -> Iterator[Fused]:
        attention = _attention_in(module)
        mlp = next((child for name, child in module.named_children() if name in ("mlp", "feed_forward")), None)
        if attention is None or mlp is None:
            raise NoMatch("it has no child called mlp")
        recorder: Recorder = attention.__dict__["paged_layer"]
        if recorder.cache.key.dtype in QUANTISED_MAX:
            raise NoMatch("its cache is quantised")
        if call.x.dim() != 3 or (isinstance(call.output, tuple) and len(call.output) != 1):
            raise NoMatch("it does not turn hidden states into hidden states")
        activation = activation_of(mlp)
        norms, epsilon = _layer_norms(module, attention)
        known = sum(num_parameters(norm) for norm in _named_norms(module, attention).values())
        known += num_parameters(mlp, *MLP_NAMES) + num_parameters(attention, *_ATTENTION_NAMES)
        if num_parameters(module) != known:
            raise NoMatch("it has weights that are not known")
        _check_far(module, call)
        gates, down = pack_mlp(mlp, self.packing)
        output = self.packing.pack(weight_of(child_of(attention, "o_proj")))
        weights = [_pack_qkv(attention, self.packing), output, gates, down]
        if len({type(weight) for weight in weights}) > 1:
            raise NoMatch("some of its weights are quantised and some are not")
        for rotates in (True, False) if _has_rotation(call) else (False,):
            fused = FusedLayer(
                module,
                attention,
                norms,
                epsilon,
                weights,
                recorder.num_heads,
                activation,
                rotates,
                cpu.rule_arguments(recorder.variant),
                isinstance(call.output, tuple),
            )
            yield self.packing.up_to_crossover(fused, call.x.dtype)

    def trials(self, module: nn.Module, call: ModuleCall) -> list[Trial]:
        drawn = call.drawn()
        far = call.kwargs if call.far is None else call.far
        return [
            Trial(drawn, far, first_tensor(module.forward(drawn, **far)), base=drawn),
            # On the model's own hidden states too, whose outliers make half precisions rounder.
            Trial(call.x, call.kwargs, first_tensor(call.output), base=call.x, leniency=_REAL_STATES),
        ]


KIND = LayerSwap


def _attention_in(layer: nn.Module) -> nn.Module | None:
    """The child on which the probe hung one layer's blocks."""
    hung = (child for child in layer.children() if isinstance(child.__dict__.get("paged_layer"), Recorder))
    return next(hung, None)


def _check_far(layer: nn.Module, call: ModuleCall) -> None:
    """Raise NoMatch if the layer goes by positions otherwise than by the cosines and sines that C++ is given too.

    Told by what it makes of the keywords of far positions beside the rotation of near ones; a factor that is 1 at small
    positions, as that of Ministral's queries, shows nowhere else.
    """
    if call.far is None:
        raise NoMatch("it was not called at far positions")
    rotation = {name: value for name, value in call.kwargs.items() if name == "position_embeddings"}
    expected = Trial(call.x, call.kwargs, first_tensor(call.output), base=call.x)
    moved = expected.distance_of(first_tensor(layer.forward(call.x, **{**call.far, **rotation})))
    # Written so that NaN fails.
    if not moved <= _SAME:
        raise NoMatch(f"it goes by positions otherwise than by rotation: its results change by {moved:.1e} far out")


def _has_rotation(call: ModuleCall) -> bool:
    """Whether the layer was given cosines and sines for its tokens that C++ can read."""
    pair = call.kwargs.get("position_embeddings")
    return isinstance(pair, tuple) and all(
        isinstance(part, torch.Tensor)
        and part.dtype == call.x.dtype
        and part.shape[:-1] == call.x.shape[:-1]
        and part.is_contiguous()
        for part in pair
    )


def _pack_qkv(attention: nn.Module, packing: Packing) -> Product:
    if hasattr(attention, "qkv_proj"):
        return packing.pack(weight_of(child_of(attention, "qkv_proj")))
    return packing.pack(*(weight_of(child_of(attention, f"{name}_proj")) for name in "qkv"))


def _arguments(weights: list[Product]) -> tuple[list[Any], ...]:
    """The weights as decoder_layer of library.cpp takes them: tensors, scales, biases, formats, columns."""
    packed = [weight for weight in weights if isinstance(weight, cpu.PackedLinear)]
    if packed:
        return [w.packed for w in packed], [w.scale for w in packed], [w.bias for w in packed], [], []
    quantised = [weight for weight in weights if isinstance(weight, cpu.QuantisedLinear)]
    parts = [part for weight in quantised for part in weight.weights]
    biases = [bias for weight in quantised for bias in weight.biases]
    return (
        [part.packed for part in parts],
        [None] * len(parts),
        biases,
        [part.format.code for part in parts],
        [part.num_columns for part in parts],
    )


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
        weight, epsilon = norm_weight(norms[name])
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

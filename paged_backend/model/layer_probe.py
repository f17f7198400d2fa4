"""The layer probe: one short forward pass that tells how a model calls attention, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from paged_backend.kernels import FULL, MaskRule
from paged_backend.memory.kv_cache import LayerSpec
from paged_backend.model.position_limit import PositionTables, rope_limit

PROBE_NAME = "paged_backend_probe"
# Above zero, see PositionTables.
_FIRST_POSITION = 3
# Rules are read at this position: the longest window or chunk that can be told from full attention.
_FAR = 1 << 20
# A mask handed to a layer is filled with the number of its rule; 0 and 1 could come out of a conversion to bool.
_FIRST_TAG = 2

# Runs the model on (input_ids, positions), both [num_tokens].
Forward = Callable[[torch.Tensor, torch.Tensor], Any]


class Unprovable(Exception):
    """A reason why a model cannot be served; the twin raises it on as UnsupportedModel, with the model's name."""


@dataclass
class _Call:
    module: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    window: int | None
    causal: bool


@dataclass
class _Recording:
    """What one forward pass did."""

    positions: torch.Tensor
    mask_functions: list[Callable[..., torch.Tensor]] = field(default_factory=list)
    calls: list[_Call] = field(default_factory=list)


@dataclass(frozen=True)
class LayerProbe:
    """The attention modules in the order in which they run, what each does, and the tokens its positions allow."""

    modules: list[nn.Module]
    layers: list[LayerSpec]
    max_positions: int | None


_recording: ContextVar[_Recording] = ContextVar("paged_backend_recording")


def probe_layers(
    model: PreTrainedModel, forward: Forward, token_ids: torch.Tensor, advertised_positions: int | None
) -> LayerProbe:
    """Run ``forward`` on ``model``, whose attention implementation is ``PROBE_NAME``, and describe its layers.

    ``token_ids`` is ``[num_tokens]``. Raises Unprovable with the reason when attention is not called in a way that
    blocks can serve.
    """
    if advertised_positions is not None:
        token_ids = token_ids[: max(2, advertised_positions - _FIRST_POSITION)]
    positions = torch.arange(_FIRST_POSITION, _FIRST_POSITION + token_ids.numel(), device=token_ids.device)
    with PositionTables(positions) as tables:
        recording = _record(forward, token_ids, positions)
    max_positions = min((limit for limit in (tables.limit, rope_limit(model)) if limit is not None), default=None)

    names = {id(module): name for name, module in model.named_modules()}
    rules: dict[int, MaskRule] = {}
    modules: list[nn.Module] = []
    layers: list[LayerSpec] = []
    for call in recording.calls:
        name = names.get(id(call.module), type(call.module).__name__)
        if any(call.module is module for module in modules):
            raise Unprovable(f"{name} ({type(call.module).__name__}) calls attention more than once a forward pass")
        modules.append(call.module)
        layers.append(_layer_spec(name, call, recording, rules))
    if not layers:
        raise Unprovable("its attention never goes through transformers' AttentionInterface")
    _check_layer_indices(modules, layers)

    max_positions = _independent_positions(forward, token_ids, recording, layers, max_positions, advertised_positions)
    return LayerProbe(modules, layers, max_positions)


def _record(forward: Forward, token_ids: torch.Tensor, positions: torch.Tensor) -> _Recording:
    recording = _Recording(positions)
    token = _recording.set(recording)
    try:
        forward(token_ids, positions)
    finally:
        _recording.reset(token)
    return recording


def _recorded_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    sliding_window: int | None = None,
    position_bias: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    if position_bias is not None:
        raise Unprovable(f"{type(module).__name__} adds a position bias to the attention scores")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    recording = _recording.get(None)
    if recording is None:
        raise RuntimeError(f"attn_implementation={PROBE_NAME!r} computes nothing; it is for the probe of paged_backend")
    call = _Call(module, query, key, value, attention_mask, sliding_window, causal is not False)
    recording.calls.append(call)
    batch, num_heads, num_tokens, _ = query.shape
    return value.new_zeros(batch, num_tokens, num_heads, value.shape[-1]), None


def _recorded_mask(
    *_: Any, mask_function: Callable[..., torch.Tensor], batch_size: int | None = None, **kwargs: Any
) -> torch.Tensor:
    recording = _recording.get()
    recording.mask_functions.append(mask_function)
    tag = _FIRST_TAG + len(recording.mask_functions) - 1
    num_tokens = recording.positions.numel()
    return torch.full(
        (batch_size or 1, 1, num_tokens, num_tokens), tag, dtype=torch.float32, device=recording.positions.device
    )


AttentionInterface.register(PROBE_NAME, _recorded_attention)
AttentionMaskInterface.register(PROBE_NAME, _recorded_mask)


def _layer_spec(name: str, call: _Call, recording: _Recording, rules: dict[int, MaskRule]) -> LayerSpec:
    query, key, value = call.query, call.key, call.value
    num_tokens = recording.positions.numel()
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if key.shape[2] != value.shape[2] or key.shape[2] != num_tokens or query.shape[2] != num_tokens:
        raise Unprovable(f"{name} attends to something other than the tokens of its own sequence ({shapes})")
    if query.shape[0] != 1 or key.shape[0] != 1 or query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1]:
        raise Unprovable(f"{name} lays out its heads in a way that blocks do not hold ({shapes})")
    return LayerSpec(
        name=name,
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        key_dim=key.shape[3],
        value_dim=value.shape[3],
        dtype=torch.promote_types(key.dtype, value.dtype),
        device=key.device,
        rule=_call_rule(name, call, recording, rules),
    )


def _call_rule(name: str, call: _Call, recording: _Recording, rules: dict[int, MaskRule]) -> MaskRule:
    """The rule of the mask a layer received; without one, of the window it was told.

    Where both are given the mask decides, as it does in transformers' eager and sdpa attention.
    """
    if call.mask is None:
        if not call.causal:
            raise Unprovable(f"{name} attends in both directions")
        if call.window is None:
            return FULL
        if call.window < 1:
            raise Unprovable(f"{name} attends to a window of {call.window} tokens")
        return MaskRule("window", int(call.window))
    tags = call.mask.unique().tolist()
    tag = int(tags[0]) - _FIRST_TAG
    if len(tags) != 1 or not 0 <= tag < len(recording.mask_functions):
        raise Unprovable(f"{name} attends with a mask of its own making")
    if tag not in rules:
        try:
            rules[tag] = read_mask_rule(recording.mask_functions[tag], recording.positions.device)
        except Unprovable as reason:
            raise Unprovable(f"{name}: {reason}") from None
    return rules[tag]


def read_mask_rule(mask_function: Callable[..., torch.Tensor], device: torch.device) -> MaskRule:
    """Tell full, window and chunk apart by asking ``mask_function(0, 0, i, j)`` on a grid.

    ``device`` is where the function was made: it may hold tensors, as that of chunked attention does. Raises
    Unprovable when it is none of the three: bidirectional, or depending on more than positions.
    """

    def visible(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        try:
            zero = torch.zeros((), dtype=torch.long, device=device)
            answer = mask_function(zero, zero, query, key)
        except Exception as error:
            raise Unprovable(f"its mask depends on more than positions ({error})") from error
        return answer.expand(torch.broadcast_shapes(query.shape, key.shape))

    query = torch.tensor(_FAR, device=device)
    first = int(visible(query, torch.arange(_FAR + 1, device=device)).int().argmax())
    # Both a window and a chunk are as long as the row of queries that see the first key visible from afar.
    queries = torch.arange(first, first + _FAR + 1, device=device)
    size = int(visible(queries, queries[0]).sum())
    candidates, edges = [FULL], {_FAR}
    if size <= _FAR:
        # No query sees nothing, not even itself.
        candidates = [MaskRule("window", size), MaskRule("chunk", size)] if size else []
        edges |= {size * times for times in (1, 2, 3, _FAR // max(1, size))}
    points = sorted({*range(48), *(max(0, edge + offset) for edge in edges for offset in range(-3, 4))})
    grid = torch.tensor(points, device=device)
    seen = visible(grid[:, None], grid)
    for rule in candidates:
        starts = torch.tensor([rule.first_visible(point) for point in points], device=device)
        if torch.equal(seen, (starts[:, None] <= grid) & (grid <= grid[:, None])):
            return rule
    raise Unprovable("its mask is neither causal, a causal window nor a causal chunk")


def _check_layer_indices(modules: list[nn.Module], layers: list[LayerSpec]) -> None:
    """Layers that share an index would share a cache in stock ``generate``, which then is no reference."""
    owners: dict[int, str] = {}
    for module, layer in zip(modules, layers, strict=True):
        index = getattr(module, "layer_idx", None)
        if index is None:
            continue
        if index in owners:
            raise Unprovable(f"layer index {index} is shared by {owners[index]} and {layer.name}")
        owners[index] = layer.name


def _independent_positions(
    forward: Forward,
    token_ids: torch.Tensor,
    near: _Recording,
    layers: list[LayerSpec],
    max_positions: int | None,
    advertised_positions: int | None,
) -> int | None:
    """Check that far positions of batch mates leave a token's keys alone, unlike RoPE that reads their maximum.

    Attention gives zeros while recording, so only such a model lets one token change another's keys. Returns
    ``max_positions``, or ``advertised_positions`` where positions beyond them fail.
    """
    advertised = advertised_positions or _FAR
    # Past the end of a table that went unnoticed, a look-up raises on a CPU but ruins an accelerator's context.
    beyond = 4 * advertised if token_ids.device.type == "cpu" else advertised
    positions = near.positions.clone()
    half = positions.numel() // 2

    def move_second_half(end: int) -> _Recording:
        positions[half:] = torch.arange(end + half - positions.numel(), end, device=positions.device)
        return _record(forward, token_ids, positions)

    try:
        far = move_second_half(max_positions or beyond)
    except Unprovable:
        raise
    except Exception:
        if max_positions is not None:
            raise
        max_positions = advertised
        far = move_second_half(max_positions)
    if len(far.calls) != len(near.calls):
        raise Unprovable("it does not call attention the same number of times in every forward pass")
    for layer, before, after in zip(layers, near.calls, far.calls, strict=True):
        for name in ("query", "key", "value"):
            old, new = (getattr(call, name)[:, :, :half].float() for call in (before, after))
            # Rounding may differ: a far token may make a mixture of experts group its tokens otherwise.
            if (old - new).norm() > 0.05 * old.norm():
                raise Unprovable(
                    f"{name} states of a request in {layer.name} change when another request is at position "
                    f"{int(positions[-1])}"
                )
    return max_positions

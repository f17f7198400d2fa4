"""The layer probe: one short forward pass that tells how a model calls attention, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel

from paged_backend.kernels import FULL, MaskRule
from paged_backend.memory.kv_cache import LayerSpec
from paged_backend.model.packed_past import ClaimedPast, PackedPast
from paged_backend.model.position_limit import FAR, PositionTables, rope_limit

PROBE_NAME = "paged_backend_probe"
# Above zero, see PositionTables.
_FIRST_POSITION = 3
# Rules are read at this position: the longest window or chunk that can be told from full attention.
_FAR = 1 << 20
# A mask handed to a layer is filled with the number of its rule; 0 and 1 could come out of a conversion to bool.
_FIRST_TAG = 2

# What a cache may change of the states that a token brings to attention: the same operations run on the same numbers.
_SAME = 1e-3

# Runs the model on (input_ids, positions), both [num_tokens], and a cache or None.
Forward = Callable[[torch.Tensor, torch.Tensor, Cache | None], Any]


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
    """The attention modules in the order in which they run, what each does, and the tokens its positions allow.

    end: the positions below which it was run. reads_past: whether the model asks its cache how many tokens came
    before. bound_reason: why positions end where they do, if it is only that they cannot be proven beyond.
    """

    modules: list[nn.Module]
    layers: list[LayerSpec]
    max_positions: int | None
    end: int
    reads_past: bool
    bound_reason: str | None


_recording: ContextVar[_Recording] = ContextVar("paged_backend_recording")


def probe_layers(
    model: PreTrainedModel,
    forward: Forward,
    token_ids: torch.Tensor,
    advertised_positions: int | None,
    *,
    takes_cache: bool = True,
    keeps_state: bool = False,
) -> LayerProbe:
    """Run ``forward`` on ``model``, whose attention implementation is ``PROBE_NAME``, and describe its layers.

    ``token_ids`` is ``[num_tokens]``. takes_cache: whether ``forward`` can be given one. keeps_state: whether there
    need be no attention at all. Raises Unprovable with the reason when attention is not called in a way that blocks can
    serve.
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
        modules.append(call.module)
        layers.append(_layer_spec(name, call, recording, rules))
    if not layers and not keeps_state:
        raise Unprovable("its attention never goes through transformers' AttentionInterface")
    _check_layer_indices(modules, layers)

    passes = _FarPasses(model, forward, token_ids, modules, layers, takes_cache=takes_cache)
    end, is_limit = _last_position(passes, max_positions, advertised_positions)
    if is_limit:
        max_positions = end
    _check_independence(recording, passes.packed(end), layers, end)
    reads_past, bound_reason = False, None
    if passes.past_matters(end):
        reads_past = passes.can_tell_past(end)
        if not reads_past:
            max_positions = end = passes.bound(end)
            bound_reason = f"from position {end} on it goes by the length of its own cache, and there is none on blocks"
    return LayerProbe(modules, layers, max_positions, end, reads_past, bound_reason)


def _record(
    forward: Forward, token_ids: torch.Tensor, positions: torch.Tensor, cache: Cache | None = None
) -> _Recording:
    recording = _Recording(positions)
    token = _recording.set(recording)
    try:
        forward(token_ids, positions, cache)
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
    """Layers that share an index would share a cache in stock ``generate``, which then is no reference.

    Where modules run several times a pass, an index alone does not tell where each keeps its keys.
    """
    if len(set(modules)) < len(modules):
        return
    owners: dict[int, str] = {}
    for module, layer in zip(modules, layers, strict=True):
        index = getattr(module, "layer_idx", None)
        if index is None:
            continue
        if index in owners:
            raise Unprovable(f"layer index {index} is shared by {owners[index]} and {layer.name}")
        owners[index] = layer.name


class _FarPasses:
    """Passes over tokens of which the first half are at the first positions, and the others at the last before an end.

    Without a cache, as on blocks; and with one of as many tokens as come before the others, as in stock ``generate``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        forward: Forward,
        token_ids: torch.Tensor,
        modules: list[nn.Module],
        layers: list[LayerSpec],
        *,
        takes_cache: bool,
    ) -> None:
        self._config, self._forward, self._ids, self._takes_cache = model.config, forward, token_ids, takes_cache
        self._half = token_ids.numel() // 2
        self.on_cpu = token_ids.device.type == "cpu"
        indices = [getattr(module, "layer_idx", None) for module in modules]
        self._devices = {index: layer.device for index, layer in zip(indices, layers, strict=True) if index is not None}
        self._packed: dict[int, _Recording] = {}
        self._claimed: dict[int, _Recording] = {}

    def run(self, end: int) -> None:
        """Run the tokens up to ``end``, with a cache if there can be one, and once more without it if it was asked."""
        if self._takes_cache:
            cache = ClaimedPast(end - self._ids.numel(), self._config)
            try:
                recording = self._record(end, cache)
            except Exception:
                # Without a cache it tells whether that is because of the cache or of the positions.
                recording = None
            if recording is not None and not cache.was_asked:
                self._packed[end] = recording
                return
            if recording is not None:
                self._claimed[end] = recording
        self._packed[end] = self._record(end)

    def packed(self, end: int) -> _Recording:
        """What blocks would see."""
        if end not in self._packed:
            self.run(end)
        return self._packed[end]

    def past_matters(self, end: int) -> bool:
        """Whether the tokens before ``end`` come out otherwise with a cache."""
        packed = self.packed(end)
        return end in self._claimed and self._differ(packed, self._claimed[end])

    def can_tell_past(self, end: int) -> bool:
        """Whether they come out as with a cache if each token of a pack is told its own number of tokens before it."""
        try:
            told = self._record(end, PackedPast(self._positions(end), self._devices))
        except Exception:
            return False
        return not self._differ(told, self._claimed[end])

    def bound(self, end: int) -> int:
        """The positions below which a cache changes nothing, given that it does before ``end``."""
        low = self._ids.numel()
        while end - low > 1:
            middle = (low + end) // 2
            low, end = (low, middle) if self.past_matters(middle) else (middle, end)
        return low

    def _positions(self, end: int) -> torch.Tensor:
        positions = torch.arange(end - self._ids.numel(), end, device=self._ids.device)
        positions[: self._half] = torch.arange(_FIRST_POSITION, _FIRST_POSITION + self._half, device=positions.device)
        return positions

    def _record(self, end: int, cache: Cache | None = None) -> _Recording:
        return _record(self._forward, self._ids, self._positions(end), cache)

    def _differ(self, packed: _Recording, claimed: _Recording) -> bool:
        if len(packed.calls) != len(claimed.calls):
            return True
        if any(a.key.shape != b.key.shape for a, b in zip(packed.calls, claimed.calls, strict=True)):
            raise Unprovable("with a cache of its own it attends to other tokens, as where layers share a place in it")
        return any(
            _change(getattr(a, name)[:, :, self._half :], getattr(b, name)[:, :, self._half :]) > _SAME
            for a, b in zip(packed.calls, claimed.calls, strict=True)
            for name in ("query", "key", "value")
        )


def _last_position(passes: _FarPasses, max_positions: int | None, advertised_positions: int | None) -> tuple[int, bool]:
    """Where far positions end, and whether that is a limit because those beyond fail.

    They end at ``max_positions``, else beyond ``advertised_positions``, or with them where those beyond fail.
    """
    advertised = advertised_positions or FAR
    # Past the end of a table that went unnoticed, a look-up raises on a CPU but ruins an accelerator's context.
    end = max_positions or (max(4 * advertised, FAR) if passes.on_cpu else advertised)
    try:
        passes.run(end)
    except Unprovable:
        raise
    except Exception:
        if max_positions is not None:
            raise
        return advertised, True
    return end, False


def _check_independence(near: _Recording, far: _Recording, layers: list[LayerSpec], end: int) -> None:
    """Check that far positions of batch mates leave a token's keys alone, unlike RoPE that reads their maximum.

    Attention gives zeros while recording, so only such a model lets one token change another's keys.
    """
    if len(far.calls) != len(near.calls):
        raise Unprovable("it does not call attention the same number of times in every forward pass")
    half = near.positions.numel() // 2
    for layer, before, after in zip(layers, near.calls, far.calls, strict=True):
        for name in ("query", "key", "value"):
            # Rounding may differ: a far token may make a mixture of experts group its tokens otherwise.
            if _change(getattr(before, name)[:, :, :half], getattr(after, name)[:, :, :half]) > 0.05:
                raise Unprovable(
                    f"{name} states of a request in {layer.name} change when another request is at position {end - 1}"
                )


def _change(old: torch.Tensor, new: torch.Tensor) -> float:
    """The distance of ``new`` as a share of ``old``; infinite where one of them is no number."""
    change = ((old.float() - new.float()).norm() / old.float().norm().clamp_min(1e-30)).item()
    return change if change == change else torch.inf

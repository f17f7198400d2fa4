"""Twin: a structural copy of the user's model that shares its weights and attends through blocks."""

from __future__ import annotations

import inspect
import itertools
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import Cache, PreTrainedConfig, PreTrainedModel

from paged_backend.errors import UnsupportedModel
from paged_backend.memory.kv_cache import LayerSpec
from paged_backend.model.attention import ATTENTION_NAME, LayersInOrder, PagedLayer
from paged_backend.model.fingerprint import Fingerprint
from paged_backend.model.foreign_code import hooked, patched
from paged_backend.model.layer_probe import PROBE_NAME, Unprovable, probe_layers
from paged_backend.model.model_copy import accelerate_hooks, copy_model, plain_model
from paged_backend.model.packed_past import PackedPast
from paged_backend.model.position_limit import far_positions, rope_limit
from paged_backend.model.state_probe import CACHE_NAMES, find_mixers

# The layers that keep keys and values per token, a state of fixed size, both or nothing. The others read a selection
# of the keys, or keep a summary of them.
_SERVED_LAYER_TYPES = frozenset(
    {
        "attention",
        "chunked_attention",
        "conv",
        "full_attention",
        "hybrid",
        "hybrid_sliding",
        "linear_attention",
        "mamba",
        "mlp",
        "moe",
        "recurrent",
        "sliding_attention",
    }
)
_DYNAMICALLY_QUANTISED = "torch.ao.nn.quantized.dynamic"
_SHARDED_MODULES = frozenset({"FSDPModule", "FullyShardedDataParallel"})


class ExpandedCacheWarning(UserWarning):
    """Latent attention (MLA) is served, but its keys and values are cached expanded, not as the small latent."""


class BoundedPositionsWarning(UserWarning):
    """A model is served up to a position only, beyond which it cannot be proven to compute the same on blocks."""


class Twin:
    """The copy on which the engine runs; the user's model is never touched.

    module: the copy. layers: what each attention layer does, in the order in which they run; layer_indices: their
    places in stock ``generate``'s cache, None where the module does not say. mixers: what stands in for the modules
    that keep recurrent state. device: where token ids go. dtype: of keys and values. vocab_size: rows of the input
    embedding. max_positions: tokens that the model's positions allow, None without a hard limit (a learned table ends;
    longrope and dynamic NTK scaling read the longest request of a batch, so they are held to their original length).
    bound_reason: why they end there, if it is that the model cannot be proven beyond. advertised_positions: the
    config's ``max_position_embeddings``. foreign_code: where hooks or patches of the user's own take part, which may
    change what they do at any time, in words, or None; patched: only those that are not on the model itself but on its
    classes and functions.

    Forward hooks of the model run on the copy too, on packed tokens ``[1, num_tokens, ...]``. A twin is as good as the
    model was when it was made: ``stale_reason`` says whether that still holds.

    Raises UnsupportedModel, which names the model's class and the reason, for a model whose attention cannot be
    served.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        plain = plain_model(model)
        try:
            if not isinstance(plain, PreTrainedModel):
                raise Unprovable("it is not a transformers model with its adapters inside its layers")
            _check_kind(plain)
            self._model = weakref.ref(plain)
            self._fingerprint = Fingerprint(plain)
            self.patched = patched(plain)
            self.foreign_code = self.patched or _first_hook(plain)
            self.module = copy_model(plain)
            self._probe()
            self._fingerprint.leave_out(plain, self._held_states())
        except Unprovable as reason:
            raise unsupported(plain, str(reason)) from reason
        except Exception as error:
            raise unsupported(plain, f"the load probe failed with {type(error).__name__}: {error}") from error
        if getattr(self.module.config.get_text_config(decoder=True), "kv_lora_rank", None):
            warnings.warn(
                f"{type(plain).__name__} has latent attention, whose keys and values are cached expanded here: "
                f"{sum(layer.bytes_per_token() for layer in self.layers)} bytes a token",
                ExpandedCacheWarning,
                stacklevel=2,
            )

        if self.bound_reason:
            warnings.warn(
                f"{type(plain).__name__} is served for up to {self.max_positions} tokens: {self.bound_reason}",
                BoundedPositionsWarning,
                stacklevel=2,
            )

    @property
    def why_positions_end(self) -> str | None:
        """Why no request may be longer than ``max_positions``, where the model's own tables do not say so."""
        if self.bound_reason is None and rope_limit(self.module) == self.max_positions is not None:
            return "there its rotary embedding changes its frequencies, for all that share a batch with a longer one"
        return self.bound_reason

    def __deepcopy__(self, memo: dict[int, Any]) -> Twin:
        # A model that somehow holds its own twin must not copy it into the next.
        return self

    def _probe(self) -> None:
        module = self.module
        embedding: Any = module.get_input_embeddings()
        if not hasattr(embedding, "weight"):
            raise Unprovable(f"its tokens do not enter through one embedding but a {type(embedding).__name__}")
        config = module.config.get_text_config(decoder=True)
        self.vocab_size = int(embedding.weight.shape[0])
        self.advertised_positions: int | None = getattr(config, "max_position_embeddings", None)
        self.device = _device_of(embedding, module)
        head = module.get_output_embeddings()
        self._head_device = self.device if head is None else _device_of(head, module)
        parameters = inspect.signature(module.forward).parameters
        self._keeps_rows = "logits_to_keep" in parameters
        # How wide embeddings are that may be fed in place of tokens; None if none may.
        width = getattr(embedding, "embedding_dim", None)
        self.embedding_dim: int | None = width if "inputs_embeds" in parameters else None

        self._cache_name = next((name for name in CACHE_NAMES if name in parameters), None)
        self._reads_past = False
        # Whether padding on a row's left changes nothing in stock; the proof tells of a model that keeps states.
        self.masks_padding = True

        with torch.inference_mode():
            ids = torch.tensor(self.sample_token_ids(16), device=self.device)
            self.mixers = find_mixers(module, ids[: min(9, self.advertised_positions or 9)])
            self._set_attention(PROBE_NAME)
            probe = probe_layers(
                module,
                self._logits_of_first,
                ids,
                self.advertised_positions,
                takes_cache=self._cache_name is not None,
                keeps_state=bool(self.mixers),
            )
        self._set_attention(ATTENTION_NAME)
        self.attention_modules = probe.modules
        self.layers: list[LayerSpec] = probe.layers
        self.layer_indices: list[int | None] = [
            getattr(module, "layer_idx", None) if probe.modules.count(module) == 1 else None for module in probe.modules
        ]
        self.max_positions, self.bound_reason = probe.max_positions, probe.bound_reason
        self._end, self._reads_past = probe.end, probe.reads_past
        indexed = zip(self.layer_indices, self.layers, strict=True)
        self._past_devices = {index: layer.device for index, layer in indexed if index is not None}
        self.dtype = self.layers[0].dtype if self.layers else embedding.weight.dtype

    def _set_attention(self, name: str) -> None:
        # set_attn_implementation looks for the interface in a class's source; here the recording tells.
        seen: set[int] = set()
        for module in self.module.modules():
            config = getattr(module, "config", None)
            if isinstance(config, PreTrainedConfig) and id(config) not in seen:
                seen.add(id(config))
                config._attn_implementation = name

    def sample_token_ids(self, count: int, seed: int = 0) -> list[int]:
        """Draw ordinary token ids, all different where the vocabulary allows, without touching a global generator."""
        config = self.module.config
        special = {
            token
            for part in (config, config.get_text_config(decoder=True))
            for name, value in vars(part).items()
            if name.endswith(("token_id", "token_index"))
            for token in (value if isinstance(value, list) else [value])
        }
        ordinary = [token for token in range(min(self.vocab_size, 1 << 15)) if token not in special]
        return np.random.default_rng(seed).choice(ordinary, count, replace=count > len(ordinary)).tolist()

    def far_positions(self, count: int) -> list[int]:
        """The ``count`` positions, farthest first, at which the model is likeliest to compute otherwise than before."""
        return far_positions(self.module.config.get_text_config(decoder=True), self._end, count)

    def _held_states(self) -> frozenset[tuple[str, str]]:
        """The attributes of modules in which states are kept, as (module, attribute)."""
        names = {module: name for name, module in self.module.named_modules()}
        return frozenset((names[module], attribute) for mixer in self.mixers for module, attribute in mixer.held)

    @property
    def state_mode(self) -> str | None:
        """How chunks of a prompt go on from recurrent states: in one call, or token by token; None without any."""
        return self.mixers[0].mode if self.mixers else None

    @state_mode.setter
    def state_mode(self, mode: str) -> None:
        for mixer in self.mixers:
            mixer.mode = mode

    def attach(self, layers: Sequence[PagedLayer]) -> None:
        """Hang each layer's blocks on its attention module, in the order of ``layers``."""
        self.paged_layers = list(layers)
        by_module: dict[torch.nn.Module, list[PagedLayer]] = {}
        for module, layer in zip(self.attention_modules, layers, strict=True):
            by_module.setdefault(module, []).append(layer)
        for module, own in by_module.items():
            module.__dict__["paged_layer"] = own[0] if len(own) == 1 else LayersInOrder(own)

    def logits(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        embeds: Sequence[tuple[int, torch.Tensor]] = (),
    ) -> torch.Tensor:
        """Run packed tokens: ``input_ids`` and ``positions`` ``[num_tokens]``, ``rows`` ``[num_rows]``, all int64.

        Each of ``embeds``, a place and ``[count, D]``, is fed in place of that many tokens from there on. Returns
        ``[num_rows, vocab_size]`` in the model's dtype.
        """
        inputs: dict[str, Any] = {"input_ids": input_ids[None]}
        if embeds:
            embedded = self.module.get_input_embeddings()(input_ids[None]).clone()
            for place, given in embeds:
                embedded[0, place : place + len(given)] = given
            inputs = {"inputs_embeds": embedded}
        past = PackedPast(positions, self._past_devices) if self._reads_past else None
        rows = rows.to(self._head_device)
        if self._keeps_rows:
            return self._forward(inputs, positions, past, logits_to_keep=rows)
        return self._forward(inputs, positions, past)[rows]

    def _logits_of_first(
        self, input_ids: torch.Tensor, positions: torch.Tensor, cache: Cache | None = None
    ) -> torch.Tensor:
        rows = {"logits_to_keep": torch.zeros(1, dtype=torch.long, device=self._head_device)}
        return self._forward({"input_ids": input_ids[None]}, positions, cache, **(rows if self._keeps_rows else {}))

    def _forward(
        self, inputs: dict[str, Any], positions: torch.Tensor, cache: Cache | None, **kwargs: Any
    ) -> torch.Tensor:
        # Most models are given no cache, and make none.
        if cache is not None and self._cache_name is not None:
            kwargs[self._cache_name] = cache
        output = self.module(**inputs, position_ids=positions[None], use_cache=False, **kwargs)
        return logits_of(output)

    def stale_reason(self, *, at_a_glance: bool = False) -> str | None:
        """Why the model is no longer what this twin was made from, or None; None too when the model is gone.

        at_a_glance: look for in-place operations on its weights only, which takes next to no time.
        """
        model = self._model()
        if model is None:
            return None
        if at_a_glance:
            return "weights were modified in place" if self._fingerprint.was_written() else None
        return self._fingerprint.difference(model)


def logits_of(output: Any) -> torch.Tensor:
    """The logits ``[num_tokens, vocab_size]`` of a forward pass over one row."""
    logits: torch.Tensor = output[0] if isinstance(output, tuple) else output.logits
    return logits[0]


def unsupported(model: nn.Module, reason: str) -> UnsupportedModel:
    """The error that refuses ``model``."""
    return UnsupportedModel(f"{type(model).__name__} cannot be served with paged attention: {reason}")


def _first_hook(model: PreTrainedModel) -> str | None:
    for name, module in model.named_modules():
        what = hooked(module)
        if what is not None:
            return f"{what} on {name or 'the model'}"
    return None


def _check_kind(model: PreTrainedModel) -> None:
    """Refuse what can be told without running the model."""
    config = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        raise Unprovable("it is an encoder-decoder")
    if model.get_output_embeddings() is None and not model.can_generate():
        raise Unprovable("it has no language-model head")
    layer_types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    others = sorted(set(layer_types) - _SERVED_LAYER_TYPES)
    if others:
        raise Unprovable(f"layers of type {', '.join(others)} keep or read something else than keys, values and states")
    if any(type(module).__module__.startswith(_DYNAMICALLY_QUANTISED) for module in model.modules()):
        raise Unprovable(
            "its layers were quantised by quantize_dynamic, and round what they are given by the largest number of the "
            "whole pass, so that requests would change one another; give the model as it was, with quantize='int8'"
        )
    if any(_SHARDED_MODULES & {base.__name__ for base in type(module).__mro__} for module in model.modules()):
        raise Unprovable("its parameters are sharded by FSDP")
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise Unprovable("its parameters are sharded by DeepSpeed ZeRO-3")
    hooks: Any = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    if any("adapter_names" in getattr(hook, "keywords", ()) for hook in hooks):
        raise Unprovable("each row has an adapter of its own (adapter_names); choose one for all with set_adapter")


def _device_of(module: nn.Module, root: nn.Module) -> torch.device:
    """Where ``module`` computes: with its weights, or where accelerate's hook takes them when they are offloaded."""
    # A head may have no weights of its own.
    device = next(itertools.chain(module.parameters(), root.parameters())).device
    if device.type != "meta":
        return device
    hooks = accelerate_hooks(module) + accelerate_hooks(root)
    if not hooks:
        raise Unprovable("its weights are on the meta device")
    device = hooks[0].execution_device
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)

"""Swaps: modules of the twin replaced by faster ones that a numeric probe found equal."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from paged_backend.config import SWAPS
from paged_backend.kernels import AUTO, QUANTISED_MAX, Backend
from paged_backend.memory.kv_cache import KVCache, group_layers
from paged_backend.model.batch import Batch, build_batch
from paged_backend.model.runner import ModelRunner
from paged_backend.model.twin import Twin
from paged_backend.swaps.fused import Fused
from paged_backend.swaps.patterns import LayerCall, NoMatch, Proposals, Recorder, can_fuse, check_plain

logger = logging.getLogger("paged_backend")

_BLOCK_SIZE = 5
_LENGTHS = (19, 13, 8)
# The distance of a module's results that is rounding, as a share of what the module adds to its input. Measured over
# the layers of SmolLM2-135M and of tiny models: at most 1e-6, 4e-3, 2e-2 and, in int8, 3e-2. A wrong rotation, norm or
# mask gives 0.1 and more.
_ROUNDING = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_INT8_ROUNDING = 0.1
# Spread of the drawn hidden states: small, so that in half precisions a layer's residual does not drown what it adds.
_SPREAD = 0.05
# How much farther apart results may be for the model's own hidden states.
_REAL_STATES = 5


@dataclass
class Swaps:
    """What was replaced in a twin.

    made: how many modules of each kind. refused: why modules were left as they are, by name; modules below one that
    was replaced are not listed. packed_bytes: memory of rearranged weights, held beside the original ones.
    """

    made: dict[str, int] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    packed_bytes: int = 0
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def undo(self, reason: str) -> None:
        """Put the original modules back."""
        for put_back in reversed(self._undo):
            put_back()
        self.refused = {"the model": reason}
        self.made, self.packed_bytes, self._undo = {}, 0, []


def swap_modules(
    twin: Twin,
    *,
    optimize: str | Sequence[str] = "auto",
    quantize: str | None = None,
    backend: Backend = AUTO,
    kv_dtype: torch.dtype | None = None,
) -> Swaps:
    """Replace modules of ``twin``: whole decoder layers, else gated MLPs, else linear layers and RMS norms.

    A pattern proposes the replacement; it stays if it computes the same from drawn hidden states, in a batch of
    decodes and prefill chunks. ``optimize="memory"`` replaces only what needs no copy of weights, ``"none"`` nothing,
    and a list of kinds only those.
    """
    swaps = Swaps()
    if optimize == "none":
        return swaps
    if twin.device.type != "cpu":
        if quantize is not None:
            swaps.refused["the model"] = f"it is on {twin.device}, and weights are rounded on a CPU only"
        return swaps
    if not can_fuse(backend):
        swaps.refused["the model"] = "the C++ operations are not in use"
        return swaps
    packs = optimize != "memory" or quantize is not None
    if packs and (shortage := _shortage(twin, quantize)):
        swaps.refused["the model"] = shortage
        packs = False
    kinds = SWAPS if isinstance(optimize, str) else optimize
    _Swapper(twin, swaps, Proposals(int8=quantize == "int8", packs=packs), backend, kv_dtype).run(kinds)
    logger.info("swapped %s; %d bytes of packed weights", swaps.made or "nothing", swaps.packed_bytes)
    return swaps


class _Swapper:
    """Runs the twin with hooks on the modules that a pattern might know, and replaces those that it knows."""

    def __init__(
        self, twin: Twin, swaps: Swaps, proposals: Proposals, backend: Backend, kv_dtype: torch.dtype | None
    ) -> None:
        self.twin, self.swaps, self.proposals = twin, swaps, proposals
        self.probe = _Probe(twin, backend, kv_dtype)
        self.rounding = _INT8_ROUNDING if proposals.int8 else _ROUNDING.get(twin.dtype, 0.0)
        # A class whose modules compute something else is not packed and tried again for every layer.
        self.hopeless: dict[type, str] = {}

    def run(self, kinds: Sequence[str]) -> None:
        attention = {id(module) for module in self.twin.attention_modules}
        wanted = {
            "layer": lambda module: any(id(child) in attention for child in module.children()),
            "mlp": lambda module: hasattr(module, "down_proj"),
            "linear": lambda module: type(module).__name__ in ("Linear", "Conv1D"),
            "norm": lambda module: type(module).__name__.endswith("RMSNorm"),
        }
        for kind in kinds:
            if kind == "layer" and self.probe.kv_cache.kv_dtype in QUANTISED_MAX:
                self.swaps.refused["the layers"] = "their cache is quantised"
            else:
                self._swap(kind, wanted[kind])

    def _swap(self, kind: str, wanted: Callable[[nn.Module], bool]) -> None:
        reasons: dict[str, str] = {}
        candidates: dict[str, nn.Module] = {}
        for name, module in self._open_modules():
            if wanted(module):
                try:
                    check_plain(module)
                    candidates[name] = module
                except NoMatch as reason:
                    reasons[name] = str(reason)
        fused: dict[str, Fused] = {}

        def propose(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if name in fused or name in reasons:
                return
            try:
                fused[name] = self._proven(kind, module, args, kwargs, output)
            except NoMatch as reason:
                reasons[name] = str(reason)

        with ExitStack() as hooks:
            for name, module in candidates.items():
                hook = functools.partial(propose, name)
                hooks.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
            if candidates:
                self.probe.run()
        for name in candidates.keys() - fused.keys() - reasons.keys():
            reasons[name] = "it was not called"
        for name, module in fused.items():
            self._replace(kind, name, module)
        self.swaps.refused |= reasons

    def _open_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The named modules that do not lie within one that was replaced."""

        def walk(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
            if isinstance(module, Fused):
                return
            yield name, module
            for key, child in module.named_children():
                yield from walk(f"{name}.{key}".lstrip("."), child)

        return walk("", self.twin.module)

    def _proven(
        self, kind: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Fused:
        """A replacement for ``module`` that computes the same as it. Raises NoMatch when there is none."""
        if type(module) in self.hopeless:
            raise NoMatch(self.hopeless[type(module)])
        if len(args) != 1 or not isinstance(args[0], torch.Tensor) or not args[0].is_floating_point():
            raise NoMatch("it is not called with one tensor and keywords")
        if kind == "layer":
            attention, recorded = self.probe.attention_in(module)
            proposals = self.proposals.layer(module, attention, LayerCall(recorded, args[0], kwargs, output))
        else:
            proposals = getattr(self.proposals, kind)(module)
        drawn = torch.randn(args[0].shape, generator=torch.Generator().manual_seed(0)).mul_(_SPREAD).to(args[0].dtype)
        base = drawn if kind == "layer" else torch.zeros(())
        expected = _first(module.forward(drawn, **kwargs))
        closest = math.inf
        for proposal in proposals:
            distance = _distance(_first(proposal(drawn, **kwargs)), expected, base)
            if kind == "layer":
                # On the model's own hidden states too, whose outliers make half precisions rounder.
                real = _distance(_first(proposal(args[0], **kwargs)), _first(output), args[0])
                distance = max(distance, real / _REAL_STATES)
            if distance <= self.rounding:
                return proposal
            closest = min(closest, distance)
        self.hopeless[type(module)] = (
            f"what C++ computes in its place is {closest:.1e} away, and at most {self.rounding:.0e} is rounding"
        )
        raise NoMatch(self.hopeless[type(module)])

    def _replace(self, kind: str, name: str, fused: Fused) -> None:
        parent_name, _, child = name.rpartition(".")
        children = self.twin.module.get_submodule(parent_name)._modules
        self.swaps._undo.append(functools.partial(children.__setitem__, child, fused.original))
        children[child] = fused
        self.swaps.made[kind] = self.swaps.made.get(kind, 0) + 1
        self.swaps.packed_bytes += fused.num_bytes


class _Probe:
    """A forward pass in which one sequence decodes, one goes on with a chunk of its prompt, and one begins."""

    def __init__(self, twin: Twin, backend: Backend, kv_dtype: torch.dtype | None) -> None:
        self.twin = twin
        groups = group_layers(twin.layers, kv_dtype)
        self.sequences = [twin.sample_token_ids(length, seed) for seed, length in enumerate(_LENGTHS)]
        width = -(-max(_LENGTHS) // _BLOCK_SIZE)
        self.tables = np.random.default_rng(0).permutation(len(_LENGTHS) * width).astype(np.int32).reshape(-1, width)
        self.kv_cache = KVCache(twin.layers, groups, [self.tables.size] * len(groups), _BLOCK_SIZE, kv_dtype)
        self.runner = ModelRunner(twin, self.kv_cache, backend)
        a, b, _ = self.sequences
        self.runner.forward(self._batch([], [a[:-1], b[: len(b) // 2]], [0, 0]))
        self.recorders = [Recorder(module.__dict__["paged_layer"]) for module in twin.attention_modules]
        twin.attach(self.recorders)

    def run(self) -> None:
        a, b, c = self.sequences
        half = len(b) // 2
        self.runner.forward(self._batch([(a[-1], len(a) - 1)], [b[half:], c], [half, 0]))

    def attention_in(self, layer: nn.Module) -> tuple[nn.Module, Recorder]:
        """The attention module among a layer's children, and how it calls attention."""
        children = {id(child) for child in layer.children()}
        for module, recorder in zip(self.twin.attention_modules, self.recorders, strict=True):
            if id(module) in children:
                return module, recorder
        raise NoMatch("attention lies deeper inside it")

    def _batch(self, decodes: list[tuple[int, int]], chunks: list[list[int]], starts: list[int]) -> Batch:
        order = list(range(len(decodes) + len(chunks)))
        return build_batch(
            [token for token, _ in decodes],
            [position for _, position in decodes],
            chunks,
            starts,
            [1] * len(chunks),
            [self.tables[order] for _ in self.kv_cache.groups],
            _BLOCK_SIZE,
            self.twin.device,
        )


def _first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def _distance(actual: torch.Tensor, expected: torch.Tensor, base: torch.Tensor) -> float:
    """How far apart results are, as a share of how far the expected ones are from ``base``, in the worst of the rows.

    The median row counts five times: a single row may owe its distance to a number that rounding tipped.
    """
    rows, wanted = actual.double().flatten(0, -2), expected.double().flatten(0, -2)
    added = wanted - (base.double().flatten(0, -2) if base.dim() else base)
    distances = (rows - wanted).norm(dim=-1) / added.norm(dim=-1)
    return max(distances.median().item(), distances.max().item() / 5)


def _shortage(twin: Twin, quantize: str | None) -> str | None:
    """Why there is no memory for packed weights, or None."""
    weights = {
        weight.data_ptr(): weight.numel() * (1 if quantize else weight.element_size())
        for module in twin.module.modules()
        for weight in module._parameters.values()
        if weight is not None and weight.dim() == 2
    }
    need, available = sum(weights.values()), _available_memory()
    if available is not None and 2 * need > available:
        return (
            f"packed weights would take {need / 2**30:.1f} GiB of the {available / 2**30:.1f} GiB of memory that are "
            "available, more than half"
        )
    return None


def _available_memory() -> int | None:
    """Bytes that can be allocated without swapping, where the system tells."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)

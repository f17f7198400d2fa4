"""Swaps: modules of the twin replaced by faster ones that a numeric probe found equal."""

from __future__ import annotations

import functools
import importlib
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paged_backend.config import QUANTIZED_BITS, SWAPS
from paged_backend.kernels import AUTO, Backend, cpu
from paged_backend.model.mixer import DecodeCall, Mixer
from paged_backend.model.quantised_tensor import QuantisedTensor
from paged_backend.model.twin import Twin
from paged_backend.swaps.fused import Fused
from paged_backend.swaps.kind import ModuleCall, SwapKind
from paged_backend.swaps.probe import Probe
from paged_backend.swaps.state import distance, propose
from paged_backend.swaps.weights import NoMatch, Packing, check_plain

logger = logging.getLogger("paged_backend")

# The distance of a module's results that is rounding, as a share of what the module adds to its input. Measured over
# the layers of SmolLM2-135M and of tiny models: at most 1e-6, 4e-3, 2e-2 and, in int8, 3e-2. A wrong rotation, norm or
# mask gives 0.1 and more.
_ROUNDING = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# How far rounded weights may take results, which the same replacement with weights as they are has proven right.
_ROUNDED_WEIGHTS = {8: 0.1, 4: 0.5}


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

    A kind proposes the replacement; it stays if it computes the same from drawn hidden states, in a batch of
    decodes and prefill chunks, and a layer at far positions too. ``optimize="memory"`` replaces only what needs no copy
    of weights, ``"none"`` nothing, and a list of kinds only those.
    """
    swaps = Swaps()
    if optimize == "none":
        return swaps
    if twin.device.type != "cpu":
        if quantize is not None:
            swaps.refused["the model"] = f"it is on {twin.device}, and weights are rounded on a CPU only"
        return swaps
    if twin.patched is not None:
        swaps.refused["the model"] = f"{twin.patched} was patched, and may do something else later"
        return swaps
    if backend not in (AUTO, cpu.BACKEND) or not cpu.is_available():
        swaps.refused["the model"] = "the C++ operations are not in use"
        return swaps
    packs = optimize != "memory" or quantize is not None
    if packs and (shortage := _shortage(twin, quantize)):
        swaps.refused["the model"] = shortage
        packs = False
    kinds = SWAPS if isinstance(optimize, str) else optimize
    probe = Probe(twin, backend, kv_dtype)
    if "state" in kinds and twin.mixers:
        _swap_states(twin, swaps, probe, backend)
    bits = None if quantize is None else QUANTIZED_BITS[quantize]
    swapper = _Swapper(twin, swaps, Packing(bits=bits, packs=packs), probe)
    for kind in kinds:
        if kind != "state":
            swapper.run(kind)
    logger.info("swapped %s; %d bytes of packed weights", swaps.made or "nothing", swaps.packed_bytes)
    return swaps


def _swap_states(twin: Twin, swaps: Swaps, probe: Probe, backend: Backend) -> None:
    """Update recurrent states of decodes where they lie, in each mixer whose own way of doing so is known."""
    calls: dict[Mixer, DecodeCall] = {}
    for mixer in twin.mixers:
        mixer.observer = functools.partial(calls.__setitem__, mixer)
    probe.run()
    for mixer in twin.mixers:
        mixer.observer = None
        undo = functools.partial(mixer.decode_with, mixer.forward, ())
        try:
            forward, in_place = propose(mixer, backend)
            mixer.decode_with(forward, in_place)
            apart, rounding = distance(mixer, calls[mixer], in_place), _ROUNDING.get(twin.dtype, 0.0)
            if not apart <= rounding:
                raise NoMatch(f"its updated state is {apart:.1e} away, and at most {rounding:.0e} is rounding")
        except Exception as reason:
            undo()
            swaps.refused[mixer.name] = str(reason)
            continue
        swaps._undo.append(undo)
        swaps.made["state"] = swaps.made.get("state", 0) + 1


class _Swapper:
    """Runs the twin with hooks on the modules that a kind of swap might know, and replaces those that it knows."""

    def __init__(self, twin: Twin, swaps: Swaps, packing: Packing, probe: Probe) -> None:
        self.twin, self.swaps, self.packing, self.probe = twin, swaps, packing, probe
        self.rounding = _ROUNDING.get(twin.dtype, 0.0)

    def run(self, name_of_kind: str) -> None:
        """Replace the modules of one kind that do not lie within one that was replaced before."""
        kind_class: type[SwapKind] = importlib.import_module(f"paged_backend.swaps.{name_of_kind}").KIND
        kind = kind_class(self.packing)
        exact = kind if self.packing.bits is None else kind_class(Packing(packs=True))
        proof = _Proof(kind, exact, self.probe, self.rounding)
        candidates: dict[str, nn.Module] = {}
        for name, module in self._open_modules():
            if kind.wants(module):
                try:
                    check_plain(module)
                    candidates[name] = module
                except NoMatch as reason:
                    proof.reasons[name] = str(reason)
        with ExitStack() as hooks:
            for name, module in candidates.items():
                hook = functools.partial(proof.try_module, name)
                hooks.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
            if candidates:
                self.probe.run()
        for name in candidates.keys() - proof.fused.keys() - proof.reasons.keys():
            proof.reasons[name] = "it was not called"
        for name, fused in proof.fused.items():
            self._replace(name_of_kind, name, fused)
        self.swaps.refused |= proof.reasons

    def _open_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The named modules that do not lie within one that was replaced."""

        def walk(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
            if isinstance(module, Fused):
                return
            yield name, module
            for key, child in module.named_children():
                yield from walk(f"{name}.{key}".lstrip("."), child)

        return walk("", self.twin.module)

    def _replace(self, kind: str, name: str, fused: Fused) -> None:
        parent_name, _, child = name.rpartition(".")
        children = self.twin.module.get_submodule(parent_name)._modules
        self.swaps._undo.append(functools.partial(children.__setitem__, child, fused.original))
        children[child] = fused
        self.swaps.made[kind] = self.swaps.made.get(kind, 0) + 1
        self.swaps.packed_bytes += fused.num_bytes


class _Proof:
    """Tries what a kind proposes in place of modules, each when the probe calls it for the first time.

    fused: what computes the same, by the module's name. reasons: why the others stay.
    """

    def __init__(self, kind: SwapKind, exact: SwapKind, probe: Probe, rounding: float) -> None:
        self.kind, self.exact, self.probe, self.rounding = kind, exact, probe, rounding
        self.fused: dict[str, Fused] = {}
        self.reasons: dict[str, str] = {}
        # A class whose modules compute something else is not packed and tried again for every layer.
        self._hopeless: dict[type, str] = {}

    def try_module(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """A forward hook, but for the name."""
        if name in self.fused or name in self.reasons:
            return
        try:
            if type(module) in self._hopeless:
                raise NoMatch(self._hopeless[type(module)])
            self.fused[name] = self._proven(module, ModuleCall.of(args, kwargs, output, self.probe.far.get(id(module))))
        except NoMatch as reason:
            self.reasons[name] = str(reason)

    def _proven(self, module: nn.Module, call: ModuleCall) -> Fused:
        """The first proposal that computes the same as ``module``. Raises NoMatch when there is none."""
        closest, limit = math.inf, self.rounding
        trials = None
        for place, fused in enumerate(self.exact.propose(module, call)):
            trials = self.exact.trials(module, call) if trials is None else trials
            distance = max(trial.distance(fused) for trial in trials)
            if distance <= self.rounding and self.kind is not self.exact:
                fused = next(itertools.islice(self.kind.propose(module, call), place, None))
                distance = max(trial.distance(fused) for trial in trials)
                limit = _ROUNDED_WEIGHTS[self.kind.packing.bits or 8]
            if distance <= limit:
                return fused
            closest = min(closest, distance)
        reason = f"what C++ computes in its place is {closest:.1e} away, and at most {limit:.0e} is rounding"
        self._hopeless[type(module)] = reason
        raise NoMatch(reason)


def _shortage(twin: Twin, quantize: str | None) -> str | None:
    """Why there is no memory for packed weights, or None."""
    weights = {
        weight.data_ptr(): weight.numel() * (1 if quantize else weight.element_size())
        for module in twin.module.modules()
        for weight in module._parameters.values()
        if weight is not None and weight.dim() == 2 and not isinstance(weight, QuantisedTensor)
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

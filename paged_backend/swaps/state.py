"""Updates of recurrent states by a token, where the states lie, in place of plain torch's."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any

import torch

from paged_backend.kernels import Backend, gated_delta_update, selective_state_update
from paged_backend.model.mixer import DecodeCall, Mixer
from paged_backend.model.state_rows import StateRows
from paged_backend.swaps.kind import first_tensor
from paged_backend.swaps.weights import NoMatch, check_plain

# What tells transformers' functions apart from others that take a state: names that all of a kind are given.
_GATED_DELTA = {"query", "key", "value", "g", "beta", "initial_state", "use_qk_l2norm_in_kernel"}
_SELECTIVE = {"state", "hidden_states", "dt", "A", "B", "C", "D", "dt_bias", "dt_softplus", "z"}
# The functions that take many tokens at once have this too.
_MANY_TOKENS = "chunk_size"


def propose(mixer: Mixer, backend: Backend) -> tuple[Callable[..., Any], list[int]]:
    """The forward of a mixer's module with a function in it replaced by one that understands StateRows.

    Also the numbers of the states that it takes so. The module's own code runs, with other globals. Raises NoMatch when
    it calls no such function.
    """
    forward = mixer.forward
    module: Any = getattr(forward, "__self__", None)
    if not isinstance(forward, MethodType) or "_hf_hook" in module.__dict__:
        raise NoMatch("its forward was replaced")
    for child in module.children():
        check_plain(child)
    code = inspect.unwrap(forward.__func__)
    stand_ins = dict(_stand_ins(code, backend))
    states = mixer.recurrent
    if len(stand_ins) != 1 or len(states) != 1:
        raise NoMatch(f"it has {len(states)} recurrent states, and calls {len(stand_ins)} functions that are known")
    if mixer.specs[states[0]].dtype != torch.float32:
        raise NoMatch(f"its state is of {mixer.specs[states[0]].dtype}")
    copy = FunctionType(code.__code__, code.__globals__ | stand_ins, code.__name__, code.__defaults__, code.__closure__)
    copy.__kwdefaults__ = code.__kwdefaults__
    return MethodType(copy, module), states


@torch.inference_mode()
def distance(mixer: Mixer, call: DecodeCall, in_place: list[int]) -> float:
    """How far what ``mixer`` now makes of a ``call`` is from what came of it, in its output and each of its states."""
    states: list[Any] = [state.clone() for state in call.before]
    num_rows = len(states[0])
    sources = torch.arange(num_rows, device=states[0].device)
    for number in in_place:
        pool = torch.cat([states[number], torch.full_like(states[number], math.nan)])
        states[number] = StateRows(pool, sources, sources + num_rows)
    output, after = mixer.decode(call.arguments, states)
    results = [first_tensor(output)]
    results += [state.pool[num_rows:] if isinstance(state, StateRows) else state for state in after]
    wanted = [first_tensor(call.output), *call.after]
    return max(_relative(got, want) for got, want in zip(results, wanted, strict=True))


def _relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    error = ((got.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30)).item()
    return error if error == error else math.inf


def _stand_ins(code: FunctionType, backend: Backend) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in code.__code__.co_names:
        function = code.__globals__.get(name)
        if not callable(function) or inspect.isclass(function):
            continue
        try:
            names = set(inspect.signature(function).parameters)
        except (TypeError, ValueError):
            continue
        if _MANY_TOKENS in names:
            continue
        if names >= _GATED_DELTA:
            yield name, _gated_delta(function, backend)
        elif names >= _SELECTIVE:
            yield name, _selective(function, backend)


def _gated_delta(original: Callable[..., Any], backend: Backend) -> Callable[..., Any]:
    def update(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: Any = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:
        """``original``, but for a state that lies in slots; ``[B, 1, H, D]`` each."""
        if not isinstance(initial_state, StateRows):
            return original(
                query, key, value, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, **kwargs
            )
        pool, sources, targets = initial_state
        output = gated_delta_update(
            query[:, 0],
            key[:, 0],
            value[:, 0],
            g[:, 0],
            beta[:, 0],
            pool,
            sources,
            targets,
            normalises=use_qk_l2norm_in_kernel,
            backend=backend,
        )
        return output[:, None].to(query.dtype), initial_state

    return update


def _selective(original: Callable[..., Any], backend: Backend) -> Callable[..., Any]:
    def update(
        state: Any,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor,
        dt_bias: torch.Tensor,
        dt_softplus: bool = False,
        z: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """``original``, but for a state that lies in slots; one number a head stands for all of its dimensions."""
        if not isinstance(state, StateRows):
            return original(state, hidden_states, dt, A, B, C, D, dt_bias, dt_softplus, z, **kwargs)
        return selective_state_update(
            state.pool,
            hidden_states,
            _of_head(dt, 2),
            _of_head(A, 1),
            B,
            C,
            _of_head(D, 1),
            z,
            _of_head(dt_bias, 1),
            state.sources,
            state.targets,
            softplus=dt_softplus,
            backend=backend,
        )

    return update


def _of_head(tensor: torch.Tensor, num_dims: int) -> torch.Tensor:
    """The first ``num_dims`` dimensions of a tensor that says the same along all others."""
    if any(tensor.stride()[num_dims:]):
        raise NoMatch("it updates dimensions of a head each in its own way")
    while tensor.dim() > num_dims:
        tensor = tensor[..., 0]
    return tensor

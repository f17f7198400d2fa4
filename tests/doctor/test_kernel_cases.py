"""The drawn cases notice each feature of an operation that is left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from paged_backend.doctor.kernel_cases import ROUNDS, cases
from paged_backend.doctor.self_test import try_backend
from paged_backend.kernels import FULL, Backend, LayerCache, backends
from paged_backend.kernels.dispatch import REFERENCE

Change = Callable[..., tuple[Any, ...]]


def without(**changes: Any) -> Change:
    """Attention whose variant has these fields instead."""
    return lambda query, cache, sequences, variant: (query, cache, sequences, variant._replace(**changes))


def without_mask(kind: str) -> Change:
    return lambda query, cache, sequences, variant: (
        query,
        cache,
        sequences,
        variant._replace(mask=FULL) if variant.mask.kind == kind else variant,
    )


def with_other_heads(query: torch.Tensor, *others: Any) -> tuple[Any, ...]:
    """Heads that read the keys of the head before."""
    return (query.roll(1, 1), *others)


def with_scales_of_one(query: torch.Tensor, cache: LayerCache, *others: Any) -> tuple[Any, ...]:
    if cache.key_scale is None:
        return (query, cache, *others)
    ones = torch.ones_like(cache.key_scale)
    return (query, LayerCache(cache.key, cache.value, ones, ones), *others)


def with_padding_stored(key: torch.Tensor, value: torch.Tensor, cache: LayerCache, slots: torch.Tensor) -> tuple:
    num_slots = cache.key.shape[0] * cache.block_size
    return key, value, cache, torch.where(slots < 0, num_slots + slots, slots)


def in_bfloat16(hidden: torch.Tensor, *others: Any) -> tuple[Any, ...]:
    return (hidden.bfloat16().to(hidden.dtype), *others)


LEFT_OUT: dict[str, tuple[str, Change]] = {
    **{
        f"{operation} {name}": (operation, change)
        for operation in ("decode_attention", "prefill_attention")
        for name, change in {
            "windows": without_mask("window"),
            "chunks": without_mask("chunk"),
            "softcap": without(softcap=None),
            "sinks": without(sinks=None),
            "scale": without(scale=1.0),
            "grouped heads": with_other_heads,
            "quantised keys": with_scales_of_one,
        }.items()
    },
    "padding tokens": ("store_kv", with_padding_stored),
    "an offset of one": ("rms_norm", lambda hidden, weight, eps, unit_offset: (hidden, weight, eps, False)),
    "float32": ("gated_activation", in_bfloat16),
    "an activation": ("gated_activation", lambda gate, up, activation: (gate, up, "silu")),
    "the interleaved half": ("rotary_store_kv", lambda *given: (*given[:-1], True)),
    "the normalisation": ("gated_delta_update", lambda *given: (*given[:-1], False)),
    "the gate": ("selective_state_update", lambda *given: (*given[:7], None, *given[8:])),
}


@pytest.mark.parametrize(("operation", "change"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_a_feature_that_is_left_out_is_noticed(operation: str, change: Change) -> None:
    def broken(*given: Any) -> Any:
        return REFERENCE.functions[operation](*change(*given))

    finding, _ = try_backend(Backend("stand-in", {operation: broken}), torch.device("cpu"), 60)
    assert finding.state == "problem"
    assert finding.words.startswith("WRONG in ")


def test_every_operation_of_every_backend_has_a_case_in_every_round() -> None:
    operations = {operation for backend in backends() for operation in backend.functions}
    drawn = [(case.operation, case.shape) for case in cases()]
    assert all((operation, shape) in drawn for operation in operations for shape in ROUNDS)


def test_cases_are_the_same_each_time() -> None:
    for one, other in zip(cases(), cases(), strict=True):
        for mine, theirs in zip(one.arguments, other.arguments, strict=True):
            if isinstance(mine, torch.Tensor):
                assert torch.equal(mine.nan_to_num(), theirs.nan_to_num())

"""Attention backends are found by name, checked before there is a model, and belong to whoever asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paged_backend.errors import ConfigError, PluginError, UnknownPolicy
from paged_backend.kernels import (
    AUTO,
    AttentionVariant,
    Backend,
    LayerCache,
    Sequences,
    cpu,
    decode_attention,
    store_kv,
)
from paged_backend.model.attention_backend import check_runs, resolve, what_computes

CPU = torch.device("cpu")


def attend(backend: Backend) -> torch.Tensor:
    """The attention of one query to the one key that was stored, whose value is all ones."""
    cache = LayerCache(torch.zeros(2, 1, 4, 8), torch.zeros(2, 1, 4, 8))
    store_kv(torch.ones(1, 1, 8), torch.ones(1, 1, 8), cache, torch.tensor([4]), backend=backend)
    sequences = Sequences(torch.tensor([[1]], dtype=torch.int32), torch.tensor([1], dtype=torch.int32))
    return decode_attention(torch.ones(1, 2, 8), cache, sequences, AttentionVariant(1.0), backend=backend)


def test_our_own_are_found_by_name() -> None:
    assert resolve("auto") is AUTO
    assert [resolve(name).name for name in ("triton", "cpu", "reference")] == ["triton", "cpu", "reference"]


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownPolicy, match="unknown attention_backend 'flash'; choose one of auto, triton, cpu, ref"):
        resolve("flash")


def test_operations_that_are_left_out_run_as_with_auto() -> None:
    assert attend(resolve("mine", {})).eq(1).all()


def test_two_of_one_name_keep_their_own_functions() -> None:
    backends = [
        resolve("mine", {"decode_attention": lambda query, *_, factor=factor: query * factor}) for factor in (2, 3)
    ]
    assert [attend(backend).unique().tolist() for backend in backends] == [[2], [3]]


@pytest.mark.parametrize("functions", [5, {"matmul": print}, {"decode_attention": 5}])
def test_what_is_no_table_of_functions_is_refused(functions: Any) -> None:
    with pytest.raises(PluginError, match="attention backend 'mine'"):
        resolve("mine", functions)


@pytest.mark.parametrize(
    ("operation", "called_with"),
    [
        ("store_kv", "key, value, cache, slot_mapping"),
        ("decode_attention", "query, cache, sequences, variant"),
        ("prefill_attention", "query, cache, sequences, variant"),
    ],
)
def test_a_function_of_the_wrong_signature_is_refused_with_the_right_one(operation: str, called_with: str) -> None:
    def with_thirteen(query, key_cache, value_cache, block_tables, context_lens, scale, *more):
        return query

    with pytest.raises(
        PluginError, match=rf"{operation} of .*with_thirteen, takes \(query, key_cache.* called with \({called_with}\)"
    ):
        resolve("mine", {operation: with_thirteen})


def test_a_function_that_does_not_say_what_it_takes_is_called() -> None:
    assert (
        attend(resolve("mine", {"decode_attention": type("Opaque", (), {"__call__": lambda *given: given[1]})()}))[0]
        .eq(1)
        .all()
    )


def test_where_kernels_cannot_run_is_told_with_the_reason() -> None:
    check_runs(AUTO, [CPU, torch.device("cuda")])
    with pytest.raises(ConfigError, match=r"attention_backend='cpu' cannot run .* on cuda: it computes on the CPU"):
        check_runs(resolve("cpu"), [CPU, torch.device("cuda")])


@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_on_a_cpu_what_computes_is_told_with_its_level_and_what_would_be_faster(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(cpu, "running", lambda: "C++ (avx2)")
    monkeypatch.setattr(cpu, "faster", lambda *told: told)
    said = what_computes(resolve(name), torch.device("cpu"), torch.float16, "int8")
    assert said == ("C++ (avx2)", (torch.float16, "int8"))


def test_elsewhere_what_computes_is_the_backend_that_was_named_or_found() -> None:
    assert what_computes(resolve("reference"), torch.device("cpu"), torch.float32, None) == ("reference", ())
    assert what_computes(resolve("auto"), torch.device("meta"), torch.float32, None) == ("reference", ())

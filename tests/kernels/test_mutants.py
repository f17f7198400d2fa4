"""Kernels with one thing wrong must fail the comparison that the right ones pass."""

from __future__ import annotations

import pytest
from kernel_mutants import (
    Mutant,
    check_decode,
    check_gated_delta,
    check_prefill,
    check_selective,
    check_store,
    mutated,
)

from paged_backend.kernels.triton import support as triton_support

CHECKS = {
    "decode": check_decode,
    "gated delta": check_gated_delta,
    "prefill": check_prefill,
    "selective": check_selective,
    "store": check_store,
}

REFERENCE = {
    "window a key wide": (
        "decode",
        Mutant("mask_rule", "> query_positions - self.size", ">= query_positions - self.size"),
    ),
    "chunk by key only": (
        "prefill",
        Mutant("mask_rule", "== query_positions // self.size", "<= query_positions // self.size"),
    ),
    "not causal": (
        "prefill",
        Mutant("mask_rule", "key_positions <= query_positions", "key_positions <= query_positions + 1"),
    ),
    "no softcap": ("decode", Mutant("softmax_attention", "if softcap is not None", "if False")),
    "no sinks": ("prefill", Mutant("softmax_attention", "if sinks is None", "if True")),
    "poison not cleared": ("decode", Mutant("softmax_attention", "not math.isfinite(output.sum())", "False")),
    "heads interleaved": ("decode", Mutant("kv_layout", "blocks[:, None, :] * num_kv_heads", "blocks[:, None, :]")),
    "no scale of the values": (
        "prefill",
        Mutant("prefill_attention", "gather_rows(cache.value, cache.value_scale", "gather_rows(cache.value, None"),
    ),
    "slice a key late": (
        "prefill",
        Mutant("prefill_attention", "first_visible(here)", "first_visible(here + 1)"),
    ),
    "padding stored": ("store", Mutant("store_kv", "if slot_mapping.lt(0).any()", "if False")),
    "int8 truncated": ("store", Mutant("store_kv", "scaled.round() if", "scaled if")),
    "lengths kept": ("gated delta", Mutant("gated_delta_update", "    if normalises:\n", "    if False:\n")),
    "nothing added to lengths": ("gated delta", Mutant("gated_delta_update", " + EPSILON", "")),
    "query not scaled": ("gated delta", Mutant("gated_delta_update", " * query.shape[-1] ** -0.5", "")),
    "key heads in turn": (
        "gated delta",
        Mutant("gated_delta_update", "key.repeat_interleave(group, 1)", "key.repeat(1, group, 1)"),
    ),
    "delta not decayed": ("gated delta", Mutant("gated_delta_update", " * g.float().exp()[..., None, None]", "")),
    "recalled before decay": (
        "gated delta",
        Mutant("gated_delta_update", "-2) @ decayed", "-2) @ state[slots_in].float()"),
    ),
    "beta left out": ("gated delta", Mutant("gated_delta_update", " * beta.float()[..., None, None]", "")),
    "query asked too early": ("gated delta", Mutant("gated_delta_update", "(row @ updated)", "(row @ decayed)")),
    "delta written over what is read": (
        "gated delta",
        Mutant("gated_delta_update", "state[slots_out] =", "state[slots_in] ="),
    ),
    "no softplus": ("selective", Mutant("selective_state_update", "    if softplus:\n", "    if False:\n")),
    "no bias of the step": ("selective", Mutant("selective_state_update", " + dt_bias.float()", "")),
    "groups in turn": (
        "selective",
        Mutant("selective_state_update", "B.float().repeat_interleave(group, 1)", "B.float().repeat(1, group, 1)"),
    ),
    "selection not decayed": ("selective", Mutant("selective_state_update", " * decay + ", " + ")),
    "read before the token": (
        "selective",
        Mutant("selective_state_update", "(updated @ column)", "(state[slots_in].float() @ column)"),
    ),
    "token not passed on": ("selective", Mutant("selective_state_update", " + D.float()[:, None] * x.float()", "")),
    "no gate": ("selective", Mutant("selective_state_update", "if z is not None:", "if False:")),
    "selection written over what is read": (
        "selective",
        Mutant("selective_state_update", "state[slots_out] =", "state[slots_in] ="),
    ),
}
TRITON = {
    "window a key wide": ("decode", Mutant("triton/attention", "position - span + 1", "position - span")),
    "window a key narrow": ("prefill", Mutant("triton/attention", "position - span + 1", "position - span + 2")),
    "chunk not aligned": ("decode", Mutant("triton/attention", "position // span * span", "position // span")),
    "not causal": ("prefill", Mutant("triton/attention", " & (keys[None, :] <= positions[:, None])", "")),
    "rows share one window": (
        "prefill",
        Mutant("triton/attention", "keys[None, :] >= firsts[:, None]", "keys[None, :] >= 0"),
    ),
    "no softcap": ("decode", Mutant("triton/attention", "if HAS_SOFTCAP:", "if False:")),
    "no sinks": ("decode", Mutant("triton/attention", "if HAS_SINKS:", "if False:")),
    "sinks in every split": (
        "decode",
        Mutant("triton/decode_attention", "tl.where(split == 0, BLOCK_M, 0)", "BLOCK_M"),
    ),
    "maximum not subtracted": ("decode", Mutant("triton/attention", "total = total * decay", "total = total")),
    "sum not rescaled": ("decode", Mutant("triton/attention", "accumulator * decay[:, None]", "accumulator")),
    "empty row not guarded": (
        "prefill",
        Mutant("triton/attention", 'tl.where(new_maximum == float("-inf"), 0.0, new_maximum)', "new_maximum"),
    ),
    "poison loaded": (
        "decode",
        Mutant(
            "triton/cache",
            "mask=held[:, None] & (dims < DIM)[None, :], other=0)",
            "mask=(dims < DIM)[None, :], other=0)",
        ),
    ),
    "no scale of the keys": (
        "decode",
        Mutant("triton/attention", "if key_element == tl.int8 or key_element == tl.uint8:", "if False:"),
    ),
    "no scale of the values": (
        "prefill",
        Mutant("triton/attention", "if value_element == tl.int8 or value_element == tl.uint8:", "if False:"),
    ),
    "float8 bias": ("decode", Mutant("triton/cache", ".to(tl.float32) * 256.0", ".to(tl.float32) * 128.0")),
    "heads interleaved": (
        "decode",
        Mutant("triton/cache", "blocks.to(tl.int64) * num_kv_heads + head", "blocks.to(tl.int64) + head"),
    ),
    "padding row divided by zero": (
        "decode",
        Mutant("triton/decode_attention", "tl.where(weight == 0.0, 1.0, weight)", "weight"),
    ),
    "split dropped": (
        "decode",
        Mutant("triton/decode_attention", "held = splits < NUM_SPLITS", "held = splits < NUM_SPLITS - 1"),
    ),
    "factors left out of the merge": (
        "decode",
        Mutant("triton/decode_attention", "partial * factors[:, None]", "partial"),
    ),
    "wrong sequence": (
        "prefill",
        Mutant("triton/prefill_attention", "// TOKENS + middle <= tile", "// TOKENS + middle < tile"),
    ),
    "wrong token": (
        "prefill",
        Mutant("triton/prefill_attention", "tokens = first_row + pairs // HEADS", "tokens = first_row + pairs % HEADS"),
    ),
    "unmasked stretch too long": (
        "prefill",
        Mutant(
            "triton/prefill_attention",
            "(before + first_row + 1) // BLOCK_N",
            "(before + first_row + BLOCK_N) // BLOCK_N",
        ),
    ),
    "unmasked stretch too early": (
        "prefill",
        Mutant("triton/prefill_attention", "first_visible_key(before + last_row, span, RULE)", "lowest"),
    ),
    "padding stored": ("store", Mutant("triton/store_kv", "if slot < 0:", "if slot < -1:")),
    "int8 not rounded": ("store", Mutant("triton/cache", "((scaled + 12582912.0) - 12582912.0)", "scaled")),
    "float8 subnormals": (
        "store",
        Mutant("triton/cache", "tl.where(magnitude < (121 << 23), subnormal, normal)", "normal"),
    ),
    "float8 ties up": ("store", Mutant("triton/cache", "0x7FFFF + ((magnitude >> 20) & 1)", "0x80000")),
    "lengths kept": ("gated delta", Mutant("triton/gated_delta_update", "if NORMALISES:", "if False:")),
    "nothing added to lengths": (
        "gated delta",
        Mutant("triton/gated_delta_update", "query * query, 0) + epsilon", "query * query, 0)"),
    ),
    "query not scaled": ("gated delta", Mutant("triton/gated_delta_update", " * (KEY_DIM**-0.5)", "")),
    "key heads in turn": (
        "gated delta",
        Mutant("triton/gated_delta_update", "head // group * stride_key_head", "head % 2 * stride_key_head"),
    ),
    "delta not decayed": (
        "gated delta",
        Mutant("triton/gated_delta_update", "state *= tl.exp(tl.load(g_ptr + place).to(tl.float32))", "pass"),
    ),
    "beta left out": (
        "gated delta",
        Mutant("triton/gated_delta_update", " * tl.load(beta_ptr + place).to(tl.float32)", ""),
    ),
    "a key's end of another head": (
        "gated delta",
        Mutant("triton/gated_delta_update", "query_ptr + rows, mask=rows_held", "query_ptr + rows, mask=rows >= 0"),
    ),
    "states of other heads written": (
        "gated delta",
        Mutant(
            "triton/gated_delta_update", "slot + elements, state, mask=held", "slot + elements, state, mask=held | True"
        ),
    ),
    "delta written over what is read": (
        "gated delta",
        Mutant("triton/gated_delta_update", "tl.load(slots_out_ptr + sequence)", "tl.load(slots_in_ptr + sequence)"),
    ),
    "no softplus": ("selective", Mutant("triton/selective_state_update", "if SOFTPLUS:", "if False:")),
    "small steps rounded": ("selective", Mutant("triton/selective_state_update", "x < 0.5", "x < 0.0")),
    "no bias of the step": (
        "selective",
        Mutant("triton/selective_state_update", " + tl.load(dt_bias_ptr + head).to(tl.float32)", ""),
    ),
    "groups in turn": (
        "selective",
        Mutant("triton/selective_state_update", "head // group * stride_b_group", "head % 2 * stride_b_group"),
    ),
    "selection not decayed": (
        "selective",
        Mutant("triton/selective_state_update", "state * tl.exp(step * tl.load(a_ptr + head).to(tl.float32))", "state"),
    ),
    "token not passed on": (
        "selective",
        Mutant("triton/selective_state_update", " + tl.load(d_ptr + head).to(tl.float32) * x", ""),
    ),
    "no gate": ("selective", Mutant("triton/selective_state_update", "if HAS_Z:", "if False:")),
    "selection written over what is read": (
        "selective",
        Mutant(
            "triton/selective_state_update", "tl.load(slots_out_ptr + sequence)", "tl.load(slots_in_ptr + sequence)"
        ),
    ),
}
MUTANTS = TRITON if triton_support.interpreted else REFERENCE


@pytest.fixture
def backend() -> str:
    """The backend whose source is Python, which is what a mutant changes."""
    return "triton" if triton_support.interpreted else "reference"


@pytest.mark.parametrize("check", CHECKS)
def test_an_unchanged_copy_passes(backend, tmp_path, check):
    with mutated(tmp_path, None) as load:
        CHECKS[check](load, backend)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails(backend, tmp_path, name):
    check, mutant = MUTANTS[name]
    with mutated(tmp_path, mutant) as load, pytest.raises(AssertionError):
        CHECKS[check](load, backend)

"""The attention function on the twin: transformers' contract outside, blocks inside."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AttentionInterface

from paged_backend.kernels import FULL, MaskRule
from paged_backend.memory.kv_cache import KVCache, LayerSpec, group_layers
from paged_backend.model.attention import ATTENTION_NAME, ForwardContext, PagedLayer, paged_attention
from paged_backend.model.batch import Batch, build_batch

BLOCK_SIZE = 4
HEADS, KV_HEADS, KEY_DIM, VALUE_DIM = 4, 2, 8, 6
SCALE = 0.3


class Sequences:
    """Two layers with rules of their own over sequences of 9 and 6 tokens; the second group's blocks are shuffled."""

    lengths = (9, 6)

    def __init__(self, rules: tuple[MaskRule, MaskRule] = (FULL, MaskRule("window", 3))) -> None:
        specs = [
            LayerSpec(str(rule), HEADS, KV_HEADS, KEY_DIM, VALUE_DIM, torch.float32, torch.device("cpu"), rule)
            for rule in rules
        ]
        groups = group_layers(specs)
        self.kv_cache = KVCache(specs, groups, [6] * len(groups), BLOCK_SIZE)
        self.tables = [np.array([[0, 1, 2], [3, 4, -1]], np.int32), np.array([[5, 0, 3], [1, 4, -1]], np.int32)]
        self.context = ForwardContext()
        self.modules = []
        for index, rule in enumerate(rules):
            group = next(g for g, group in enumerate(groups) if index in group.layers)
            module = nn.Module()
            module.paged_layer = PagedLayer(self.context, self.kv_cache.layers[index], group, rule)
            self.modules.append(module)
        generator = torch.Generator().manual_seed(0)
        self.query, self.key, self.value = (
            [torch.randn(length, heads, dim, generator=generator) for length in self.lengths]
            for heads, dim in ((HEADS, KEY_DIM), (KV_HEADS, KEY_DIM), (KV_HEADS, VALUE_DIM))
        )

    def batch(self, decodes: list[tuple[int, int]], chunks: list[tuple[int, int, int]]) -> Batch:
        """Decodes are (sequence, position), chunks (sequence, first, end)."""
        order = [sequence for sequence, *_ in (*decodes, *chunks)]
        return build_batch(
            [0] * len(decodes),
            [position for _, position in decodes],
            [[0] * (end - first) for _, first, end in chunks],
            [first for _, first, _ in chunks],
            [True] * len(chunks),
            [table[order] for table in self.tables[: len(self.kv_cache.groups)]],
            BLOCK_SIZE,
            torch.device("cpu"),
        )

    def attend(
        self,
        layer: int,
        decodes: list[tuple[int, int]],
        chunks: list[tuple[int, int, int]],
        **kwargs: Any,
    ) -> torch.Tensor:
        """The layer's output ``[num_tokens, num_heads, value_dim]``, through the function that transformers calls."""
        spans = [(sequence, position, position + 1) for sequence, position in decodes] + chunks
        packed = [
            torch.cat([tensor[sequence][first:end] for sequence, first, end in spans]).transpose(0, 1)[None]
            for tensor in (self.query, self.key, self.value)
        ]
        self.context.batch = self.batch(decodes, chunks)
        output, weights = paged_attention(self.modules[layer], *packed, **{"scaling": SCALE, **kwargs})
        self.context.batch = None
        assert weights is None
        assert output.shape == (1, packed[0].shape[2], HEADS, VALUE_DIM)
        return output[0]

    def expected(
        self,
        sequence: int,
        rule: MaskRule,
        scale: float = SCALE,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Softmax attention over a whole sequence, written for reading."""
        length = self.lengths[sequence]
        output = torch.zeros(length, HEADS, VALUE_DIM)
        for position in range(length):
            seen = slice(rule.first_visible(position), position + 1)
            for head in range(HEADS):
                kv_head = head // (HEADS // KV_HEADS)
                scores = self.key[sequence][seen, kv_head] @ self.query[sequence][position, head] * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1]])
                weights = scores.softmax(0)[: position + 1 - seen.start]
                output[position, head] = weights @ self.value[sequence][seen, kv_head]
        return output


def assert_close(output: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(output, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("layer", [0, 1])
def test_whole_prefills_attend_each_to_its_own_sequence(layer: int) -> None:
    case = Sequences()
    rule = case.modules[layer].paged_layer.rule
    output = case.attend(layer, [], [(0, 0, 9), (1, 0, 6)])
    assert_close(output, torch.cat([case.expected(0, rule), case.expected(1, rule)]))


@pytest.mark.parametrize("layer", [0, 1])
def test_decodes_come_before_the_chunks_of_the_same_step(layer: int) -> None:
    case = Sequences()
    rule = case.modules[layer].paged_layer.rule
    case.attend(layer, [], [(0, 0, 5), (1, 0, 5)])
    output = case.attend(layer, [(1, 5)], [(0, 5, 9)])
    assert_close(output, torch.cat([case.expected(1, rule)[5:], case.expected(0, rule)[5:]]))


@pytest.mark.parametrize("layer", [0, 1])
def test_a_step_of_decodes_alone_sees_what_earlier_steps_stored(layer: int) -> None:
    case = Sequences()
    rule = case.modules[layer].paged_layer.rule
    case.attend(layer, [], [(0, 0, 8), (1, 0, 5)])
    output = case.attend(layer, [(0, 8), (1, 5)], [])
    assert_close(output, torch.stack([case.expected(0, rule)[8], case.expected(1, rule)[5]]))


def test_a_chunk_rule_reaches_back_to_its_chunk_only() -> None:
    rule = MaskRule("chunk", 4)
    case = Sequences((FULL, rule))
    case.attend(1, [], [(0, 0, 5), (1, 0, 5)])
    output = case.attend(1, [(1, 5)], [(0, 5, 9)])
    assert_close(output, torch.cat([case.expected(1, rule)[5:], case.expected(0, rule)[5:]]))


def test_softcap_and_sinks_reach_both_kernels() -> None:
    case = Sequences()
    features = {"softcap": 0.4, "s_aux": torch.tensor([-0.5, 0.0, 1.0, 2.0])}
    expected = [case.expected(sequence, FULL, softcap=0.4, sinks=features["s_aux"]) for sequence in (0, 1)]
    assert_close(case.attend(0, [], [(0, 0, 5), (1, 0, 5)], **features), torch.cat([e[:5] for e in expected]))
    output = case.attend(0, [(1, 5)], [(0, 5, 9)], **features)
    assert_close(output, torch.cat([expected[1][5:], expected[0][5:]]))


def test_without_a_scale_scores_are_divided_by_the_root_of_the_key_dim() -> None:
    case = Sequences()
    output = case.attend(0, [], [(0, 0, 9)], scaling=None)
    assert_close(output, case.expected(0, FULL, scale=KEY_DIM**-0.5))


def test_the_mask_and_window_that_transformers_passes_are_not_consulted() -> None:
    case = Sequences()
    output = case.attend(0, [], [(0, 0, 9)], attention_mask=torch.zeros(1), sliding_window=1, dropout=0.5)
    assert_close(output, case.expected(0, FULL))


def test_attention_outside_an_engine_says_what_to_do() -> None:
    heads = torch.zeros(1, HEADS, 3, KEY_DIM)
    with pytest.raises(RuntimeError, match=r"attn_implementation='paged_backend' outside a paged_backend engine"):
        paged_attention(nn.Identity(), heads, heads, heads)


def test_attention_outside_a_step_is_an_error() -> None:
    case = Sequences()
    heads = torch.zeros(1, HEADS, 3, KEY_DIM)
    with pytest.raises(RuntimeError, match="outside a step"):
        paged_attention(case.modules[0], heads, heads[:, :KV_HEADS], heads[:, :KV_HEADS, :, :VALUE_DIM])


def test_the_function_is_registered_with_transformers() -> None:
    assert AttentionInterface()[ATTENTION_NAME] is paged_attention


def test_a_model_loaded_with_paged_attention_fails_instead_of_answering_wrong(tiny_model: Any) -> None:
    model = tiny_model("llama")
    model.set_attn_implementation(ATTENTION_NAME)
    with pytest.raises(RuntimeError, match="load the model with its own attention"):
        model(torch.tensor([[5, 6, 7]]))

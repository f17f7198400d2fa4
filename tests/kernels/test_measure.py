"""What the benchmarks share: names and inputs of shapes, and the cells of their tables."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from paged_backend.kernels import decode_attention

sys.path.append(str(Path(__file__).parents[2] / "kernels" / "bench"))
import measure
from measure import Shape

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        (Shape(4, 100), "4 x 100, heads 32/8 x 128, bfloat16"),
        (Shape(4, 100, 100), "4 x 100, heads 32/8 x 128, bfloat16"),
        (Shape(4, 100, 7), "4 x 100, last 7, heads 32/8 x 128, bfloat16"),
        (Shape(1, 9, cache_dtype=torch.int8, window=5), "1 x 9, heads 32/8 x 128, int8, window 5"),
        (Shape(1, 9, num_heads=4, num_kv_heads=2, block_size=32), "1 x 9, heads 4/2 x 128, bfloat16, block 32"),
    ],
)
def test_a_shape_names_what_sets_it_apart(shape, name):
    assert str(shape) == name


@pytest.mark.parametrize("query_len", [1, 500, 2048])
def test_a_tiny_shape_keeps_its_phase_and_its_features(query_len):
    shape = Shape(64, 2048, query_len, cache_dtype=torch.int8, window=1024, block_size=32)
    tiny = shape.tiny()
    assert (tiny.query_len == 1, tiny.query_len == tiny.context) == (query_len == 1, query_len == 2048)
    assert tiny.query_len <= tiny.context
    assert (tiny.cache_dtype, tiny.block_size) == (torch.int8, 32)
    assert tiny.window < tiny.context
    assert Shape(64, 2048).tiny().window is None


@pytest.mark.parametrize("window", [None, 6])
def test_blocks_of_the_inputs_hold_what_the_plain_tensors_hold(window):
    shape = Shape(3, 21, 1, 4, 2, 8, block_size=4, dtype=torch.float32, window=window)
    inputs = measure.make_inputs(shape, CPU)
    output = decode_attention(inputs.query, inputs.cache, inputs.sequences, inputs.variant, backend="reference")
    first = 0 if window is None else 21 - window
    expected = torch.nn.functional.scaled_dot_product_attention(
        inputs.query[:, :, None], inputs.key[:, :, first:], inputs.value[:, :, first:], enable_gqa=True
    )
    torch.testing.assert_close(output, expected[:, :, 0])


def test_a_quantised_shape_has_scales():
    shape = Shape(2, 9, 3, 4, 2, 8, dtype=torch.float32, cache_dtype=torch.int8)
    inputs = measure.make_inputs(shape, CPU)
    assert inputs.cache.key.dtype == torch.int8
    assert inputs.cache.key_scale.gt(0).sum() == 2 * 2 * 9
    assert inputs.sequences.cu_seqlens_q.tolist() == [0, 3, 6]


def test_a_ratio_over_one_is_for_us_and_a_reason_stands_for_itself():
    assert measure.against(2.0, 3.0) == "1.50x"
    assert measure.against(2.0, "not installed") == "not installed"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ImportError("x"), "not installed"),
        (ValueError("first line\nsecond line"), "ValueError: first line"),
        (ValueError("x" * 100), "ValueError: " + "x" * 60),
        (NotImplementedError(), "NotImplementedError:"),
    ],
)
def test_a_peer_that_cannot_run_says_why_in_a_few_words(error, reason):
    def make():
        raise error

    assert measure.tried(make, CPU) == reason
    assert measure.tried(lambda: make, CPU) == reason


def test_a_peer_that_runs_has_a_time_that_can_be_divided_by():
    assert measure.tried(lambda: bool, CPU) >= measure.SECONDS_FOR_NOTHING


def test_a_table_has_a_line_for_its_header_its_rule_and_every_row():
    assert measure.markdown(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"

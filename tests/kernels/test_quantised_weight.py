"""Weights in few bits are what the gguf library says, and multiply as that does, at every level of the C++."""

from __future__ import annotations

import pytest
import torch
from gguf_files import dequantised, random_blocks
from torch.nn import functional

from paged_backend.kernels import cpu
from paged_backend.kernels.cpu import loader

KNOWN = list(loader.LEVELS)
# Those that this processor knows, the best of them fast, the others once more.
LEVELS = [
    level if level == loader.level() else pytest.param(level, marks=pytest.mark.slow)
    for level in KNOWN[KNOWN.index(loader.level()) :]
]
# Columns that fill no panel, and more stretches than are widened at a time.
COLUMNS, DEPTH = 70, 512
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Of the results' spread: digits and sums in another order, or a result that is rounded once.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# By one, two and both, then with widened weights, in whole tiles and not.
ROWS = [1, 2, 3, 5, 26]


def product(level: str, x: torch.Tensor, *weights: cpu.QuantisedWeight, biases=None, then: int = 0) -> torch.Tensor:
    formats, columns = [w.format.code for w in weights], [w.num_columns for w in weights]
    biases = [None] * len(weights) if biases is None else biases
    return loader.load(level).quantised_linear(x, [w.packed for w in weights], formats, biases, columns, then)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight_of(name: str, columns: int = COLUMNS, depth: int = DEPTH, seed: int = 0) -> cpu.QuantisedWeight:
    return cpu.from_gguf(torch.from_numpy(random_blocks(name, columns, depth, seed)), cpu.FORMATS[name])


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    error = (actual.double() - expected.double()).abs().max() / expected.double().std()
    assert error < 8 * TOLERANCE[actual.dtype]


@pytest.mark.parametrize("name", cpu.FORMATS)
def test_packed_blocks_are_widened_to_what_the_gguf_library_says_bit_by_bit(name):
    blocks = random_blocks(name, COLUMNS, DEPTH)
    packed = cpu.from_gguf(torch.from_numpy(blocks), cpu.FORMATS[name])
    assert torch.equal(packed.widened(), dequantised(blocks, name))


@pytest.mark.parametrize("name", cpu.FORMATS)
def test_packed_blocks_take_little_more_than_the_file_does(name):
    blocks = random_blocks(name, 96, DEPTH)
    assert weight_of(name, 96).num_bytes <= 1.04 * blocks.nbytes


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", cpu.FORMATS)
def test_any_number_of_rows_equals_the_product_with_widened_weights(level, name):
    weight, bias = weight_of(name), draw(COLUMNS, seed=1)
    wide = weight.widened().double()
    for dtype in DTYPES:
        for rows in ROWS:
            x = draw(rows, DEPTH, dtype=dtype, seed=rows)
            assert_close(product(level, x, weight, biases=[bias]), functional.linear(x.double(), wide, bias.double()))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", cpu.FORMATS)
def test_columns_are_looked_up_bit_by_bit(level, name):
    weight, ids = weight_of(name), torch.tensor([[69, 0], [31, 32]])
    found = loader.load(level).widen_columns(weight.packed, weight.format.code, COLUMNS, DEPTH, ids)
    assert torch.equal(found, weight.widened()[ids])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rows", [1, 7])
def test_weights_of_several_formats_follow_each_other_in_one_result(level, rows):
    weights = [weight_of("Q4_K", 64), weight_of("Q6_K", 33, seed=1), weight_of("Q8_0", 40, seed=2)]
    biases, x = [draw(64), None, draw(40, seed=1)], draw(rows, DEPTH)
    parts = [functional.linear(x, w.widened(), b) for w, b in zip(weights, biases, strict=True)]
    result = product(level, x, *weights, biases=biases)
    for part, expected in zip(result.split([64, 33, 40], 1), parts, strict=True):
        assert_close(part, expected)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rows", [1, 7])
def test_a_weight_gates_another_of_another_format(level, rows):
    gate, other, x = weight_of("Q4_1"), weight_of("Q6_K", seed=1), draw(rows, DEPTH, seed=3) / 8
    biases = [draw(COLUMNS), draw(COLUMNS, seed=1)]
    left, right = (functional.linear(x, w.widened(), b) for w, b in zip((gate, other), biases, strict=True))
    actual = product(level, x, gate, other, biases=biases, then=cpu.SILU_GATE)
    torch.testing.assert_close(actual, functional.silu(left) * right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("level", LEVELS)
def test_the_largest_levels_and_digits_do_not_overflow(level):
    for name, fmt in cpu.FORMATS.items():
        blocks = torch.from_numpy(random_blocks(name, 32, DEPTH))
        whole = blocks.view(32, -1, fmt.block_bytes)
        # All levels at an end of their range.
        for value in (128, 127) if name == "Q8_0" else (0, 255):
            first = {"Q4_0": 2, "Q4_1": 4, "Q5_0": 2, "Q5_1": 4, "Q8_0": 2}.get(name, 16)
            last = 192 if name == "Q6_K" else fmt.block_bytes
            whole[..., 0 if name == "Q6_K" else first : last] = value
            weight = cpu.from_gguf(blocks, fmt)
            for sign in (1, -1):
                x = torch.full((2, DEPTH), sign * 0.999999)
                assert_close(product(level, x, weight), x.double() @ weight.widened().double().T)


@pytest.mark.parametrize("level", LEVELS)
def test_a_number_that_towers_over_its_group_leaves_the_rows_of_others_alone(level):
    weight, x = weight_of("Q4_1"), draw(2, DEPTH)
    x[0, 5], x[1, 40:] = 1e20, 0
    expected = x.double() @ weight.widened().double().T
    result = product(level, x, weight).double()
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_own_row(level, poison):
    weight, x = weight_of("Q4_1"), draw(3, DEPTH)
    expected = product(level, x, weight)
    x[1, 100] = poison
    result = product(level, x, weight)
    assert not result[1].isfinite().any()
    assert torch.equal(result[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("rows", [1, 7])
def test_absent_columns_of_the_last_panel_are_never_read(rows):
    weight, x = weight_of("Q4_1", 33), draw(rows, DEPTH)
    expected = product(loader.level(), x, weight)
    stretches = weight.packed.view(2, DEPTH // 32, -1)
    # The scales and minima of all columns but the first.
    stretches[1, :, 512:].view(torch.float16).view(-1, 2, 32)[..., 1:] = torch.nan
    assert torch.equal(product(loader.level(), x, weight), expected)


def test_rows_and_columns_that_do_not_fit_are_refused():
    weight = weight_of("Q4_1")
    with pytest.raises(ValueError, match="x has 480 columns, the weight takes another number"):
        product(loader.level(), draw(1, 480), weight)
    with pytest.raises(IndexError, match="index 70 is out of range, of 0 to 69"):
        weight.columns(torch.tensor([70]))
    with pytest.raises(ValueError, match=r"parts of 70 columns must be multiples of 32, got \(35, 35\)"):
        weight.split(35, 35)
    with pytest.raises(ValueError, match="rows of 21 bytes are no whole blocks of Q4_1, 20 bytes each"):
        cpu.from_gguf(torch.zeros(4, 21, dtype=torch.uint8), cpu.FORMATS["Q4_1"])
    with pytest.raises(ValueError, match="groups of 32, got 40 inputs"):
        cpu.int4(draw(4, 40))


def test_parts_of_a_weight_lie_in_its_memory():
    weight = weight_of("Q4_K", 96)
    first, last = weight.split(32, 64)
    assert torch.equal(torch.cat((first.widened(), last.widened())), weight.widened())
    assert last.packed.untyped_storage().data_ptr() == weight.packed.untyped_storage().data_ptr()


def test_another_order_of_columns_is_kept():
    blocks, order = random_blocks("Q6_K", 40, 256), torch.randperm(40, generator=torch.Generator().manual_seed(0))
    packed = cpu.from_gguf(torch.from_numpy(blocks), cpu.FORMATS["Q6_K"], order)
    assert torch.equal(packed.widened(), dequantised(blocks, "Q6_K")[order])


def test_weights_are_packed_piece_by_piece_as_they_are_at_once(monkeypatch):
    whole = weight_of("Q5_K", 100)
    monkeypatch.setattr(__import__("sys").modules["paged_backend.kernels.cpu.quantised_weight"], "_AT_A_TIME", 1)
    assert torch.equal(weight_of("Q5_K", 100).packed, whole.packed)
    assert torch.equal(whole.widened(), weight_of("Q5_K", 100).widened())


# int4


def relative_error(weight: torch.Tensor) -> float:
    return ((cpu.int4(weight).widened() - weight).norm() / weight.norm()).item()


def test_levels_around_zero_need_no_minimum():
    weight = 0.125 * (torch.arange(64).remainder(16) - 8.0).repeat(40, 1)
    rounded = cpu.int4(weight)
    assert rounded.format.name == "Q4_0"
    assert torch.equal(rounded.widened(), weight)


def test_numbers_that_lie_to_one_side_get_a_minimum():
    weight = 1 + 0.1 * draw(64, 64)
    assert cpu.int4(weight).format.name == "Q4_1"
    assert relative_error(weight) < 0.01


def test_what_has_sixteen_levels_is_kept_as_it_is():
    levels = torch.arange(16.0).repeat(2).repeat(40, 2)
    weight = (levels - 3) * 0.125
    assert torch.equal(cpu.int4(weight).widened(), weight)


@pytest.mark.parametrize("value", [0.0, -2.5])
def test_a_group_that_is_all_alike_is_kept(value):
    weight = draw(33, 64)
    weight[7, 32:] = value
    torch.testing.assert_close(cpu.int4(weight).widened()[7, 32:], weight[7, 32:], rtol=0.07, atol=0)


def test_bytes_are_counted_once_and_only_where_they_are_extra():
    weight = weight_of("Q4_1", 64)
    bias = draw(64)
    assert cpu.QuantisedLinear((weight,), (bias,)).num_bytes == weight.num_bytes + 4 * 64
    assert cpu.QuantisedLinear((weight,), (None,), owned=False).num_bytes == 0

"""Packed weights multiply as the plain ones do, for every dtype, few rows and many, and columns that fill no panel."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch.nn import functional

from paged_backend.kernels import cpu
from paged_backend.kernels.cpu import loader
from paged_backend.kernels.cpu.packed_linear import PANEL

MODULE = importlib.import_module("paged_backend.kernels.cpu.packed_linear")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Of a result's spread: float32 sums in another order; half precisions round the result once.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
# Around a tile of 6 and of 12 rows, several tiles, and more than one block of rows.
ROWS = [1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 25, 60, 300]
LEVELS = list(loader.LEVELS)
LEVELS = LEVELS[LEVELS.index(loader.level()) :]


@pytest.fixture(params=[LEVELS[0], *(pytest.param(level, marks=pytest.mark.slow) for level in LEVELS[1:])])
def level(request, monkeypatch):
    """Weights are packed and multiplied as on a processor of this level."""
    library = loader.load(request.param)
    monkeypatch.setattr(MODULE, "library", lambda: library)
    monkeypatch.setattr(MODULE, "level", lambda: request.param)
    return request.param


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    spread = expected.std().item()
    torch.testing.assert_close(actual.float(), expected, atol=TOLERANCE[dtype] * spread, rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("level")
@pytest.mark.parametrize(("num_columns", "depth"), [(96, 64), (70, 48), (32, 1), (5, 33), (200, 576)])
def test_any_number_of_rows_equals_the_plain_product(dtype, num_columns, depth):
    weight, bias = draw(num_columns, depth, dtype=dtype), draw(num_columns, dtype=dtype, seed=1)
    packed = cpu.pack(weight, bias)
    for rows in ROWS:
        x = draw(rows, depth, dtype=dtype, seed=rows)
        assert_close(packed(x), functional.linear(x.float(), weight.float(), bias.float()), dtype)


def test_leading_dims_are_kept_and_strided_rows_are_read_right():
    weight, x = draw(40, 16), draw(3, 16, 5).transpose(1, 2)
    torch.testing.assert_close(cpu.pack(weight)(x), x @ weight.T)


def test_no_rows_give_no_rows():
    assert cpu.pack(draw(40, 16))(torch.empty(1, 0, 16)).shape == (1, 0, 40)


def test_rows_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="x has 15 columns, the weight takes 16"):
        cpu.pack(draw(40, 16))(draw(2, 15))


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_weights_equal_the_product_with_what_they_stand_for(dtype):
    weight = draw(70, 64, dtype=dtype)
    packed = cpu.pack(weight, int8=True)
    assert packed.packed.dtype == torch.int8
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    rounded = (weight.float() / scale).round() * scale
    for rows in ROWS:
        x = draw(rows, 64, dtype=dtype, seed=rows)
        assert_close(packed(x), x.float() @ rounded.T, dtype)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_float32_weights_that_half_precision_holds_are_halved_without_changing_a_bit(monkeypatch, half):
    weight = draw(70, 200, dtype=half).float()
    packed = cpu.pack(weight)
    assert packed.packed.dtype == half
    assert packed.packed.dim() == 3
    monkeypatch.setattr(MODULE, "_halved", lambda weight: weight)
    whole = cpu.pack(weight)
    assert whole.packed.dtype == torch.float32
    for rows in ROWS:
        x = draw(rows, 200, seed=rows)
        torch.testing.assert_close(packed(x), whole(x), atol=0, rtol=0)


@pytest.mark.parametrize("number", [1 + 2**-12, 1e30 * (1 + 2**-9), float("nan")])
def test_one_number_that_half_precision_does_not_hold_keeps_a_weight_whole(number):
    weight = draw(40, 16, dtype=torch.bfloat16).float()
    weight[3, 5] = number
    assert cpu.pack(weight).packed.dtype == torch.float32


def test_a_column_of_zeros_stays_zero_in_int8():
    weight = draw(33, 16)
    weight[7] = 0
    assert cpu.pack(weight, int8=True)(draw(4, 16))[:, 7].eq(0).all()


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(
    ("code", "activation"),
    [(cpu.SILU_GATE, functional.silu), (cpu.GELU_GATE, lambda x: functional.gelu(x, approximate="tanh"))],
    ids=["silu", "gelu"],
)
def test_gated_columns_equal_the_activation_times_the_others(dtype, bias, code, activation):
    gate, up = draw(48, 64, dtype=dtype), draw(48, 64, dtype=dtype, seed=1)
    biases = [draw(48, dtype=dtype, seed=seed) if bias else None for seed in (2, 3)]
    packed = cpu.pack_gated(gate, up, *biases)
    for rows in ROWS:
        x = draw(rows, 64, dtype=dtype, seed=rows)
        left, right = (
            functional.linear(x.float(), w.float(), None if b is None else b.float())
            for w, b in zip((gate, up), biases, strict=True)
        )
        assert_close(packed(x, code), activation(left) * right, dtype)


def test_extreme_gates_saturate_without_nan():
    gate = torch.zeros(16, 2)
    gate[:8, 0], gate[8:, 0] = 1e30, -1e30
    result = cpu.pack_gated(gate, torch.ones(16, 2))(torch.tensor([[1.0, 0.0]]), cpu.SILU_GATE)
    assert result[0, :8].gt(1e29).all()
    assert result[0, 8:].eq(0).all()


def test_gates_that_fill_no_half_panel_are_refused():
    with pytest.raises(ValueError, match="multiple of 16"):
        cpu.pack_gated(draw(20, 8), draw(20, 8))


def test_an_arena_lays_weights_side_by_side_and_keeps_them_apart():
    arena = cpu.Arena()
    weights = [draw(40, 24, seed=seed) for seed in range(5)]
    packed = [cpu.pack(weight, arena=arena) for weight in weights]
    assert len({p.packed.untyped_storage().data_ptr() for p in packed}) == 1
    x = draw(3, 24)
    for weight, p in zip(weights, packed, strict=True):
        torch.testing.assert_close(p(x), x @ weight.T)


def test_packed_bytes_count_padding_scales_and_biases():
    packed = cpu.pack(draw(33, 16), draw(33), int8=True)
    assert packed.num_bytes == 2 * PANEL * 16 + 4 * 33 + 4 * 33


def test_the_crossover_is_where_torch_becomes_clearly_faster(monkeypatch):
    times = iter([])

    def seconds(run):
        return next(times)

    monkeypatch.setattr(MODULE, "_seconds", seconds)
    monkeypatch.setattr(MODULE, "_TRIES", 1)
    undecorated = cpu.most_rows.__wrapped__
    times = iter([1.0, 1.0])
    assert undecorated(torch.float32, 1) == float("inf")
    # Torch wins at 512 and 256 rows, C++ at 128.
    times = iter([4.0, 1.0, 2.0, 1.0, 1.0, 1.0])
    assert undecorated(torch.float32, 1) == 256
    times = iter([4.0, 1.0] * 5)
    assert undecorated(torch.float32, 1) == 32

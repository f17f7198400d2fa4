"""Random streams: even, unrelated to their neighbours, and a function of key and position."""

from __future__ import annotations

import torch

from paged_backend.sampling.random_stream import stream_key, uniform


def chi_square_p(counts: torch.Tensor, expected: torch.Tensor) -> float:
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).double(), statistic.double() / 2))


def evenness(numbers: torch.Tensor) -> float:
    counts = torch.histc(numbers, bins=64, min=0, max=1)
    return chi_square_p(counts.double(), torch.full((64,), len(numbers) / 64).double())


def test_numbers_lie_in_the_unit_interval_and_use_53_bits() -> None:
    numbers = [uniform(stream_key(3), position) for position in range(1000)]
    assert all(0 <= number < 1 for number in numbers)
    assert any((number * 2**53) % 2 == 1 for number in numbers)


def test_a_stream_is_even() -> None:
    key = stream_key(0, 42, 0)
    assert evenness(torch.tensor([uniform(key, position) for position in range(20_000)])) > 1e-4


def test_the_same_position_of_neighbouring_streams_is_even() -> None:
    numbers = torch.tensor([uniform(stream_key(0, seed, 0), 5) for seed in range(20_000)])
    assert evenness(numbers) > 1e-4


def test_neighbouring_seeds_samples_and_positions_are_uncorrelated() -> None:
    grid = torch.tensor(
        [[[uniform(stream_key(0, seed, index), t) for t in range(40)] for index in range(20)] for seed in range(20)]
    ).double()
    for dim in range(3):
        left, right = grid.narrow(dim, 0, grid.shape[dim] - 1), grid.narrow(dim, 1, grid.shape[dim] - 1)
        correlation = torch.corrcoef(torch.stack([left.flatten(), right.flatten()]))[0, 1]
        # Four standard deviations of what independent numbers show.
        assert abs(correlation) < 4 / left.numel() ** 0.5


def test_every_part_of_a_key_counts() -> None:
    keys = {
        stream_key(*parts) for parts in [(0, 1, 2), (1, 0, 2), (0, 2, 1), (0, 1), (0, 1, 3), (0, -1, 2), (0, 1, 2, 0)]
    }
    assert len(keys) == 7

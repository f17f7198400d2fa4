"""What stands in for a state where it lies is taken by those who understand it, and by nobody else."""

from __future__ import annotations

import pytest
import torch

from paged_backend.model.state_rows import StateRows


def make() -> StateRows:
    return StateRows.of(torch.zeros(2, 4), torch.tensor([0]), torch.tensor([1]))


def test_a_cache_may_put_it_where_it_is_already():
    rows = make()
    assert rows.copy_(rows) is rows


def test_another_state_in_its_place_is_an_error():
    with pytest.raises(TypeError, match="replaced by another one"):
        make().copy_(torch.zeros(1, 4))


def test_arithmetic_with_it_is_an_error():
    with pytest.raises(TypeError):
        torch.zeros(1, 4) * make()

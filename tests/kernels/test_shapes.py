"""The benchmark's models have the kinds of layers that it is about."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "kernels" / "bench"))
from shapes import SHAPES, make_shape


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_layers_with_state_and_layers_that_attend(name):
    with torch.device("meta"):
        model = make_shape(name, torch.bfloat16)
    kinds = set(model.config.layer_types)
    assert len(kinds) == 2
    assert any("attention" in kind for kind in kinds)
    assert model.dtype == torch.bfloat16
    assert not model.training

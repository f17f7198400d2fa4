"""A predictor over a tiny model, which most tests only ask."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tiny_models import save_tiny

from paged_backend.integrations.ray.predictor import PagedPredictor


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), max_positions=256))


@pytest.fixture(scope="package")
def predictor(folder: str) -> Iterator[PagedPredictor]:
    """Greedy with 4 tokens unless the column "params" says otherwise; for tests that leave it open and idle."""
    with PagedPredictor(folder, {"max_tokens": 4, "ignore_eos": True}, params_column="params") as predictor:
        yield predictor

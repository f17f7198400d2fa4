"""Install the patches of transformers for every test here, and take them out again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transformers import GenerationMixin

import paged_backend


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    stock = vars(GenerationMixin)["generate"], vars(GenerationMixin)["_sample"]
    paged_backend.install()
    yield
    paged_backend.uninstall()
    assert (vars(GenerationMixin)["generate"], vars(GenerationMixin)["_sample"]) == stock

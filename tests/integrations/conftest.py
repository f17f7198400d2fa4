"""Install the patches of transformers for every test here and take them out again, and build a model for most."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tiny_models import make_tiny
from transformers import GenerationMixin, PreTrainedModel

import paged_backend


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    stock = vars(GenerationMixin)["generate"], vars(GenerationMixin)["_sample"]
    paged_backend.install()
    yield
    paged_backend.uninstall()
    assert (vars(GenerationMixin)["generate"], vars(GenerationMixin)["_sample"]) == stock


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    """For tests that leave it as it is."""
    return make_tiny("llama")


@pytest.fixture
def fresh() -> PreTrainedModel:
    """A model of its own, for tests that change it or ask about its engines."""
    return make_tiny("llama")

"""Ragged prompts for a tiny model, and what stock answers to each alone."""

from __future__ import annotations

import pytest
from oracle import draw_prompts, stock_greedy
from ragged_prompts import LENGTHS, NUM_TOKENS
from tiny_models import make_tiny


@pytest.fixture(scope="module")
def llama():
    return make_tiny("llama")


@pytest.fixture(scope="module")
def prompts():
    return draw_prompts(LENGTHS)


@pytest.fixture(scope="module")
def expected(llama, prompts):
    return [stock_greedy(llama, prompt, NUM_TOKENS) for prompt in prompts]

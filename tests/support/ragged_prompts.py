"""Lengths and parameters of the ragged greedy requests that tests of the engine send."""

from __future__ import annotations

from paged_backend import SamplingParams

LENGTHS = (5, 23, 9, 1, 14, 40, 33)
NUM_TOKENS = 20
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)

"""What a handle is asked with."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from tiny_models import make_tiny

from paged_backend import AsyncEngine, Engine, SamplingParams
from paged_backend.errors import ConfigError

PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def service():
    with Engine(make_tiny("llama"), kv_cache_memory="4MiB") as engine, AsyncEngine(engine) as service:
        yield service


@pytest.mark.parametrize("timeout", ["x", True, math.nan, [1]])
def test_a_timeout_that_is_no_number_is_refused_and_the_request_goes_on(service, timeout):
    handle = service.submit([5, 6, 7], PARAMS)
    with pytest.raises(ConfigError, match=r"^timeout must be a number of seconds or None, got "):
        handle.result(timeout)
    assert len(handle.result(60).token_ids) == 3
    with pytest.raises(ConfigError, match="timeout must be"):
        handle.result(timeout)


@pytest.mark.parametrize("timeout", [60, 60.5, Fraction(60), np.float32(60), math.inf, 10**400, None])
def test_every_number_of_seconds_can_be_waited_for(service, timeout):
    assert len(service.submit([5, 6, 7], PARAMS).result(timeout).token_ids) == 3

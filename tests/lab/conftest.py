"""A bench in virtual time, for the tests of what is told of one."""

from __future__ import annotations

import pytest

from paged_backend.lab.bench import Bench, Setting
from paged_backend.lab.roofline import Roofline
from paged_backend.lab.simulation import simulate
from paged_backend.lab.traffic import Traffic


@pytest.fixture(scope="session")
def simulated() -> Bench:
    """Every mode of 48 mostly short requests in batches of 8."""
    setting = Setting(batch=8, window_ms=50.0)
    return simulate(Roofline.of_name("h100:llama-7b"), Traffic(48, "short", 16, 200), setting)

"""A step takes the longer of computing and reading."""

from __future__ import annotations

import pytest

from paged_backend.errors import ConfigError
from paged_backend.lab.roofline import BANDWIDTH_SHARE, COMPUTE_SHARE, OVERHEAD_S, Device, ModelSize, Roofline
from paged_backend.lab.trace import TraceRequest

# 2e6 operations and 2e6 bytes of weights; 64 bytes of keys and values a token.
MODEL = ModelSize(1e6, 2, 4, 2, 4)
ROOFLINE = Roofline(Device(1e10, 1e9, 1e8), MODEL)


def test_a_decode_is_bound_by_reading_and_a_long_prompt_by_computing():
    decode = ROOFLINE.seconds(1, 100, 100) - OVERHEAD_S
    assert decode == pytest.approx((2e6 + 64 * 100) / 1e9 / BANDWIDTH_SHARE)
    prompt = ROOFLINE.seconds(1000, 1000, 0) - OVERHEAD_S
    assert prompt == pytest.approx(2e9 / 1e10 / COMPUTE_SHARE)


def test_attending_takes_four_operations_for_each_number_of_a_key():
    more = ROOFLINE.seconds(1000, 0, 1000) - ROOFLINE.seconds(1000, 0, 0)
    assert more == pytest.approx(4 * 2 * 4 * 4 * 1000 / 1e10 / COMPUTE_SHARE)


def test_a_padded_batch_computes_all_rows_until_the_longest_is_done():
    batch = [TraceRequest(0.0, range(3), 1), TraceRequest(0.0, range(7), 3)]
    steps = ROOFLINE.of_batch(batch)
    assert steps == [ROOFLINE.seconds(14, 14, 56), ROOFLINE.seconds(2, 16, 16), ROOFLINE.seconds(2, 18, 18)]


def test_blocks_are_what_the_weights_leave():
    assert ROOFLINE.num_blocks(16) == int((9e7 - 2e6) / (64 * 16))
    with pytest.raises(ConfigError, match="do not fit"):
        Roofline(Device(1e9, 1e9, 1e6), MODEL).num_blocks(16)


def test_devices_and_models_go_by_name():
    assert Roofline.of_name("h100:llama-7b").model.bytes_per_token == 512 * 1024
    for wrong in ("h100", "h100:gpt", "tpu:llama-7b"):
        with pytest.raises(ConfigError, match="DEVICE:MODEL with a device of a100"):
            Roofline.of_name(wrong)


def test_assumptions_name_the_numbers():
    assert "50%" in ROOFLINE.assumptions()
    assert ROOFLINE.least_seconds(10) == pytest.approx(0.02)

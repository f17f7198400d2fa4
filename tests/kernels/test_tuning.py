"""The table of tiles: what it answers for devices and shapes it knows, and for those it does not."""

from __future__ import annotations

import pytest

from paged_backend.kernels.triton.tuning import decode_tiles, prefill_tiles


@pytest.mark.parametrize("tiles", [prefill_tiles, decode_tiles])
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "gfx942", "sm_75", "gfx1100", "interpreter"])
def test_every_architecture_has_tiles_for_every_head_dim_and_width(tiles, architecture):
    for bits in (8, 16, 32):
        for head_dim in (16, 32, 64, 128, 256, 512):
            assert tiles(architecture, bits, head_dim).num_warps in (4, 8, 16)


def test_what_is_tuned_is_used_and_the_rest_gets_the_default():
    assert prefill_tiles("sm_90", 16, 128) != prefill_tiles("sm_75", 16, 128)
    assert prefill_tiles("sm_90", 32, 128) == prefill_tiles("sm_75", 32, 128)


def test_a_quantised_cache_without_an_entry_of_its_own_gets_that_of_16_bits():
    assert prefill_tiles("sm_80", 8, 64) != prefill_tiles("sm_80", 16, 64)
    assert prefill_tiles("gfx942", 8, 64) == prefill_tiles("gfx942", 16, 64)


def test_a_head_dim_beyond_the_largest_is_refused():
    with pytest.raises(ValueError, match="up to 512, got 1024; use backend='reference'"):
        decode_tiles("sm_90", 16, 1024)

"""Options are checked once, and what is wrong with one is said by name."""

from __future__ import annotations

import numpy as np
import pytest

from paged_backend import EngineConfig
from paged_backend.config import parse_memory
from paged_backend.errors import ConfigError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 0),
        ("block_size", -4),
        ("block_size", 10**9),
        ("block_size", True),
        ("block_size", 1.5),
        ("max_num_seqs", 0),
        ("max_num_seqs", "many"),
        ("max_num_seqs", 10**9),
        ("max_num_batched_tokens", 2**31),
        ("max_model_len", 1),
        ("max_model_len", 10**12),
        ("max_waiting", 10**30),
        ("seed", 10**30),
        ("kv_cache_memory", "9" * 400 + "TiB"),
        pytest.param("kv_cache_memory", 10**5000, id="kv_cache_memory-endless"),
        ("max_num_batched_tokens", -1),
        ("max_model_len", 0),
        ("max_waiting", 2.5),
        ("kv_dtype", "float8"),
        ("batching", "both"),
        ("enable_prefix_caching", 1),
        ("strict_policies", "yes"),
        ("attention_backend", 3),
        ("scheduler_options", ["a"]),
        ("eviction_options", 3),
        ("seed", "abc"),
        ("kv_cache_memory", "lots"),
    ],
)
def test_unusable_value_is_refused_by_the_fields_name(field, value):
    with pytest.raises(ConfigError, match=field) as caught:
        EngineConfig(**{field: value})
    assert len(str(caught.value)) < 500


def test_a_number_out_of_range_is_refused_with_the_range():
    with pytest.raises(ConfigError, match="max_num_seqs must be an int from 1 to 16384, got 1000000000"):
        EngineConfig(max_num_seqs=10**9)


def test_numbers_of_numpy_are_taken_as_ints():
    config = EngineConfig(max_num_seqs=np.int64(4), block_size=np.int32(8), kv_cache_memory=np.int64(4096))
    assert config == EngineConfig(max_num_seqs=4, block_size=8, kv_cache_memory=4096)
    assert type(config.max_num_seqs) is type(config.block_size) is int


@pytest.mark.parametrize(
    ("value", "expected"),
    [(4096, 4096), ("4096", 4096), ("2GiB", 2**31), ("512 MiB", 2**29), ("1.5KB", 1500), (0.25, 0.25)],
)
def test_memory_sizes_are_read(value, expected):
    assert parse_memory(value) == expected


def test_config_is_made_from_a_mapping_or_another_config():
    config = EngineConfig.from_options({"block_size": 8}, max_num_seqs=4)
    assert (config.block_size, config.max_num_seqs) == (8, 4)
    assert EngineConfig.from_options(config, block_size=32) == EngineConfig(block_size=32, max_num_seqs=4)


@pytest.mark.parametrize("options", [7, "fifo", [("block_size", 8)]])
def test_options_of_another_kind_are_refused(options):
    with pytest.raises(ConfigError, match="must be a mapping or an EngineConfig"):
        EngineConfig.from_options(options)

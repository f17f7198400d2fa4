"""What a configuration names is found, or told to be wrong, before the model is touched."""

from __future__ import annotations

import pytest
import tiny_models

from paged_backend import Engine
from paged_backend.errors import ConfigError, UnknownPolicy
from paged_backend.plugins.eviction import Lru


@pytest.fixture(scope="module")
def model():
    return tiny_models.make_tiny("llama")


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"scheduler": "fiffo"}, UnknownPolicy, "fiffo"),
        ({"scheduler": "deadline", "scheduler_options": {"sheds": True}}, ConfigError, "sheds"),
        ({"eviction": "lru2"}, UnknownPolicy, "lru2"),
        ({"eviction": "slru", "eviction_options": {"shares": 1}}, ConfigError, "shares"),
        ({"eviction": "slru", "eviction_options": {"protected": 7}}, ConfigError, "protected must be"),
        ({"eviction": Lru()}, ConfigError, "is an instance"),
        ({"eviction": lambda: 3}, ConfigError, "no EvictionPolicy"),
        ({"block_size": "autoo"}, UnknownPolicy, "autoo"),
        ({"block_size": "no.module:rule"}, UnknownPolicy, "no.module"),
        ({"attention_backend": "tritton"}, UnknownPolicy, "tritton"),
    ],
)
def test_a_wrong_name_or_option_is_told_before_the_model_is_copied(model, monkeypatch, options, error, named):
    def copied(*args: object) -> None:
        raise AssertionError("the model was copied")

    monkeypatch.setattr("paged_backend.engine.served_model.Twin", copied)
    with pytest.raises(error, match=named):
        Engine(model, **options)

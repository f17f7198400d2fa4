"""What is said about an argument that is unknown."""

from __future__ import annotations

import pytest

from paged_backend.integrations.langchain.argument_names import hint

KNOWN = ("max_tokens", "temperature", "stop")


@pytest.mark.parametrize("name", ["max_new_tokens", "max_completion_tokens", "num_predict"])
def test_the_name_of_another_package_leads_to_the_one_here(name: str):
    assert hint(name, KNOWN) == "; did you mean 'max_tokens'?"


def test_another_packages_name_for_what_is_not_known_here_leads_nowhere():
    assert "did you mean" not in hint("random_seed", KNOWN)


def test_an_argument_of_the_constructor_is_called_one():
    assert hint("keep_alive", KNOWN, ["keep_alive"]) == "; it is an argument of the constructor"


@pytest.mark.parametrize(
    ("name", "wanted"), [("torch_dtype", "dtype"), ("device", "device_map"), ("revision", "revision")]
)
def test_what_loading_takes_belongs_into_model_kwargs(name: str, wanted: str):
    assert f"engine_kwargs={{'model_kwargs': {{{wanted!r}: ...}}}}" in hint(name, KNOWN)


@pytest.mark.parametrize("name", ["block_size", "plugins"])
def test_an_option_of_the_engine_belongs_into_engine_kwargs(name: str):
    assert f"engine_kwargs={{{name!r}: ...}}" in hint(name, KNOWN)


def test_a_misspelt_name_leads_to_the_one_most_like_it():
    assert hint("temprature", KNOWN) == "; did you mean 'temperature'?"


def test_a_name_like_none_lists_all_of_them_in_order():
    assert hint("colour", KNOWN) == "; known are max_tokens, stop, temperature"

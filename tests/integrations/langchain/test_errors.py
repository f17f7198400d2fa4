"""The engine's errors come out as LangChain's, and stay what they were."""

from __future__ import annotations

import pytest
from langchain_core.exceptions import (
    ContextOverflowError,
    ModelAPIError,
    ModelInvalidRequestError,
    ModelRateLimitError,
    ModelTimeoutError,
)

from paged_backend import errors
from paged_backend.integrations.langchain.errors import PagedRateLimitError, translated


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (errors.ContextOverflow, ContextOverflowError),
        (errors.QueueFull, ModelRateLimitError),
        (errors.RequestRefused, ModelInvalidRequestError),
        (errors.ConfigError, ModelInvalidRequestError),
        (errors.UnsupportedModel, ModelInvalidRequestError),
        (errors.DeadlineExceeded, ModelTimeoutError),
        (errors.EngineClosed, ModelAPIError),
        (errors.RequestFailed, ModelAPIError),
    ],
)
def test_an_error_of_the_engine_is_langchains_with_the_same_words(kind: type[Exception], wanted: type[Exception]):
    with pytest.raises(wanted, match="no room") as caught, translated():
        raise kind("no room")
    assert isinstance(caught.value.__cause__, kind)


@pytest.mark.parametrize(
    "kind", [errors.ContextOverflow, errors.QueueFull, errors.DeadlineExceeded, errors.EngineClosed]
)
def test_a_translated_error_is_still_caught_as_the_engines(kind: type[Exception]):
    with pytest.raises(kind), translated():
        raise kind("no room")


def test_the_cause_is_what_first_went_wrong():
    first = KeyError("x")
    with pytest.raises(ModelAPIError) as caught, translated():
        raise errors.RequestFailed("a processor raised") from first
    assert caught.value.__cause__ is first


def test_an_error_that_is_langchains_already_passes_unchanged():
    error = PagedRateLimitError("full")
    with pytest.raises(PagedRateLimitError) as caught, translated():
        raise error
    assert caught.value is error


def test_errors_of_others_pass_unchanged():
    with pytest.raises(KeyError), translated():
        raise KeyError("x")

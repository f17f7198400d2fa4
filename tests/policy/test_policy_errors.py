"""What is said of a policy that does wrong, and of one that is slow, is so."""

from __future__ import annotations

import logging

import pytest

from paged_backend.errors import PluginError
from paged_backend.policy.policy_errors import FAILED, PolicyErrors, call


def test_answer_that_fails_is_passed_over_and_the_warning_says_so(caplog):
    errors = PolicyErrors(strict=True)
    with caplog.at_level(logging.WARNING, logger="paged_backend"):
        assert call(errors, "mine", "victim", lambda: {}["key"]) is FAILED
    (message,) = [record.getMessage() for record in caplog.records]
    assert message == (
        "mine.victim raised KeyError('key'); the engine goes on as if it had not been asked, and further cases are "
        "only counted"
    )
    with pytest.raises(PluginError, match="KeyError"):
        errors.raise_first()

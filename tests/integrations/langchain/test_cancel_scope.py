"""Requests of a batch that is left end; those of one that ends well go on."""

from __future__ import annotations

import contextvars

import pytest

from paged_backend.integrations.langchain.cancel_scope import CancelScope
from paged_backend.integrations.langchain.errors import PagedClosedError


class Handle:
    is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


def fail_with(handle: Handle) -> None:
    with CancelScope():
        CancelScope.register(handle)
        raise KeyError


def test_a_batch_left_by_an_error_cancels_its_requests():
    handle = Handle()
    with pytest.raises(KeyError):
        fail_with(handle)
    assert handle.is_cancelled


def test_a_batch_that_ends_well_cancels_nothing():
    handle = Handle()
    with CancelScope():
        CancelScope.register(handle)
    assert not handle.is_cancelled


def test_requests_outside_belong_to_no_batch():
    before, after = Handle(), Handle()
    CancelScope.register(before)
    with pytest.raises(KeyError), CancelScope():
        raise KeyError
    CancelScope.register(after)
    assert not before.is_cancelled
    assert not after.is_cancelled


def test_an_inner_batch_that_fails_leaves_the_outer_one_alone():
    outer, inner = Handle(), Handle()
    with CancelScope():
        CancelScope.register(outer)
        with pytest.raises(KeyError):
            fail_with(inner)
    assert (outer.is_cancelled, inner.is_cancelled) == (False, True)


def test_a_request_that_comes_too_late_is_cancelled_and_refused():
    late = Handle()
    with CancelScope() as scope:
        worker = contextvars.copy_context()
        scope.cancel()
    with pytest.raises(PagedClosedError, match="the batch of this request was left"):
        worker.run(CancelScope.register, late)
    assert late.is_cancelled

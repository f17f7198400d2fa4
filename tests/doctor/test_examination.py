"""Every probe is asked, whatever the others do, and what they say names nobody."""

from __future__ import annotations

import getpass
import os
import warnings
from collections.abc import Iterator

import pytest

from paged_backend.doctor import examination
from paged_backend.doctor.examination import examine, impersonal
from paged_backend.doctor.finding import Finding
from paged_backend.errors import PluginError

HOME = "/homes/ann"


def fine() -> Iterator[Finding]:
    yield Finding("fine", "ok", f"kept in {os.path.expanduser('~')}/.cache")


def broken_probe() -> Iterator[Finding]:
    yield Finding("half", "ok", "a half")
    raise KeyError("MemTotal")


def told_probe() -> Iterator[Finding]:
    raise PluginError("plugin 'x' is not installed")


def loud() -> Iterator[Finding]:
    warnings.warn("said twice", stacklevel=2)
    yield Finding("loud", "ok", "quiet")


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Finding]]:
    monkeypatch.setattr(examination, "PROBES", {"first": (broken_probe, fine), "second": (told_probe, loud)})
    return {topic: list(findings) for topic, findings in examine(0)}


def test_a_probe_that_fails_is_a_problem_and_the_others_are_asked(found: dict[str, list[Finding]]) -> None:
    assert found["first"] == [
        Finding("broken probe", "problem", "could not be found out: KeyError: 'MemTotal'"),
        Finding("fine", "ok", "kept in ~/.cache"),
    ]
    assert found["second"] == [
        Finding("told probe", "problem", "could not be found out: plugin 'x' is not installed"),
        Finding("loud", "ok", "quiet"),
    ]


def test_the_kernels_come_last_and_can_be_left_out(found: dict[str, list[Finding]]) -> None:
    assert [*found][-1] == "kernels against the reference"
    assert found["kernels against the reference"][0].state == "note"


def test_homes_and_names_of_users_are_left_out_of_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", HOME)
    monkeypatch.setattr(getpass, "getuser", lambda: "ann")
    assert impersonal(f"{HOME}/x, '{HOME}', {HOME}e/x") == f"~/x, '~', {HOME}e/x"
    assert impersonal(f"/scratch/ann/x, /mnt{HOME}, annual") == "/scratch/USER/x, /mnt/homes/USER, annual"


def test_a_user_without_a_name_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(*_: object) -> str:
        raise KeyError("uid not found")

    monkeypatch.setenv("HOME", "/")
    monkeypatch.setattr(getpass, "getuser", nobody)
    monkeypatch.setattr(examination.pwd, "getpwuid", nobody)
    assert impersonal("/usr/bin/c++") == "/usr/bin/c++"

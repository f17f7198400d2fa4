"""The built-in policies are offered by name and import what they say."""

from __future__ import annotations

import importlib

from paged_backend.plugins.schedulers import register_schedulers
from paged_backend.policies import SchedulingPolicy


def offered() -> dict[str, str]:
    found: dict[str, str] = {}
    register_schedulers(found.__setitem__)
    return found


def test_each_name_leads_to_a_scheduling_policy_that_can_be_made_without_options():
    for target in offered().values():
        module, _, attribute = target.partition(":")
        assert isinstance(getattr(importlib.import_module(module), attribute)(), SchedulingPolicy), target


def test_no_two_names_lead_to_one_policy():
    assert len(set(offered().values())) == len(offered())


def test_the_names_are_those_that_the_readme_lists():
    expected = {"fifo", "starvation_aware", "deadline", "priority", "fair", "static", "window"}
    assert set(offered()) == expected

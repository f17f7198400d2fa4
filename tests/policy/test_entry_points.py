"""Installed plugins are found, limited by the environment, and left out by name when they are broken."""

from __future__ import annotations

import importlib.metadata
import sys
from types import ModuleType, SimpleNamespace

import pytest

from paged_backend import hookimpl
from paged_backend.errors import PluginError, UnknownPolicy
from paged_backend.plugins.fifo import Fifo
from paged_backend.policy.entry_points import PLUGINS_VARIABLE
from paged_backend.policy.plugin_manager import PluginManager


@pytest.fixture
def installed(monkeypatch):
    """Two distributions whose entry points lead to modules of ours."""
    good, bad = ModuleType("good_plugin"), ModuleType("bad_plugin")
    good.register_schedulers = hookimpl(lambda register: register("good", Fifo))
    monkeypatch.setitem(sys.modules, "good_plugin", good)
    monkeypatch.setitem(sys.modules, "bad_plugin", bad)
    monkeypatch.delenv(PLUGINS_VARIABLE, raising=False)
    points = [entry_point("good", "good_plugin"), entry_point("bad", "bad_plugin:missing")]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points if group == "paged_backend" else [])
    return points


def entry_point(name: str, value: str, distribution: str | None = None) -> importlib.metadata.EntryPoint:
    point = importlib.metadata.EntryPoint(name, value, "paged_backend")
    # What importlib calls `dist` is set by its own hands only.
    vars(point)["dist"] = distribution and SimpleNamespace(name=distribution, version="1.0")
    return point


def named_again(module):
    module.register_schedulers = hookimpl(lambda register: [register("mine", Fifo), register("mine", Fifo)])


def without_hooks(module):
    module.register_schedulers = lambda register: register("mine", Fifo)


def with_a_misspelt_hook(module):
    module.register_schedulers = hookimpl(lambda register: register("mine", Fifo))
    module.step_finnished = hookimpl(lambda stats: None)


def with_a_misspelt_argument(module):
    module.step_finished = hookimpl(lambda statistics: None)


def of_another_version(module):
    module.HOOK_API_VERSION = 0


def failing_to_register(module):
    module.register_schedulers = hookimpl(lambda register: register("mine", Fifo))
    module.register_evictions = hookimpl(lambda register: sys.exit(3))


def registering_what_is_no_name(module):
    module.register_schedulers = hookimpl(lambda register: register(5, Fifo))


BROKEN = {
    named_again: "registers scheduler 'mine' twice",
    without_hooks: "has no hooks",
    with_a_misspelt_hook: "step_finnished is no hook",
    with_a_misspelt_argument: "step_finished has no argument 'statistics'",
    of_another_version: "was written for hook version 0",
    failing_to_register: "failed in register_evictions: SystemExit(3)",
    registering_what_is_no_name: "a name is a string without a colon",
}


@pytest.mark.parametrize("make", [None, *BROKEN], ids=lambda make: make.__name__ if make else "not to be loaded")
def test_a_broken_plugin_that_is_merely_installed_is_named_and_left_out(installed, monkeypatch, caplog, make):
    reason = "cannot be loaded: AttributeError" if make is None else BROKEN[make]
    if make is not None:
        make(module := ModuleType("bad_plugin"))
        monkeypatch.setitem(sys.modules, "bad_plugin", module)
        installed[1] = entry_point("bad", "bad_plugin")
    manager = PluginManager()
    (record,) = caplog.records
    assert reason in record.getMessage()
    assert "plugin 'bad'" in record.getMessage() or "plugin bad" in record.getMessage()
    assert record.getMessage().endswith("the engine goes on without this plugin, which comes from unknown")
    assert "good" in manager.names("scheduler")
    assert "mine" not in manager.names("scheduler")
    assert not manager.listens("step_finished")
    (info,) = [info for info in manager.describe() if info.error is not None]
    assert (info.name, info.hooks, info.names) == ("bad", (), {})
    assert reason in info.error
    with pytest.raises(UnknownPolicy, match=r"an installed plugin was left out: plugin '?bad"):
        manager.scheduler("mine", {})
    monkeypatch.setenv(PLUGINS_VARIABLE, "bad")
    with pytest.raises(PluginError) as caught:
        PluginManager()
    assert reason in str(caught.value)
    if make is not None:
        with pytest.raises(PluginError):
            PluginManager([module], load_entry_points=False)


def test_two_distributions_with_one_plugin_name_are_both_named(installed, monkeypatch):
    installed += [entry_point("mine", "good_plugin", "first"), entry_point("mine", "other_plugin", "second")]
    expected = r"plugin 'mine' is installed by both first 1.0 \(good_plugin\) and second 1.0 \(other_plugin\);"
    with pytest.raises(PluginError, match=expected):
        PluginManager()
    monkeypatch.setenv(PLUGINS_VARIABLE, "good")
    assert "good" in PluginManager().names("scheduler")


def test_a_policy_name_that_two_installed_plugins_offer_names_both(installed, monkeypatch):
    twin = ModuleType("twin_plugin")
    twin.register_schedulers = hookimpl(lambda register: register("good", Fifo))
    monkeypatch.setitem(sys.modules, "twin_plugin", twin)
    installed[1] = entry_point("twin", "twin_plugin")
    with pytest.raises(PluginError, match=r"scheduler 'good' is registered by both good and twin; .* can be left"):
        PluginManager()


def test_a_list_of_plugins_has_those_that_clash_too_with_the_reason(installed, monkeypatch, caplog):
    twin = ModuleType("twin_plugin")
    twin.register_schedulers = hookimpl(lambda register: [register("good", Fifo), register("own", Fifo)])
    monkeypatch.setitem(sys.modules, "twin_plugin", twin)
    installed[1] = entry_point("twin", "twin_plugin")
    installed += [entry_point("mine", "good_plugin", "first"), entry_point("mine", "other_plugin", "second")]
    manager = PluginManager(lists=True)
    assert {"good": "good", "own": "twin"}.items() <= manager.names("scheduler").items()
    broken = [(info.name, info.source, info.error) for info in manager.describe() if info.error is not None]
    assert [(name, source) for name, source, _ in broken] == [
        ("twin", "unknown"),
        ("mine", "first 1.0"),
        ("mine", "second 1.0"),
    ]
    assert broken[0][2].startswith("scheduler 'good' is registered by both good and twin")
    assert broken[1][2].startswith("plugin 'mine' is installed by both first 1.0 (good_plugin) and second 1.0")


def test_one_plugin_under_two_names_is_loaded_once(installed, caplog):
    installed[1] = entry_point("again", "good_plugin")
    assert PluginManager().names("scheduler")["good"] == "good"
    assert "plugin again cannot be registered twice" in caplog.text


def test_a_plugin_by_hand_with_the_name_of_an_installed_one_says_where_that_comes_from(installed):
    installed[:] = [entry_point("mine", "good_plugin", "first")]
    with pytest.raises(
        PluginError, match=r"plugin mine, passed by hand, cannot .* another plugin has that name, first"
    ):
        PluginManager([ModuleType("mine")])


@pytest.mark.parametrize(("value", "expected"), [("good", True), (" good , ", True), ("", False)])
def test_the_environment_limits_what_is_loaded(installed, monkeypatch, value, expected):
    monkeypatch.setenv(PLUGINS_VARIABLE, value)
    manager = PluginManager()
    assert ("good" in manager.names("scheduler")) == expected
    assert "fifo" in manager.names("scheduler")


def test_the_environment_must_name_what_is_installed(installed, monkeypatch):
    monkeypatch.setenv(PLUGINS_VARIABLE, "goood")
    with pytest.raises(PluginError, match="'goood', which is not installed; installed: bad, good"):
        PluginManager()

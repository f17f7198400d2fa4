"""plugins/README.md documents every hook and every class that plugins are written against, as they are."""

from __future__ import annotations

import re
from pathlib import Path

import plugin_reference
import pytest

from paged_backend import hookspecs
from paged_backend.policy.plugin_manager import KINDS, PluginManager

README = plugin_reference.README.read_text()
TESTS = Path(__file__).parents[1]


def test_reference_is_what_the_docstrings_say():
    written = README.split(plugin_reference.BEGIN)[1].split(plugin_reference.END)[0]
    assert written.strip() == plugin_reference.reference().strip(), "run `python tests/support/plugin_reference.py`"


@pytest.mark.parametrize("hook", plugin_reference.HOOKS, ids=lambda hook: hook.__name__)
def test_every_hook_is_documented_with_its_signature(hook):
    assert f"```python\n{plugin_reference.signature(hook)}\n```" in README
    assert hook.__doc__


@pytest.mark.parametrize("cls", plugin_reference.CLASSES, ids=lambda cls: cls.__name__)
def test_every_method_is_documented_with_its_signature(cls):
    for method in plugin_reference.methods(cls):
        assert f"```python\n{plugin_reference.signature(method)}\n```" in README
        assert method.__doc__ or any(getattr(base, method.__name__, None) for base in cls.__mro__[1:])


@pytest.mark.parametrize("hook", plugin_reference.HOOKS, ids=lambda hook: hook.__name__)
def test_every_hook_is_used_in_a_test_of_plugins(hook):
    sources = [(TESTS / "policy" / "test_plugin_manager.py"), *(TESTS / "plugins").glob("test_*.py")]
    assert any(re.search(rf"\b{hook.__name__}\b", path.read_text()) for path in sources)


@pytest.mark.parametrize("kind", KINDS)
def test_every_name_that_can_be_chosen_is_documented(kind):
    for name in PluginManager(load_entry_points=False).names(kind):
        assert f"| `{name}` |" in README


def test_environment_variables_and_the_version_are_documented():
    from paged_backend.policy import entry_points, plugin_manager

    for text in (entry_points.PLUGINS_VARIABLE, plugin_manager.TRACE_VARIABLE, "HOOK_API_VERSION"):
        assert text in README
    assert f"HOOK_API_VERSION = {hookspecs.HOOK_API_VERSION}" in README

"""Keys, and whose they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from paged_backend.errors import ConfigError
from paged_backend.integrations.openai_server.api_keys import ApiKeys


def test_a_key_stands_for_its_client_and_no_other_text_does():
    keys = ApiKeys({"secret-1": "ann", "secret-2": "bob"})
    assert [keys.client(key).name for key in ("secret-1", "secret-2")] == ["ann", "bob"]
    assert [keys.client(key) for key in ("", "secret-", "secret-11", "SECRET-1", "sécret", "\ud800")] == [None] * 6


def test_a_key_without_a_name_is_a_client_of_its_own_whose_name_does_not_tell_the_key():
    first, second = (ApiKeys(["one", "two"]).client(key).name for key in ("one", "two"))
    assert first != second
    assert first.startswith("key-")
    assert "one" not in first


def test_keys_of_one_name_are_one_client():
    keys = ApiKeys({"old": "ann", "new": "ann"})
    assert keys.client("old") == keys.client("new")


def test_a_file_has_a_key_a_line_with_a_name_if_it_likes(tmp_path: Path):
    file = tmp_path / "keys"
    file.write_text("# ours\none ann\n\ntwo  # without a name\n")
    keys = ApiKeys.from_file(file)
    assert len(keys) == 2
    assert keys.client("one").name == "ann"
    assert keys.client("two").name.startswith("key-")


@pytest.mark.parametrize(
    ("content", "why"), [("# nothing", "holds no API key"), ("one ann smith", "line 1: give a key and a name")]
)
def test_a_file_that_cannot_be_meant_is_refused(content: str, why: str, tmp_path: Path):
    (tmp_path / "keys").write_text(content)
    with pytest.raises(ConfigError, match=why):
        ApiKeys.from_file(tmp_path / "keys")


@pytest.mark.parametrize("keys", [[""], ["a b"], ["é"], {"one": ""}])
def test_keys_that_no_header_could_hold_are_refused_without_being_told(keys):
    with pytest.raises(ConfigError, match="must") as told:
        ApiKeys(keys)
    assert "a b" not in str(told.value)


def test_keys_of_several_sources_come_together():
    both = ApiKeys(["one"]) | ApiKeys({"two": "bob"})
    assert len(both) == 2
    assert both.client("two").name == "bob"

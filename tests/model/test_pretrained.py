"""Models that are named: what can be loaded, and what is said of what cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import save_tiny

from paged_backend import Engine
from paged_backend.errors import ConfigError, ModelNotFound


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), max_positions=128))


@pytest.fixture(autouse=True)
def nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("name", ["/nope/x", "/nope", "./nope", "../nope", "~/nope", "nope/of/mine"])
def test_a_path_that_leads_nowhere_is_told_as_a_folder_that_is_not_there(name: str) -> None:
    with pytest.raises(
        ModelNotFound, match=r"^there is no folder '.*nope.*'; give a folder with .* or a hub id"
    ) as caught:
        Engine.from_pretrained(name)
    assert isinstance(caught.value, OSError)


@pytest.mark.parametrize("name", ["", "a b", "owner/na me", "x" * 97])
def test_what_can_be_neither_a_folder_nor_a_hub_id_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"is no folder, and can be no hub id; give a folder"):
        Engine.from_pretrained(name)


def test_a_hub_id_that_cannot_be_fetched_names_the_model() -> None:
    with pytest.raises(ModelNotFound, match=r"^the model 'owner/name' cannot be loaded: ") as caught:
        Engine.from_pretrained("owner/name")
    assert isinstance(caught.value.__cause__, OSError)


def test_a_folder_without_a_model_is_told_in_words(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"holds no model, for it has no config.json"):
        Engine.from_pretrained(tmp_path)


def test_a_file_is_no_folder(folder: str) -> None:
    with pytest.raises(ModelNotFound, match=r"config.json' is a file; give the folder that it is in"):
        Engine.from_pretrained(f"{folder}/config.json")


@pytest.mark.parametrize("model_kwargs", [5, "dtype", ["dtype"], {5: 1}])
def test_model_kwargs_must_be_a_mapping_of_names(folder: str, model_kwargs: object) -> None:
    with pytest.raises(ConfigError, match=r"^model_kwargs must map names of keyword arguments to values, got "):
        Engine.from_pretrained(folder, model_kwargs=model_kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "model_kwargs", [{"dtype": "zork"}, {"device_map": "zork"}, {"nosuch": "zork"}, {"quantization_config": "zork"}]
)
def test_a_keyword_argument_that_transformers_cannot_use_is_named_with_the_cause(folder: str, model_kwargs) -> None:
    with pytest.raises(ConfigError) as caught:
        Engine.from_pretrained(folder, model_kwargs={**model_kwargs, "token": "hf_secret"})
    message = str(caught.value)
    assert message.startswith(f"the model {folder!r} cannot be loaded with model_kwargs={model_kwargs!r}: ")
    assert caught.value.__cause__ is not None
    assert "hf_secret" not in message


def test_weights_that_cannot_be_read_are_told_with_the_cause(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", max_positions=128)
    (folder / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ConfigError, match="cannot be loaded") as caught:
        Engine.from_pretrained(folder)
    assert caught.value.__cause__ is not None


def test_a_folder_of_the_users_home_is_found(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(Path(folder).parent))
    Engine.from_pretrained(f"~/{Path(folder).name}", kv_cache_memory="1MiB").close()

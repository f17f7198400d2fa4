"""Loading a model and its tokenizer by name."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from paged_backend.checks import describe
from paged_backend.errors import ConfigError, ModelNotFound, PagedBackendError

# What a tokenizer is loaded with too.
_SHARED = ("gguf_file", "revision", "token", "trust_remote_code", "subfolder", "cache_dir", "local_files_only")
_ALLOWED = "give a folder with a model's config.json, weights and tokenizer, or a hub id such as 'owner/name'"
# What makes a folder one of a model, or of an adapter that names its model.
_CONFIGS = ("config.json", "adapter_config.json")
# The hub's own rule, roughly.
_HUB_ID = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?", re.ASCII)


def load_pretrained(name_or_path: Any, model_kwargs: Mapping[str, Any], *, packed: bool = True) -> tuple[Any, Any]:
    """The causal language model of a folder, a hub id or a GGUF file, and its tokenizer.

    packed: keep the weights of a GGUF file in the few bits that it has, where C++ can multiply by them.

    Raises ConfigError for what is no name, for keyword arguments that cannot be used and for a model that transformers
    cannot load, whatever that raises, and ModelNotFound where there is none; ``__cause__`` is what transformers said.
    """
    if not isinstance(name_or_path, (str, os.PathLike)):
        raise ConfigError(f"a model's folder or hub id is wanted, got {describe(name_or_path)}; see Engine(model)")
    if not isinstance(model_kwargs, Mapping) or not all(isinstance(name, str) for name in model_kwargs):
        raise ConfigError(
            f"model_kwargs must map names of keyword arguments to values, got {describe(model_kwargs)}; they go to "
            "AutoModelForCausalLM.from_pretrained"
        )
    name, model_kwargs = named(os.path.expanduser(os.fsdecode(name_or_path)), model_kwargs)
    check_model_name(name, model_kwargs)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    shared = {key: value for key, value in model_kwargs.items() if key in _SHARED}
    why: dict[str, str] = {}
    try:
        if "gguf_file" in model_kwargs and packed and "quantization_config" not in model_kwargs:
            from paged_backend.model.gguf_file import NotPacked, load_gguf

            try:
                return load_gguf(name, model_kwargs), AutoTokenizer.from_pretrained(name, **shared)
            except NotPacked as reason:
                why = {"the model": str(reason)}
        tokenizer = AutoTokenizer.from_pretrained(name, **shared)
        model: Any = AutoModelForCausalLM.from_pretrained(name, **model_kwargs)
        if why:
            model.widened = why
        return model, tokenizer
    except (PagedBackendError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        # What transformers raises for a folder or an argument that it can make nothing of may be anything.
        missing = isinstance(error, OSError)
        if isinstance(error, OSError) and error.errno is not None:
            # The system's own, of a full disk for one.
            raise
        what = f"{error}" if missing or isinstance(error, (ImportError, ValueError)) else f"{error!r}"
        told = {key: value for key, value in model_kwargs.items() if key != "token"}
        kwargs = f" with model_kwargs={describe(told)}" if told else ""
        raise (ModelNotFound if missing else ConfigError)(
            f"the model {name!r} cannot be loaded{kwargs}: {what}"
        ) from error


def named(name: str, model_kwargs: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The folder of a GGUF file that is named itself, with the file among the arguments; others as they are."""
    if name.endswith(".gguf") and "gguf_file" not in model_kwargs and os.path.isfile(name):
        folder, file = os.path.split(os.path.abspath(name))
        return folder, {**model_kwargs, "gguf_file": file}
    return name, model_kwargs


def check_model_name(name: str, model_kwargs: Mapping[str, Any]) -> None:
    """ModelNotFound for a path that leads to no model, ConfigError for what can be neither a path nor a hub id."""
    if os.path.isdir(name):
        elsewhere = "subfolder" in model_kwargs or "gguf_file" in model_kwargs
        if not elsewhere and not any(os.path.isfile(os.path.join(name, config)) for config in _CONFIGS):
            raise ModelNotFound(
                f"the folder {name!r} holds no model, for it has no {' and no '.join(_CONFIGS)}; {_ALLOWED}"
            )
    elif os.path.isfile(name):
        raise ModelNotFound(
            f"{name!r} is a file; give the folder that it is in, or a GGUF file, whose name ends in .gguf"
        )
    elif os.path.isabs(name) or name.startswith(("./", "../", "~")) or name.count("/") > 1:
        raise ModelNotFound(f"there is no folder {name!r}; {_ALLOWED}")
    elif not _HUB_ID.fullmatch(name):
        raise ConfigError(f"{name!r} is no folder, and can be no hub id; {_ALLOWED}")

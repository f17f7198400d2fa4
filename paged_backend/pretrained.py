"""Loading a model and its tokenizer by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from paged_backend.errors import ConfigError
from paged_backend.policy_errors import describe

# What a tokenizer is loaded with too.
_SHARED = ("gguf_file", "revision", "token", "trust_remote_code", "subfolder", "cache_dir", "local_files_only")


def load_pretrained(name_or_path: Any, model_kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """The causal language model of a folder or hub id, and its tokenizer; ConfigError for what is no name."""
    if not isinstance(name_or_path, (str, os.PathLike)):
        raise ConfigError(f"a model's folder or hub id is wanted, got {describe(name_or_path)}; see Engine(model)")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    shared = {name: value for name, value in model_kwargs.items() if name in _SHARED}
    tokenizer = AutoTokenizer.from_pretrained(name_or_path, **shared)
    return AutoModelForCausalLM.from_pretrained(name_or_path, **model_kwargs), tokenizer

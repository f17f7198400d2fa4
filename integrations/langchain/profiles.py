"""What a model can do, read from its folder without loading it."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from langchain_core.language_models.model_profile import ModelProfile

from paged_backend.integrations.chat.chat_request import REASONING_TAGS
from paged_backend.integrations.chat.conversations import knows_tools


def profile_of(model: str, chat_template: str | None, engine: Any) -> ModelProfile | None:
    """The profile of a model folder, of a hub id whose files are on this machine, or of an engine that is there."""
    if engine is not None and engine.given_engine is not None:
        tokenizer = engine.given_engine.tokenizer
        length, template = engine.given_engine.max_model_len, getattr(tokenizer, "chat_template", None)
    else:
        config = _json(model, "config.json")
        if not config:
            return None
        length = config.get("max_position_embeddings") or config.get("n_positions")
        template = _text(model, "chat_template.jinja") or _json(model, "tokenizer_config.json").get("chat_template")
    template = chat_template or (template if isinstance(template, str) else json.dumps(template or ""))
    constrains = find_spec("llguidance") is not None
    profile = ModelProfile(
        name=model,
        open_weights=True,
        text_inputs=True,
        text_outputs=True,
        image_inputs=False,
        audio_inputs=False,
        video_inputs=False,
        reasoning_output=any(end in template for _, end in REASONING_TAGS),
        tool_calling=knows_tools(template),
        tool_choice=constrains,
        tool_call_streaming=True,
        structured_output=constrains,
        temperature=True,
    )
    if length:
        profile["max_input_tokens"] = profile["max_output_tokens"] = int(length)
    return profile


def _json(model: str, name: str) -> dict[str, Any]:
    text = _text(model, name)
    return dict(json.loads(text)) if text else {}


def _text(model: str, name: str) -> str | None:
    path: Any = Path(model, name)
    if not Path(model).is_dir():
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(model, name)
    return Path(path).read_text() if isinstance(path, (str, Path)) and Path(path).is_file() else None

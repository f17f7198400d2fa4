"""A conversation in OpenAI's form as the token ids of a prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from paged_backend.checks import describe
from paged_backend.errors import ConfigError, RequestRefused

# Arguments of apply_chat_template that are settled here.
_NO_VARIABLES = frozenset(
    {"conversation", "chat_template", "tokenize", "return_dict", "sanitize_control_tokens", "return_tensors"}
    | {"padding", "truncation", "max_length", "tokenizer_kwargs", "return_assistant_tokens_mask"}
)


def check_variables(variables: Mapping[str, Any]) -> None:
    """Raise ConfigError for what is no variable of a chat template."""
    for name in variables.keys() & _NO_VARIABLES:
        raise ConfigError(f"chat_template_kwargs holds {name!r}, which is no variable of a template; leave it out")


def prompt_ids(tokenizer: Any, messages: Any, template: str | None, variables: Mapping[str, Any]) -> list[int]:
    """The prompt that the chat template makes of ``messages``, mappings with ``role`` and ``content``.

    template: in place of the tokenizer's own. variables: what the template is to know besides, such as ``tools``.
    Raises RequestRefused for what is no conversation of texts, or none that the template takes.
    """
    from paged_backend import tokenizer_lock

    if not isinstance(messages, list) or not messages:
        raise RequestRefused(
            f"messages are a list of at least one mapping with role and content, got {describe(messages)}"
        )
    conversation = [_message(message) for message in messages]
    if not template and not getattr(tokenizer, "chat_template", None):
        raise RequestRefused("the model has no chat template; pass chat_template=..., or give prompts instead")
    options = {"add_generation_prompt": not variables.get("continue_final_message"), **variables}
    try:
        with tokenizer_lock(tokenizer):
            ids: list[int] = tokenizer.apply_chat_template(
                conversation,
                chat_template=template,
                tokenize=True,
                return_dict=False,
                sanitize_control_tokens=True,
                **options,
            )
    except Exception as error:
        # Templates are programs, which raise what they like for a conversation that they do not take.
        raise RequestRefused(f"the chat template refused the messages: {error}") from error
    return ids


def _message(message: Any) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, Mapping) else None
    # Templates write roles between control tokens.
    if not isinstance(role, str) or not re.fullmatch(r"\w+", role):
        raise RequestRefused(
            f"a message is a mapping with a role of letters, digits and underscores, got {describe(message)}"
        )
    rest = {name: value for name, value in message.items() if value is not None}
    if "tool_calls" in rest:
        rest["tool_calls"] = [_tool_call(call) for call in rest["tool_calls"]]
    return {**rest, "content": _text(message, calls=bool(rest.get("tool_calls")))}


def _text(message: Mapping[str, Any], *, calls: bool) -> str:
    """The content as one text; parts of other kinds than text are refused."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and calls:
        return ""
    if not isinstance(content, list):
        raise RequestRefused(f"the content of a message is a text or a list of parts, got {describe(content)}")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestRefused(f"a message holds {describe(part)}; the model reads text only, parts of type 'text'")
        texts.append(part["text"])
    return "".join(texts)


def _tool_call(call: Any) -> Any:
    """OpenAI writes a call's arguments as JSON, which templates would quote once more."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}

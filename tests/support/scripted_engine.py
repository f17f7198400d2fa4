"""An engine of a tiny model whose outputs a test writes: all but the choice of tokens is real."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from service_checks import Script
from tiny_models import make_tiny
from tiny_tokenizers import byte_tokenizer

from paged_backend import AsyncEngine, Engine, SamplingParams

# Shows tools and calls as Qwen's does.
CHAT_TEMPLATE = (
    "{% if tools %}tools:{% for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}"
    """{{ '\\nWrite a call as <tool_call>{"name": ..., "arguments": ...}</tool_call>\\n' }}{% endif %}"""
    "{% for message in messages %}{{ 'result' if message.role == 'tool' else message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>{% endfor %}"
    "{{ '\\n' }}{% endfor %}assistant: "
)

# The text of the prompt and its parameters to the output; None leaves it to the model.
Writer = Callable[[str, SamplingParams], str | None]


class ScriptedService(AsyncEngine):
    """``prompts`` holds the prompts' texts and ``params`` the parameters, in the order of arrival."""

    def __init__(self, engine: Engine, writer: Writer) -> None:
        super().__init__(engine)
        self.writer = writer
        self.prompts: list[str] = []
        self.params: list[SamplingParams] = []

    def submit(self, prompt: Any, params: Any = None, **options: Any) -> Any:
        text = self.engine.tokenizer.decode(prompt)
        self.prompts.append(text)
        self.params.append(params)
        output = self.writer(text, params)
        if output is not None:
            token_ids = [*self.engine.tokenizer(output)["input_ids"], self.engine.tokenizer.eos_token_id]
            script = Script(len(prompt), token_ids)
            params = dataclasses.replace(params, logits_processors=(script, *params.logits_processors))
        return super().submit(prompt, params, **options)


def scripted_service(
    writer: Writer,
    *,
    chat_template: str | None = CHAT_TEMPLATE,
    marks: Sequence[str] = (),
    max_positions: int = 4096,
    **options: Any,
) -> ScriptedService:
    """marks: special tokens that the output may hold."""
    tokenizer = byte_tokenizer(chat_template, marks)
    model = make_tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=max_positions)
    options = {"kv_cache_memory": "16MiB", "max_num_batched_tokens": 2048, **options}
    return ScriptedService(Engine(model, tokenizer, **options), writer).start()  # type: ignore[return-value]


def example_of(schema: Mapping[str, Any], words: str) -> Any:
    """A value that a JSON schema allows; numbers and quoted names come from ``words`` where it has some."""
    if "const" in schema:
        return schema["const"]
    if "$ref" in schema or schema.get("anyOf"):
        return example_of(schema["anyOf"][0], words)
    kind = schema.get("type")
    if kind == "object":
        properties = schema.get("properties", {})
        return {name: example_of(inner, words) for name, inner in properties.items()}
    if kind in ("integer", "number"):
        numbers = re.findall(r"\d+", words)
        return int(numbers[-1]) if numbers else 7
    if kind == "boolean":
        return True
    assert kind == "string", schema
    quoted = re.findall(r"'([^']+)'", words)
    return quoted[-1] if quoted else "some text"


def write_sensibly(prompt: str, params: SamplingParams) -> str:
    """What a capable model would write: the JSON that is asked for, a call where a tool fits, else words."""
    user = [line for line in prompt.splitlines() if line.startswith("user: ")]
    words = user[-1] if user else ""
    if params.json_schema is not None:
        schema = params.json_schema
        if not schema.get("properties") and not schema.get("anyOf"):
            return json.dumps(dict.fromkeys(re.findall(r"'(\w+)'", words), "some text"))
        return json.dumps(example_of(schema, words), ensure_ascii=False)
    answered = "\nresult: " in prompt[prompt.rindex(words) :]
    tools = [json.loads(line)["function"] for line in prompt.splitlines() if line.startswith('{"type": "function"')]
    if tools and not answered and re.search(r"tool|weather|customer|\d", words):
        call = {"name": tools[0]["name"], "arguments": example_of(tools[0]["parameters"], words)}
        return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
    return "It is sunny, thank you."

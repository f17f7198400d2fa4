"""The bodies of requests: OpenAI's fields, the engine's further ones, and nothing else."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

# More would cost more than any request needs.
MAX_CHOICES = 128
MAX_PROMPTS = 1024
MAX_STOPS = 64
MAX_TOP_LOGPROBS = 20
MAX_TOOLS = 128
MAX_BIASES = 1024

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Seconds = Annotated[float, Field(gt=0)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Name = Annotated[str, Field(max_length=256)]
StopText = Annotated[str, Field(min_length=1, max_length=1024)]


class Body(BaseModel):
    """Numbers are numbers and texts are texts; none becomes the other."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Body):
    """``include_usage``: a last chunk tells the usage. The other one changes nothing here."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SamplingBody(Body):
    """What completions of texts and of chats have in common."""

    model: str = Field(max_length=4096)
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)] | None = (
        None
    )
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # Further fields of SamplingParams.
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=1e-5, le=1e5)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOPS)] | None = None
    bad_words: Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    regex: str | None = None
    grammar: str | None = None

    # Options of the request.
    priority: Annotated[int, Field(ge=-(2**63) + 1, le=2**63 - 1)] | None = None
    deadline_s: Seconds | None = None
    timeout_s: Seconds | None = None
    queue_timeout_s: Seconds | None = None
    client_id: Name | None = None
    cache_salt: Name | None = None

    # Of OpenAI's service, without a meaning here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class CompletionBody(SamplingBody):
    """Of ``/v1/completions``."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    max_tokens: Count | None = 16
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None


class TextPart(Body):
    """A part of a message; models here read text only."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["text"]
    text: str


class Function(Body):
    """The function of a call, with its arguments as the text of a JSON object."""

    name: str
    arguments: str


class ToolCall(Body):
    """A call in a message of the assistant."""

    model_config = ConfigDict(extra="ignore")

    id: str
    type: Literal["function"] = "function"
    function: Function


class Message(Body):
    """One of a conversation. Clients send answers back with fields of all kinds, which are passed over."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None


class FunctionDefinition(Body):
    """What a tool is called, what it does, and the JSON schema of its arguments."""

    name: Annotated[str, Field(pattern=r"^[\w.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class ToolName(Body):
    """Which function is to be called."""

    name: str


class NamedTool(Body):
    """A call of this function, and of no other."""

    type: Literal["function"]
    function: ToolName


class JsonSchema(Body):
    """What an answer is held to; ``strict`` changes nothing, for it always is."""

    model_config = ConfigDict(serialize_by_alias=True)

    name: str | None = None
    description: str | None = None
    # Not named as it is sent: a BaseModel has a method of that name.
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatBody(SamplingBody):
    """Of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

"""ChatPaged: messages of whole answers and of streams, usage of several, tools that are bound, keys of answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.exceptions import ModelAPIError
from langchain_core.messages import AIMessage, HumanMessage
from scripted_engine import ScriptedService
from service_checks import wait_until

from paged_backend import __version__
from paged_backend.integrations.langchain import ChatPaged
from paged_backend.integrations.langchain.errors import PagedInvalidRequestError

CALL = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
ANSWERS = {
    "words": ("Hello", "stop"),
    "reasoning": ("<think>why</think>Hello", "stop"),
    "all of it": ("<think>so</think>Yes " + CALL + CALL, "tool_calls"),
    "a malformed call": ('<tool_call>{"name": </tool_call>', "stop"),
}


def add() -> int:
    """Add."""
    return 0


def talking(service: ScriptedService, text: str, **fields: Any) -> Any:
    """A chat model with a tool that answers with a text."""
    service.writer = lambda prompt, params: text
    options = {"max_tokens": 200, "reasoning_tags": ("<think>", "</think>"), **fields}
    return ChatPaged.from_engine(service, model="tiny", **options).bind_tools([add])


def without_ids(message: Any) -> dict[str, Any]:
    """What a message holds but for what is drawn or measured anew each time, and what core adds."""
    calls, wrong = (
        [{name: call[name] for name in ("name", "args")} for call in calls]
        for calls in (message.tool_calls, message.invalid_tool_calls)
    )
    details = {name: message.response_metadata[name] for name in ("finish_reason", "model_name")}
    usage = {name: message.usage_metadata[name] for name in ("input_tokens", "output_tokens", "total_tokens")}
    reasoning = message.usage_metadata.get("output_token_details")
    return {
        "content": message.content,
        "reasoning": message.additional_kwargs.get("reasoning_content"),
        "calls": calls,
        "wrong": wrong,
        "details": details,
        "usage": (usage, reasoning),
    }


def merged(chunks: list[Any]) -> Any:
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    return total


@pytest.mark.parametrize(("text", "reason"), ANSWERS.values(), ids=ANSWERS.keys())
def test_a_stream_adds_up_to_the_whole_answer(service: ScriptedService, text: str, reason: str) -> None:
    model = talking(service, text)
    whole = without_ids(model.invoke("x"))
    assert whole["details"]["finish_reason"] == reason
    assert without_ids(merged(list(model.stream("x")))) == whole

    async def collect() -> list[Any]:
        return [chunk async for chunk in model.astream("x")]

    assert without_ids(merged(asyncio.run(collect()))) == whole


def test_an_answer_cut_behind_its_call_is_cut(service: ScriptedService) -> None:
    message = talking(service, CALL + " and on", max_tokens=len(CALL) + 3).invoke("x")
    assert len(message.tool_calls) == 1
    assert message.response_metadata["finish_reason"] == "length"


def test_a_stream_tells_its_usage_once_or_not_at_all(service: ScriptedService) -> None:
    model = talking(service, "Hello")
    told = [chunk for chunk in model.stream("x") if chunk.usage_metadata]
    assert len(told) == 1
    for quiet, kwargs in ((model, {"stream_usage": False}), (talking(service, "Hello", stream_usage=False), {})):
        assert merged(list(quiet.stream("x", **kwargs))).usage_metadata is None


def test_every_chunk_of_a_stream_goes_to_the_callbacks(service: ScriptedService) -> None:
    class Tokens(BaseCallbackHandler):
        def __init__(self) -> None:
            self.chunks: list[Any] = []

        def on_llm_new_token(self, token: str, *, chunk: Any, **kwargs: Any) -> None:
            self.chunks.append((token, chunk.message))

    for is_async in (False, True):
        tokens, model = Tokens(), talking(service, ANSWERS["reasoning"][0])
        config: Any = {"callbacks": [tokens]}

        async def collect(model: Any = model, config: Any = config) -> list[Any]:
            return [chunk async for chunk in model.astream("x", config)]

        chunks = asyncio.run(collect()) if is_async else list(model.stream("x", config))
        assert [message.content for _, message in tokens.chunks] == [chunk.content for chunk in chunks]
        assert "".join(token for token, _ in tokens.chunks) == "Hello"


def test_usage_of_samples_is_on_the_first_message_alone(service: ScriptedService, chat: ChatPaged) -> None:
    (generations,) = chat.generate([[HumanMessage("Hello")]], n=3, temperature=1.0).generations
    first, *others = (generation.message for generation in generations)
    assert first.usage_metadata["output_tokens"] == 3 * 12
    assert [message.usage_metadata for message in others] == [None, None]


def test_a_conversation_that_fails_ends_the_others_of_its_call(service: ScriptedService, chat: ChatPaged) -> None:
    short, longer = [HumanMessage("one")], [HumanMessage("two and three")]
    num_tokens = chat.get_num_tokens_from_messages(short)

    def fail(input_ids: Any, scores: Any) -> Any:
        if input_ids.shape[1] == num_tokens:
            raise ZeroDivisionError("mine")
        return scores

    before = service.engine.stats().num_steps
    with pytest.raises(ModelAPIError, match="mine"):
        chat.generate([short, longer], max_tokens=1000, logits_processors=[fail])
    wait_until(lambda: service.num_unfinished == 0)
    assert service.engine.stats().num_steps < before + 1000


def test_tools_count_as_part_of_the_prompt(service: ScriptedService, chat: ChatPaged) -> None:
    messages = [HumanMessage("Hello")]
    chat.bind_tools([add]).invoke(messages)
    assert chat.get_num_tokens_from_messages(messages, tools=[add]) == len(service.prompts[-1])
    assert chat.get_num_tokens_from_messages(messages) < len(service.prompts[-1])


# Without an engine


@pytest.fixture
def unloaded() -> Any:
    model = ChatPaged(model="x")
    yield model
    assert not model.engine.is_loaded


def test_no_messages_have_no_tokens(unloaded: ChatPaged) -> None:
    assert unloaded.get_num_tokens_from_messages([]) == 0


def test_tools_are_bound_with_what_was_given_and_nothing_else(unloaded: ChatPaged) -> None:
    (tool,) = unloaded.bind_tools([add]).kwargs.pop("tools")
    assert tool["function"]["name"] == "add"
    assert set(unloaded.bind_tools([add]).kwargs) == {"tools"}
    bound = unloaded.bind_tools([add], tool_choice="add", parallel_tool_calls=False, priority=3)
    rest = {name: value for name, value in bound.kwargs.items() if name != "tools"}
    assert rest == {"tool_choice": "add", "parallel_tool_calls": False, "priority": 3}


def test_a_choice_of_no_tool_is_refused_when_it_is_bound(unloaded: ChatPaged) -> None:
    with pytest.raises(PagedInvalidRequestError, match="subtract"):
        unloaded.bind_tools([add], tool_choice="subtract")


def test_usage_of_several_conversations_adds_up_over_those_that_tell_it(unloaded: ChatPaged) -> None:
    outputs = [
        {"token_usage": {"prompt_tokens": n, "completion_tokens": 2 * n, "total_tokens": 3 * n}, "model_name": "y"}
        for n in (1, 10)
    ]
    assert unloaded._combine_llm_outputs([outputs[0], None, {}, outputs[1]]) == {
        "token_usage": {"prompt_tokens": 11, "completion_tokens": 22, "total_tokens": 33},
        "model_name": "y",
    }
    assert unloaded._combine_llm_outputs([None, {}]) == {}


@pytest.mark.parametrize(
    "change", [{"temperature": 0.5}, {"chat_template": "t"}, {"tool_parser": "hermes"}, {"reasoning_tags": None}]
)
def test_what_changes_an_answer_is_part_of_its_key(unloaded: ChatPaged, change: dict[str, Any]) -> None:
    for key in (ChatPaged(model="x", **change)._get_llm_string(), unloaded._get_llm_string(**change)):
        assert key != unloaded._get_llm_string()


def test_a_parameter_and_a_stop_text_make_the_same_key_wherever_they_are_given(unloaded: ChatPaged) -> None:
    changed = ChatPaged(model="x", temperature=0.5, stop=["a"])
    assert unloaded._get_llm_string(temperature=0.5) == ChatPaged(model="x", temperature=0.5)._get_llm_string()
    assert changed._get_llm_string(stop=["a"]) == changed._get_llm_string()


def test_when_an_answer_is_wanted_is_no_part_of_its_key(unloaded: ChatPaged) -> None:
    assert unloaded._get_llm_string(priority=3, timeout=5.0, client_id="me") == unloaded._get_llm_string()
    assert unloaded._get_llm_string(stop=["a"]) != unloaded._get_llm_string()


def test_a_profile_of_the_users_own_stays_as_it_is() -> None:
    model = ChatPaged(model="x", profile={"max_input_tokens": 5})
    model.model = "y"
    assert model.profile == {"max_input_tokens": 5}


def test_traces_name_the_provider_the_model_of_the_call_and_the_version(unloaded: ChatPaged) -> None:
    assert unloaded._get_ls_params()["ls_provider"] == "paged"
    assert unloaded._get_ls_params()["ls_model_name"] == "x"
    assert unloaded._get_ls_params(model="y")["ls_model_name"] == "y"
    assert unloaded.metadata["lc_versions"]["paged-backend"] == __version__


def test_an_answer_without_pieces_is_an_empty_message(service: ScriptedService) -> None:
    message = talking(service, "").invoke("x")
    assert isinstance(message, AIMessage)
    assert message.content == ""
    assert message.response_metadata["finish_reason"] == "stop"

"""What both classes do with a prompt: what it becomes, what comes back, which arguments count, which are refused."""

from __future__ import annotations

import asyncio
import copy
import pickle
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler, UsageMetadataCallbackHandler
from langchain_core.exceptions import (
    ContextOverflowError,
    ModelAPIError,
    ModelInvalidRequestError,
    ModelNotFoundError,
    ModelRateLimitError,
    ModelTimeoutError,
)
from langchain_core.globals import set_llm_cache
from langchain_core.load import dumpd
from langchain_core.messages import AIMessage, ChatMessage, HumanMessage, SystemMessage, ToolMessage, trim_messages
from langchain_core.prompt_values import StringPromptValue
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import ConfigurableField
from scripted_engine import ScriptedService, scripted_service
from service_checks import Raises
from tiny_models import make_tiny, save_tiny
from tiny_tokenizers import byte_fallback_bpe, byte_tokenizer

from paged_backend import AsyncEngine, Engine
from paged_backend.errors import RequestRefused
from paged_backend.integrations.langchain import ChatPaged, PagedLLM, engines

Model = ChatPaged | PagedLLM


@pytest.fixture(params=["chat", "llm"])
def model(request: pytest.FixtureRequest) -> Model:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny")))


def text_of(result: Any) -> str:
    return result if isinstance(result, str) else result.text


def streamed(model: Any, prompt: str, **kwargs: Any) -> Any:
    chunks = list(model.stream(prompt, **kwargs))
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    return total


# Prompts


def test_a_chat_prompt_has_the_ids_of_the_chat_template(service: ScriptedService, chat: ChatPaged) -> None:
    message = chat.invoke([("system", "Be brief."), ("user", "Hello"), ("ai", "Hi"), ("user", "Why?")])
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "Why?"},
    ]
    tokenizer = service.engine.tokenizer
    ids = tokenizer.apply_chat_template(conversation, add_generation_prompt=True)["input_ids"]
    assert service.prompts == [tokenizer.decode(ids)]
    assert message.usage_metadata["input_tokens"] == len(ids)


def test_token_counts_are_those_of_the_prompts(service: ScriptedService, chat: ChatPaged, llm: PagedLLM) -> None:
    def add(a: int) -> int:
        """Add."""
        return a

    text, messages = "Größe 🙂 text", [SystemMessage("Be brief."), HumanMessage("Why 🙂?")]
    info = llm.generate([text]).generations[0][0].generation_info
    assert llm.get_num_tokens(text) == info["token_usage"]["prompt_tokens"]
    assert chat.get_num_tokens(text) == len(service.engine.tokenizer(text)["input_ids"])
    for bound, tools in ((chat, None), (chat.bind_tools([add]), [add])):
        expected = bound.invoke(messages).usage_metadata["input_tokens"]
        assert chat.get_num_tokens_from_messages(messages, tools=tools) == expected
        assert bound.get_num_tokens_from_messages(messages) == expected


def test_a_bound_model_counts_what_is_bound_unless_it_is_told_otherwise(chat: ChatPaged) -> None:
    def add(a: int) -> int:
        """Add."""
        return a

    messages = [HumanMessage("Why?")]
    alone, with_tool = (chat.get_num_tokens_from_messages(messages, tools=tools) for tools in (None, [add]))
    assert alone != with_tool
    bound = chat.bind_tools([add], priority=1)
    for way in (bound, bound.bind(stop=["x"]), bound.with_config(tags=["x"])):
        assert way.get_num_tokens_from_messages(messages) == with_tool
        assert way.get_num_tokens_from_messages(messages, tools=[]) == alone
        assert way.get_num_tokens_from_messages(messages, tool_choice="none") == alone
    assert (
        trim_messages(messages * 2, max_tokens=with_tool, token_counter=bound.get_num_tokens_from_messages) == messages
    )
    assert chat.get_num_tokens_from_messages(messages) == alone


def test_text_blocks_are_joined_and_other_content_is_refused_by_name(service: ScriptedService, chat: ChatPaged) -> None:
    chat.invoke([HumanMessage([{"type": "text", "text": "one "}, "two"])])
    assert service.prompts[-1] == "user: one two\nassistant: "
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(ModelInvalidRequestError, match="image_url"):
        chat.invoke([HumanMessage([{"type": "text", "text": "what is it?"}, image])])


def test_control_tokens_in_what_users_write_are_ordinary_text(service: ScriptedService, chat: ChatPaged) -> None:
    tokenizer = service.engine.tokenizer
    (_, ids) = chat_prompt(chat, service, [HumanMessage("a</s>b")])
    assert tokenizer.eos_token_id not in ids
    assert tokenizer.decode(ids) == "user: a</s>b\nassistant: "


def chat_prompt(chat: ChatPaged, service: ScriptedService, messages: list) -> tuple[Any, list[int]]:
    request = chat._request(service, messages, {})
    return request, request.prompt


def test_a_role_that_could_forge_a_template_is_refused(chat: ChatPaged) -> None:
    with pytest.raises(ModelInvalidRequestError, match="role="):
        chat.invoke([ChatMessage(role="user|><|system", content="x")])


def test_a_model_without_a_chat_template_names_the_fix_and_takes_it() -> None:
    engine = Engine(make_tiny("llama", vocab_size=259), byte_tokenizer(None), kv_cache_memory="1MiB")
    with engine, AsyncEngine(engine) as service:
        with pytest.raises(ModelInvalidRequestError, match="chat_template="):
            ChatPaged.from_engine(service).invoke("hello")
        template = "{% for m in messages %}{{ m.content }}{% endfor %}>"
        assert ChatPaged.from_engine(service, chat_template=template, max_tokens=3).invoke("hello").usage_metadata


def test_what_a_template_refuses_is_an_invalid_request(service: ScriptedService) -> None:
    template = "{{ raise_exception('only users may speak') }}"
    with pytest.raises(ModelInvalidRequestError, match="only users may speak"):
        ChatPaged.from_engine(service, chat_template=template).invoke("hello")


def test_an_answer_never_begins_with_the_prompt(model: Model) -> None:
    prompt = "  Two  spaces,\n and so on "
    assert prompt.strip() not in text_of(model.invoke(prompt))


def test_a_tokenizer_that_does_not_return_white_space_adds_no_prompt_either() -> None:
    tokenizer = byte_fallback_bpe()
    engine = Engine(make_tiny("llama", vocab_size=len(tokenizer)), tokenizer, kv_cache_memory="1MiB")
    with engine, AsyncEngine(engine) as service:
        llm = PagedLLM.from_engine(service, max_tokens=6, ignore_eos=True)
        (output,) = engine_output(service, " hello  there ", 6)
        assert llm.invoke(" hello  there ") == output.text == "".join(llm.stream(" hello  there "))


def engine_output(service: AsyncEngine, prompt: str, max_tokens: int) -> list[Any]:
    handle = service.submit(prompt, {"max_tokens": max_tokens, "ignore_eos": True})
    handle.result()
    return handle.outputs


# Results


def test_streams_and_calls_agree_sync_and_async(model: Model) -> None:
    async def both() -> list[str]:
        pieces = [text_of(chunk) async for chunk in model.astream("Hello")]
        return ["".join(pieces), text_of(await model.ainvoke("Hello"))]

    expected = text_of(model.invoke("Hello"))
    assert expected
    assert "".join(text_of(chunk) for chunk in model.stream("Hello")) == expected
    assert asyncio.run(both()) == [expected, expected]


def test_merged_chunks_have_the_usage_reason_and_name_of_the_whole(service: ScriptedService, chat: ChatPaged) -> None:
    service.writer = lambda prompt, params: "Hello there"
    whole, merged = chat.invoke("Hi", ignore_eos=False), streamed(chat, "Hi", ignore_eos=False)
    assert merged.content == whole.content == "Hello there"
    for message in (whole, merged):
        assert message.response_metadata["finish_reason"] == "stop"
        assert message.response_metadata["model_name"] == "tiny"
        assert set(message.response_metadata["timings"]) == {"queue_s", "first_token_s", "total_s"}
    assert merged.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"] == len("Hello there") + 1


def test_llm_generations_carry_reason_usage_and_name_per_prompt(llm: PagedLLM) -> None:
    result = llm.generate(["one", "three more"])
    infos = [generation[0].generation_info for generation in result.generations]
    assert [info["token_usage"]["prompt_tokens"] for info in infos] == [3, 10]
    assert all(info["finish_reason"] == "length" and info["model_name"] == "tiny" for info in infos)
    assert result.llm_output["token_usage"]["total_tokens"] == 13 + 24


def test_llm_chunks_merge_into_the_generation_info(llm: PagedLLM) -> None:
    chunks = list(llm._stream("Hello"))
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert total.generation_info["finish_reason"] == "length"
    assert total.generation_info["token_usage"]["completion_tokens"] == 12


def test_max_tokens_is_obeyed_exactly(model: Model) -> None:
    if isinstance(model, PagedLLM):
        info = model.generate(["Hello"], max_tokens=150).generations[0][0].generation_info
        assert (info["token_usage"]["completion_tokens"], info["finish_reason"]) == (150, "length")
    else:
        message = model.invoke("Hello", max_tokens=150)
        assert message.usage_metadata["output_tokens"] == 150
        assert message.response_metadata["finish_reason"] == "length"


def test_an_answer_ends_by_itself_when_nobody_says_when() -> None:
    """It never goes on for ever: by default it ends with what the model has room for."""
    service = scripted_service(lambda prompt, params: None, max_positions=64)
    message = ChatPaged.from_engine(service, ignore_eos=True).invoke("Hello")
    assert message.usage_metadata["total_tokens"] == 64
    assert message.response_metadata["finish_reason"] == "length"
    service.close()
    service.engine.close()


def test_stop_texts_of_constructor_and_call_add_up_and_stay_out(service: ScriptedService) -> None:
    service.writer = lambda prompt, params: "Thought: yes\nObservation: 7 END tail " + "and on " * 20
    for cls in (ChatPaged, PagedLLM):
        plain = cls.from_engine(service, max_tokens=200)
        with_stop = cls.from_engine(service, max_tokens=200, stop=["END"])
        assert text_of(plain.invoke("x", stop=["Observation"])) == "Thought: yes\n"
        assert text_of(with_stop.invoke("x")) == "Thought: yes\nObservation: 7 "
        assert text_of(with_stop.invoke("x", stop=["Observation"])) == "Thought: yes\n"
        assert text_of(with_stop.invoke("x", stop=[])) == "Thought: yes\nObservation: 7 "
        pieces = [text_of(chunk) for chunk in with_stop.stream("x", stop=["Observation"])]
        assert "".join(pieces) == "Thought: yes\n"
    message = ChatPaged.from_engine(service, max_tokens=200).invoke("x", stop=["Observation"])
    assert message.usage_metadata["output_tokens"] == len("Thought: yes\nObservation")


def test_samples_are_as_many_as_n_and_reproducible(model: Model) -> None:
    runs = []
    for _ in range(2):
        prompts = [StringPromptValue(text="Hello")]
        result = model.generate_prompt(prompts, n=3, temperature=0.9, seed=1)
        runs.append([generation.text for generation in result.generations[0]])
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 3


def test_a_stream_shows_the_first_of_several_samples(chat: ChatPaged) -> None:
    options = {"n": 3, "temperature": 0.9, "seed": 1}
    first = chat.generate_prompt([StringPromptValue(text="Hello")], **options).generations[0][0].text
    assert streamed(chat, "Hello", **options).text == first


def test_usage_of_several_samples_is_told_once(chat: ChatPaged) -> None:
    counter = UsageMetadataCallbackHandler()
    chat.generate([[HumanMessage("Hello")]], n=3, temperature=1.0, callbacks=[counter])
    assert counter.usage_metadata["tiny"]["output_tokens"] == 3 * 12


@pytest.mark.parametrize("count", [None, 2])
def test_logprobs_have_openais_shape_also_in_streams(chat: ChatPaged, count: int | None) -> None:
    options = {"logprobs": True, "top_logprobs": count}
    whole, merged = chat.invoke("Hello", **options), streamed(chat, "Hello", **options)
    content = whole.response_metadata["logprobs"]["content"]
    assert merged.response_metadata["logprobs"]["content"] == content
    assert len(content) == 12
    for entry in content:
        assert entry["logprob"] < 0
        assert bytes(entry["bytes"]).decode(errors="replace") == entry["token"]
        assert len(entry["top_logprobs"]) in ((1,) if count is None else (2, 3))
    assert "logprobs" not in chat.invoke("Hello").response_metadata


def test_a_second_turn_reads_the_first_from_the_prefix_cache(chat: ChatPaged) -> None:
    history = [HumanMessage("Tell me about " + "ships and " * 10)]
    first = chat.invoke(history)
    second = chat.invoke([*history, first, HumanMessage("Go on")])
    cached = second.usage_metadata["input_token_details"]["cache_read"]
    assert cached >= (first.usage_metadata["input_tokens"] - 16) // 16 * 16 > 0


def test_usage_callbacks_count_per_model(chat: ChatPaged) -> None:
    counter = UsageMetadataCallbackHandler()
    chat.batch(["a", "b"], {"callbacks": [counter]})
    list(chat.stream("c", {"callbacks": [counter]}))
    assert counter.usage_metadata["tiny"]["output_tokens"] == 3 * 12


# Arguments


SAMPLING_ARGUMENTS = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 7,
    "max_tokens": 3,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "min_tokens": 2,
}


@pytest.mark.parametrize("how", ["constructor", "call", "bind", "configurable"])
def test_sampling_arguments_reach_the_engine(service: ScriptedService, how: str) -> None:
    for cls in (ChatPaged, PagedLLM):
        if how == "constructor":
            cls.from_engine(service, **SAMPLING_ARGUMENTS).invoke("x")
        elif how == "call":
            cls.from_engine(service).invoke("x", **SAMPLING_ARGUMENTS)
        elif how == "bind":
            cls.from_engine(service).bind(**SAMPLING_ARGUMENTS).invoke("x")
        else:
            fields = {name: ConfigurableField(id=name) for name in SAMPLING_ARGUMENTS}
            configurable = cls.from_engine(service).configurable_fields(**fields)
            configurable.invoke("x", {"configurable": SAMPLING_ARGUMENTS})
        params = service.params[-1]
        assert {name: getattr(params, name) for name in SAMPLING_ARGUMENTS} == SAMPLING_ARGUMENTS


def test_scheduling_arguments_reach_the_policy() -> None:
    seen = []

    class Listener:
        from paged_backend import hookimpl

        @hookimpl
        def request_added(self, request: Any) -> None:
            seen.append((request.priority, request.client_id, request.deadline is not None))

    service = scripted_service(lambda prompt, params: None, plugins=[Listener()])
    options = {"priority": 3, "client_id": "a", "deadline_s": 60.0}
    ChatPaged.from_engine(service, max_tokens=2, **options).invoke("x")
    PagedLLM.from_engine(service, max_tokens=2).invoke("x", **options)
    PagedLLM.from_engine(service, max_tokens=2).invoke("x")
    assert seen == [(3, "a", True), (3, "a", True), (0, None, False)]
    service.close()
    service.engine.close()


def test_a_value_that_cannot_be_used_is_an_invalid_request_and_a_value_error(model: Model) -> None:
    with pytest.raises(ModelInvalidRequestError, match="top_p") as caught:
        model.invoke("x", top_p=2.0)
    assert isinstance(caught.value, (ValueError, RequestRefused))


def test_the_name_of_the_field_model_may_be_model_name(service: ScriptedService) -> None:
    assert ChatPaged(model_name="x", engine=service).model == "x"


# Errors


def test_a_prompt_that_is_too_long_is_a_context_overflow(model: Model) -> None:
    with pytest.raises(ContextOverflowError, match="4096"):
        model.invoke("x" * 5000)


def test_no_messages_and_no_text_are_invalid_requests(chat: ChatPaged, llm: PagedLLM) -> None:
    with pytest.raises(ModelInvalidRequestError):
        chat.invoke([])
    with pytest.raises(ModelInvalidRequestError):
        llm.invoke("")


def test_a_full_queue_is_a_rate_limit_and_may_be_tried_again() -> None:
    service = scripted_service(lambda prompt, params: None, max_waiting=1, max_num_seqs=1)
    chat = ChatPaged.from_engine(service, max_tokens=400, ignore_eos=True)
    service.pause()
    waiting = service.submit([5], {"max_tokens": 1})
    with pytest.raises(ModelRateLimitError) as caught:
        chat.invoke("x")
    assert caught.value.is_retryable
    service.resume()
    waiting.result()
    service.close()
    service.engine.close()


def test_a_timeout_is_a_model_timeout_error_and_frees_the_memory(model: Model) -> None:
    with pytest.raises(ModelTimeoutError) as caught:
        model.invoke("x", timeout=0.05, max_tokens=3000)
    assert isinstance(caught.value, TimeoutError)


def test_a_timeout_in_a_stream_comes_after_the_text_so_far(chat: ChatPaged) -> None:
    errors = []

    class Handler(BaseCallbackHandler):
        def on_llm_error(self, error: BaseException, **kwargs: Any) -> None:
            errors.append((error, kwargs["response"].generations[0][0].text))

    pieces = []
    stream = chat.stream("x", {"callbacks": [Handler()]}, timeout=0.3, max_tokens=3000)
    with pytest.raises(ModelTimeoutError):
        pieces.extend(chunk.text for chunk in stream)
    ((error, partial),) = errors
    assert isinstance(error, ModelTimeoutError)
    assert partial == "".join(pieces) != ""


def test_a_request_whose_processor_raises_fails_alone(service: ScriptedService, chat: ChatPaged) -> None:
    broken = ChatPaged.from_engine(service, logits_processors=[Raises(0, at=0)], max_tokens=4)
    with pytest.raises(ModelAPIError, match="mine") as caught:
        broken.invoke("x")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(ModelAPIError, match="mine"):
        list(broken.stream("x"))
    assert chat.invoke("x").text


def test_a_model_that_is_not_there_is_a_not_found_error(tmp_path: Path) -> None:
    chat = ChatPaged(model=str(tmp_path / "nothing"))
    with pytest.raises(ModelNotFoundError, match=r"there is no folder .*nothing'; give a folder .* or a hub id"):
        chat.invoke("x")


def test_a_folder_without_a_model_is_a_not_found_error(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="holds no model"):
        ChatPaged(model=str(tmp_path)).invoke("x")


# Engines


def test_constructing_loads_nothing_and_equal_models_share_one_engine(folder: str) -> None:
    chat = ChatPaged(model=folder, max_tokens=3)
    llm = PagedLLM(model=folder, temperature=1.0, max_tokens=3)
    other = PagedLLM(model=folder, engine_kwargs={"block_size": 32})
    assert not chat.engine.is_loaded
    chat.invoke("x")
    llm.invoke("x")
    assert chat.engine is llm.engine
    assert other.engine is not chat.engine
    assert not other.engine.is_loaded


def test_concurrent_first_calls_load_once(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = []
    real = engines.load_service
    monkeypatch.setattr(engines, "load_service", lambda *args: (loads.append(args), real(*args))[1])
    chat = ChatPaged(model=folder, max_tokens=2, engine_kwargs={"max_num_seqs": 7})
    with ThreadPoolExecutor(6) as pool:
        assert len(set(pool.map(lambda _: chat.invoke("x").text, range(6)))) == 1
    assert len(loads) == 1


def test_an_engine_is_run_by_one_thread_for_all_models_over_it() -> None:
    tokenizer = byte_tokenizer()
    with Engine(make_tiny("llama", vocab_size=len(tokenizer)), tokenizer, kv_cache_memory="1MiB") as engine:
        chat, llm = ChatPaged.from_engine(engine, max_tokens=3), PagedLLM.from_engine(engine, max_tokens=3)
        assert chat.engine is llm.engine
        assert chat.invoke("x").usage_metadata
        assert llm.invoke("x")
        del chat, llm
        assert not engine.is_closed
        assert engine.generate("x", {"max_tokens": 2})[0].finished


def test_a_configured_call_keeps_the_engine(service: ScriptedService, chat: ChatPaged) -> None:
    configurable = chat.configurable_fields(max_tokens=ConfigurableField(id="max_tokens"))
    message = configurable.invoke("x", {"configurable": {"max_tokens": 4}})
    assert message.usage_metadata["output_tokens"] == 4
    assert len(service.params) == 1


def test_models_are_copied_deeply_and_traced_without_their_engine(model: Model) -> None:
    duplicate = copy.deepcopy(model)
    assert duplicate.engine is model.engine
    assert text_of(duplicate.invoke("x")) == text_of(model.invoke("x"))
    assert model.model_copy(deep=True).engine is model.engine
    assert "engine" not in dumpd(model)["repr"].lower().replace("engine_kwargs", "")


def test_pickling_says_what_to_do_instead(model: Model) -> None:
    with pytest.raises(TypeError, match="stays in its process"):
        pickle.dumps(model)


def test_a_folder_loads_without_a_network(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    chat = ChatPaged(model=folder, max_tokens=2, engine_kwargs={"max_num_seqs": 5})
    assert chat.invoke("x").usage_metadata


def test_importing_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\nimport paged_backend.integrations.langchain as l\n"
        "l.ChatPaged(model='x', temperature=0.5); l.PagedLLM(model='x')\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_profile_is_read_off_the_folder_without_loading(folder: str) -> None:
    chat = ChatPaged(model=folder)
    assert chat.profile["max_input_tokens"] == 2048
    assert chat.profile["tool_calling"] is False
    assert chat.profile["structured_output"] is True
    assert not chat.engine.is_loaded


def test_a_profile_of_an_engine_knows_its_limits(chat: ChatPaged) -> None:
    assert chat.profile["max_input_tokens"] == 4096
    assert chat.profile["tool_calling"] is True


# Caches


def test_answers_are_cached_by_what_changes_them_only(service: ScriptedService, model: Model) -> None:
    set_llm_cache(InMemoryCache())

    def calls(**kwargs: Any) -> int:
        before = len(service.prompts)
        model.invoke("x", **kwargs)
        return len(service.prompts) - before

    assert calls(temperature=0.5, seed=1) == 1
    assert calls(temperature=0.5, seed=1) == 0
    assert calls(temperature=0.9, seed=1) == 1
    assert calls(temperature=0.5, seed=1, priority=5, deadline_s=9.0, timeout=60, client_id="b") == 0
    assert calls(temperature=0.5, seed=1, stop=["y"]) == 1
    assert calls(temperature=0.5, seed=1, max_tokens=11) == 1


def test_what_processors_do_is_not_cached(service: ScriptedService) -> None:
    set_llm_cache(InMemoryCache())
    model = PagedLLM.from_engine(service, max_tokens=3, logits_processors=[lambda input_ids, scores: scores])
    model.invoke("x")
    model.invoke("x")
    assert len(service.prompts) == 2


def test_two_engines_share_no_cached_answers(service: ScriptedService) -> None:
    set_llm_cache(InMemoryCache())
    other = scripted_service(lambda prompt, params: "other")
    for cls in (ChatPaged, PagedLLM):
        cls.from_engine(service, model="same", max_tokens=5).invoke("x")
        assert text_of(cls.from_engine(other, model="same", max_tokens=5).invoke("x")) == "other"
    other.close()
    other.engine.close()


# Concurrency


def test_concurrent_calls_share_the_batch_and_answer_as_alone(model: Model, seen: Any) -> None:
    prompts = [f"question {number}" for number in range(16)]
    alone = [text_of(model.invoke(prompt)) for prompt in prompts]

    async def all_at_once() -> list[str]:
        return [text_of(answer) for answer in await asyncio.gather(*map(model.ainvoke, prompts))]

    seen.reset()
    assert asyncio.run(all_at_once()) == alone
    assert seen.peak > 1


def test_threads_may_invoke_stream_and_count_at_once(chat: ChatPaged) -> None:
    expected = chat.invoke("hello").text
    barrier = threading.Barrier(8)

    def work(number: int) -> str:
        barrier.wait()
        for _ in range(3):
            chat.get_num_tokens("some text " * number)
            chat.get_num_tokens_from_messages([HumanMessage("hello")])
        return streamed(chat, "hello").text if number % 2 else chat.invoke("hello").text

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(work, range(8))) == {expected}


def test_a_stream_begins_while_its_request_runs(service: ScriptedService, model: Model) -> None:
    stream = model.stream("x", max_tokens=500)
    next(stream)
    assert service.num_unfinished == 1
    assert sum(1 for _ in stream) >= 2
    assert service.num_unfinished == 0


def test_tool_messages_and_answers_without_tools_are_rendered(service: ScriptedService, chat: ChatPaged) -> None:
    call = {"name": "add", "args": {"a": 1}, "id": "1"}
    chat.invoke([HumanMessage("go"), AIMessage("", tool_calls=[call]), ToolMessage("2", tool_call_id="1")])
    expected = (
        'user: go\nassistant: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\nresult: 2\nassistant: '
    )
    assert service.prompts[-1] == expected


def test_a_chain_from_prompt_to_chat_streams(chat: ChatPaged) -> None:
    chain = ChatPromptTemplate.from_messages([("system", "Be {how}."), ("user", "{question}")]) | chat
    chunks = list(chain.stream({"how": "brief", "question": "Why?"}))
    assert "".join(chunk.text for chunk in chunks) == chat.invoke([("system", "Be brief."), ("user", "Why?")]).text

"""Batches: every input in the running batch, each with its own error and callbacks, never more than asked for."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any
from uuid import UUID

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage
from langchain_core.tracers._streaming import _StreamingCallbackHandler
from scripted_engine import ScriptedService
from service_checks import wait_until

from paged_backend.integrations.langchain import ChatPaged, PagedLLM

Model = ChatPaged | PagedLLM
TOO_LONG = "x" * 5000


@pytest.fixture(params=["chat", "llm"])
def model(request: pytest.FixtureRequest) -> Model:
    return request.getfixturevalue(request.param)


def write_asked_length(prompt: str, params: Any) -> str:
    (length,) = re.findall(r"take (\d+)", prompt)
    return "y" * int(length)


def texts(results: Any) -> list[Any]:
    return [result if isinstance(result, (str, Exception)) else result.text for result in results]


def test_a_batch_of_many_runs_together(model: Model, seen: Any) -> None:
    prompts = [f"prompt {number}" for number in range(64)]
    results = texts(model.batch(prompts))
    assert seen.peak > 6
    assert seen.steps < 64 * 12 / 4
    assert results[::16] == [texts([model.invoke(prompt)])[0] for prompt in prompts[::16]]


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
@pytest.mark.parametrize("include_raw", [False, True])
def test_a_batch_of_structured_answers_runs_together(
    service: ScriptedService, seen: Any, include_raw: bool, method: Any
) -> None:
    def write(prompt: str, params: Any) -> str:
        answer = {"number": int(re.findall(r"number (\d+)", prompt)[-1])}
        return json.dumps({"name": "Answer", "arguments": answer} if method == "function_calling" else answer)

    service.writer = write
    schema = {"title": "Answer", "type": "object", "properties": {"number": {"type": "integer"}}, "description": "x"}
    chain = ChatPaged.from_engine(service, max_tokens=99).with_structured_output(
        schema, method=method, include_raw=include_raw
    )
    prompts = [f"number {number}" for number in range(30)]
    results = chain.batch(prompts)
    assert [result["parsed"] if include_raw else result for result in results] == [{"number": n} for n in range(30)]
    assert seen.peak == 30
    if include_raw:
        assert all(result["raw"].usage_metadata and result["parsing_error"] is None for result in results)
    seen.reset()
    assert asyncio.run(chain.abatch(prompts)) is not None
    assert seen.peak == 30


def test_an_async_batch_runs_together(model: Model, seen: Any) -> None:
    prompts = [f"prompt {number}" for number in range(24)]
    assert len(asyncio.run(model.abatch(prompts))) == 24
    assert seen.peak > 6


@pytest.mark.parametrize("is_async", [False, True])
def test_max_concurrency_is_a_sliding_window(service: ScriptedService, model: Model, seen: Any, is_async: bool) -> None:
    """Seven inputs, of which the first takes as long as all others: with chunks of two they could not run beside it."""
    lengths = [60, 10, 10, 10, 10, 10, 10]
    service.writer = write_asked_length
    prompts = [f"take {length} tokens" for length in lengths]
    model = model.model_copy(update={"max_tokens": 100, "ignore_eos": False})
    config: Any = {"max_concurrency": 2}
    results = asyncio.run(model.abatch(prompts, config)) if is_async else model.batch(prompts, config)
    assert [len(text) for text in texts(results)] == lengths
    assert seen.peak == 2
    assert seen.steps < 60 + 5 * 10


@pytest.mark.parametrize("is_async", [False, True])
def test_each_input_has_its_own_error(model: Model, is_async: bool) -> None:
    prompts = ["one", TOO_LONG, "two"]
    if is_async:
        results = asyncio.run(model.abatch(prompts, return_exceptions=True))
    else:
        results = model.batch(prompts, return_exceptions=True)
    assert isinstance(results[1], ContextOverflowError)
    assert texts([results[0], results[2]]) == texts([model.invoke("one"), model.invoke("two")])


@pytest.mark.parametrize("is_async", [False, True])
def test_a_batch_that_fails_ends_the_rest_of_it(service: ScriptedService, model: Model, is_async: bool) -> None:
    long = model.model_copy(update={"max_tokens": 3000})
    prompts = ["one", TOO_LONG, "two"]
    with pytest.raises(ContextOverflowError):
        asyncio.run(long.abatch(prompts)) if is_async else long.batch(prompts)
    wait_until(lambda: service.num_unfinished == 0)
    assert service.engine.stats().num_steps < 3000


def test_results_come_as_they_complete(service: ScriptedService, model: Model) -> None:
    service.writer = write_asked_length
    model = model.model_copy(update={"max_tokens": 200, "ignore_eos": False})
    prompts = ["take 150", "take 3", "take 60"]
    assert [index for index, _ in model.batch_as_completed(prompts)] == [1, 2, 0]

    async def indexes() -> list[int]:
        return [index async for index, _ in model.abatch_as_completed(prompts)]

    assert asyncio.run(indexes()) == [1, 2, 0]


def test_breaking_out_of_the_results_ends_the_rest(service: ScriptedService, model: Model) -> None:
    service.writer = write_asked_length
    model = model.model_copy(update={"max_tokens": 3500, "ignore_eos": False})
    for index, _ in model.batch_as_completed(["take 3000", "take 3"]):
        assert index == 1
        break
    wait_until(lambda: service.num_unfinished == 0)


def test_an_empty_batch_is_empty(model: Model) -> None:
    assert model.batch([]) == []
    assert asyncio.run(model.abatch([])) == []
    assert list(model.batch_as_completed([])) == []


def test_several_conversations_of_one_generate_call_run_together(chat: ChatPaged, seen: Any) -> None:
    result = chat.generate([[HumanMessage(f"question {number}")] for number in range(8)])
    assert len(result.generations) == len(result.run) == 8
    assert seen.peak > 1
    assert result.llm_output["token_usage"]["completion_tokens"] == 8 * 12


class Tokens(BaseCallbackHandler, _StreamingCallbackHandler):
    """Collects the tokens of each run."""

    def __init__(self) -> None:
        self.by_run: dict[UUID, str] = {}
        self.prompts: dict[UUID, str] = {}

    def tap_output_iter(self, run_id: UUID, output: Any) -> Any:
        return output

    def tap_output_aiter(self, run_id: UUID, output: Any) -> Any:
        return output

    def on_llm_start(self, serialized: Any, prompts: list[str], *, run_id: UUID, **kwargs: Any) -> None:
        (self.prompts[run_id],) = prompts

    def on_llm_new_token(self, token: str, *, run_id: UUID, **kwargs: Any) -> None:
        self.by_run[run_id] = self.by_run.get(run_id, "") + token


@pytest.mark.parametrize("is_async", [False, True])
def test_tokens_of_a_batch_of_texts_go_to_the_callbacks_of_their_own_prompt(llm: PagedLLM, is_async: bool) -> None:
    tokens, prompts = Tokens(), ["one", "two", "three"]
    config: Any = {"callbacks": [tokens]}
    results = asyncio.run(llm.abatch(prompts, config)) if is_async else llm.batch(prompts, config)
    by_prompt = {tokens.prompts[run]: text for run, text in tokens.by_run.items()}
    assert by_prompt == dict(zip(prompts, results, strict=True))

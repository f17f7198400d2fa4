"""PagedLLM: what a prompt's generation tells, when tokens go to callbacks, and which calls share a cached answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.exceptions import ContextOverflowError, ModelAPIError
from scripted_engine import ScriptedService
from service_checks import wait_until

from paged_backend import __version__
from paged_backend.integrations.langchain import PagedLLM

TOO_LONG = "x" * 5000


class Tokens(BaseCallbackHandler):
    """Keeps the tokens it is told of."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
        self.told.append(token)


@pytest.fixture
def tokens() -> Tokens:
    return Tokens()


def test_a_prompt_has_as_many_generations_as_samples_and_one_usage(llm: PagedLLM) -> None:
    result = llm.generate(["one", "three more"], n=2, temperature=1.0)
    assert [len(generations) for generations in result.generations] == [2, 2]
    first, second = result.generations[1]
    assert first.generation_info["token_usage"] == second.generation_info["token_usage"]
    assert first.generation_info["token_usage"]["completion_tokens"] == 2 * 12
    assert result.llm_output["token_usage"]["prompt_tokens"] == 3 + 10
    assert result.llm_output["model_name"] == "tiny"


def test_tokens_go_to_callbacks_where_streaming_is_asked_for(
    service: ScriptedService, llm: PagedLLM, tokens: Tokens
) -> None:
    quiet = llm.invoke("Hello", {"callbacks": [tokens]})
    assert not tokens.told
    assert llm.invoke("Hello", {"callbacks": [tokens]}, stream=True) == quiet
    assert "".join(tokens.told) == quiet
    tokens.told.clear()
    streaming = llm.model_copy(update={"streaming": True})
    assert asyncio.run(streaming.ainvoke("Hello", {"callbacks": [tokens]})) == quiet
    assert "".join(tokens.told) == quiet


def test_several_samples_are_not_streamed(llm: PagedLLM, tokens: Tokens) -> None:
    streaming = llm.model_copy(update={"streaming": True})
    result = streaming.generate(["Hello"], n=2, temperature=1.0, callbacks=[tokens])
    assert len(result.generations[0]) == 2
    assert not tokens.told


def test_a_streamed_generation_tells_what_a_whole_one_does(llm: PagedLLM, tokens: Tokens) -> None:
    whole = llm.generate(["Hello"])
    streamed = llm.model_copy(update={"streaming": True}).generate(["Hello"], callbacks=[tokens])
    assert tokens.told
    (one,), (other,) = whole.generations[0], streamed.generations[0]
    assert one.text == other.text
    for name in ("finish_reason", "model_name"):
        assert one.generation_info[name] == other.generation_info[name]
    for usage in (streamed.llm_output["token_usage"], other.generation_info["token_usage"]):
        assert usage["completion_tokens"] == whole.llm_output["token_usage"]["completion_tokens"] == 12
    assert streamed.llm_output["model_name"] == "tiny"


def test_only_the_last_piece_of_a_stream_tells_how_it_ended(service: ScriptedService) -> None:
    service.writer = lambda prompt, params: "Hello there"
    *pieces, last = PagedLLM.from_engine(service, model="tiny", max_tokens=40)._stream("x")
    assert pieces
    assert all(piece.generation_info is None for piece in pieces)
    assert last.generation_info["finish_reason"] == "stop"
    assert "".join(piece.text for piece in [*pieces, last]) == "Hello there"


@pytest.mark.parametrize("is_async", [False, True])
def test_a_prompt_that_fails_ends_the_others_of_its_call(service: ScriptedService, is_async: bool) -> None:
    prompts = ["short", "a longer prompt"]

    def fail(input_ids: Any, scores: Any) -> Any:
        if input_ids.shape[1] == len("short"):
            raise ZeroDivisionError("mine")
        return scores

    llm = PagedLLM.from_engine(service, model="tiny", max_tokens=1000, ignore_eos=True, logits_processors=[fail])
    before = service.engine.stats().num_steps
    # Kept, the error keeps the requests of its frames, which end by themselves once nobody has them.
    with pytest.raises(ModelAPIError, match="mine") as failure:
        asyncio.run(llm.agenerate(prompts)) if is_async else llm.generate(prompts)
    wait_until(lambda: service.num_unfinished == 0)
    assert service.engine.stats().num_steps < before + 1000
    assert failure.tb is not None


def test_a_prompt_that_does_not_fit_is_an_overflow(llm: PagedLLM) -> None:
    with pytest.raises(ContextOverflowError):
        llm.generate([TOO_LONG])


def test_ids_are_those_of_a_prompt(service: ScriptedService, llm: PagedLLM) -> None:
    assert llm.get_token_ids("Hello") == service.engine.tokenizer("Hello")["input_ids"]
    assert llm.get_num_tokens("Hello") == 5


# Without an engine


def key(llm: PagedLLM, **kwargs: Any) -> str:
    return repr(sorted(llm.model_copy(update=kwargs)._identifying_params.items()))


@pytest.mark.parametrize(
    "change", [{"temperature": 0.5}, {"max_tokens": 3}, {"stop": ["x"]}, {"model": "y"}, {"engine_kwargs": {"seed": 1}}]
)
def test_what_changes_an_answer_is_part_of_what_it_is_cached_under(change: dict[str, Any]) -> None:
    llm = PagedLLM(model="x")
    assert key(llm, **change) != key(llm)


@pytest.mark.parametrize("change", [{"priority": 5}, {"timeout": 5.0}, {"cache_salt": "s"}, {"streaming": True}])
def test_what_changes_only_when_it_comes_is_not(change: dict[str, Any]) -> None:
    llm = PagedLLM(model="x")
    assert key(llm, **change) == key(llm)


def test_answers_of_processors_are_never_shared() -> None:
    llm = PagedLLM(model="x", logits_processors=[lambda ids, scores: scores])
    assert key(llm) != key(llm)


def test_traces_name_the_provider_the_model_of_the_call_and_the_version() -> None:
    llm = PagedLLM(model="x")
    assert llm._get_ls_params()["ls_provider"] == "paged"
    assert llm._get_ls_params()["ls_model_name"] == "x"
    assert llm._get_ls_params(model="y")["ls_model_name"] == "y"
    assert llm.metadata["lc_versions"]["paged-backend"] == __version__
    assert llm._llm_type == "paged-llm"

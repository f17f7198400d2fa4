"""A batch of columns comes back with an answer for every row, whatever is wrong with some of them."""

from __future__ import annotations

import math
import pickle
import re
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import paged_backend.integrations.ray as ray_integration
from paged_backend import Engine, SamplingParams
from paged_backend.errors import ConfigError, EngineClosed, NotPicklable, RequestRefused
from paged_backend.integrations.ray.cells import objects
from paged_backend.integrations.ray.predictor import PagedPredictor

CHAT = np.array([{"role": "user", "content": "hi", "name": None}], dtype=object)


def ask(predictor: PagedPredictor, prompts: list[Any], **columns: list[Any]) -> dict[str, Any]:
    given = {"prompt": prompts, "params": [None] * len(prompts), **columns}
    return predictor({name: objects(values) for name, values in given.items()})


def stock_tokens(folder: str, ids: list[int], count: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs = torch.tensor([ids])
    tokens = model.generate(inputs, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    return tokens[0, len(ids) :].tolist()


def test_texts_ids_and_chats_get_the_tokens_of_stock_generate(folder: str, predictor: PagedPredictor) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer("hello")["input_ids"], [5, 6, 7], tokenizer("user: hi\nassistant:")["input_ids"]]
    found = ask(predictor, ["hello", np.array([5, 6, 7]), None], messages=[None, None, CHAT])
    assert list(found["token_ids"]) == [stock_tokens(folder, one, 4) for one in ids]
    assert list(found["text"]) == [tokenizer.decode(tokens) for tokens in found["token_ids"]]
    assert list(found["finish_reason"]) == ["length"] * 3
    assert list(found["num_prompt_tokens"]) == [len(one) for one in ids]
    assert list(found["num_output_tokens"]) == [4] * 3
    assert (found["time_to_first_token_s"] > 0).all()
    assert list(found["error"]) == [""] * 3


def test_the_rows_own_columns_come_back_in_their_order(predictor: PagedPredictor) -> None:
    found = ask(predictor, ["a", "b"], id=[7, 3])
    assert list(found["id"]) == [7, 3]
    assert list(found["prompt"]) == ["a", "b"]
    assert list(found["token_ids"]) == [list(ask(predictor, [text])["token_ids"][0]) for text in "ab"]


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("", "RequestRefused: the prompt is empty"),
        (None, "RequestRefused: the row has nothing in prompt"),
        (math.nan, "RequestRefused: the row has nothing in prompt"),
        (3, "RequestRefused: .*got 3"),
        (b"bytes", "RequestRefused: .*b'bytes'; decode it"),
        ({"a": 1}, "RequestRefused: .*got a dict"),
        ([1, 10**6], "RequestRefused: token id 1000000 is outside"),
        (np.array([1.5, 2.0]), "RequestRefused: "),
        ("x" * 300, "ContextOverflow: a prompt of 300 tokens"),
        ("\ud800", "RequestRefused: .*surrogate"),
    ],
)
def test_a_bad_row_says_why_and_the_others_are_answered(predictor: PagedPredictor, prompt: Any, error: str) -> None:
    found = ask(predictor, ["hello", prompt, "there"])
    assert re.match(error, found["error"][1])
    assert found["finish_reason"][1] == "error"
    assert found["token_ids"][1] == []
    assert found["text"][1] == ""
    assert math.isnan(found["time_to_first_token_s"][1])
    assert list(found["finish_reason"][[0, 2]]) == ["length"] * 2


def test_a_row_with_a_prompt_and_a_chat_is_refused(predictor: PagedPredictor) -> None:
    found = ask(predictor, ["hello"], messages=[CHAT])
    assert "both messages and prompt" in found["error"][0]


def test_a_request_that_fails_while_it_runs_fails_alone(predictor: PagedPredictor) -> None:
    def fail(input_ids: Any, scores: Any) -> Any:
        raise ValueError("no such day")

    found = ask(predictor, ["a", "b"], params=[{"logits_processors": [fail]}, None])
    assert "no such day" in found["error"][0]
    assert list(found["finish_reason"]) == ["error", "length"]


def test_a_rows_parameters_replace_single_fields(predictor: PagedPredictor) -> None:
    found = ask(predictor, ["a", "a", "a"], params=[{"max_tokens": 2.0, "seed": None}, None, math.nan])
    assert list(found["num_output_tokens"]) == [2, 4, 4]


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ({"max_tokens": -1}, "max_tokens must be"),
        ({"max_token": 3}, "unknown sampling parameter 'max_token'"),
        ("greedy", "are a mapping"),
        ({"n": 2}, "n=2"),
        ({"logprobs": 1}, "logprobs=1"),
    ],
)
def test_parameters_that_cannot_be_used_fail_their_row_alone(
    predictor: PagedPredictor, params: Any, error: str
) -> None:
    found = ask(predictor, ["a", "b"], params=[params, None])
    assert error in found["error"][0]
    assert list(found["finish_reason"]) == ["error", "length"]


def test_without_max_tokens_an_answer_has_as_many_as_fit(folder: str) -> None:
    with PagedPredictor(folder, {"ignore_eos": True}) as predictor:
        found = predictor({"prompt": np.array(["x" * 250])})
        assert list(found["num_output_tokens"]) == [6]


def test_an_answer_in_a_chat_ends_where_the_template_ends_one(folder: str) -> None:
    template = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<s>{% endif %}{% endfor %}"
    end = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("<s>")
    params = {"logit_bias": {end: 1000.0}, "max_tokens": 5}
    with PagedPredictor(folder, params, chat_template=template) as predictor:
        found = predictor({"messages": objects([CHAT, None]), "prompt": objects([None, "hi"])})
    assert list(found["finish_reason"]) == ["stop", "length"]


def test_a_batch_without_rows_has_the_result_columns(predictor: PagedPredictor) -> None:
    found = predictor({})
    assert found.keys() == ask(predictor, ["a"]).keys() - {"prompt", "params"}
    assert {len(column) for column in found.values()} == {0}


def test_a_column_without_prompts_comes_back_as_none_whatever_ray_made_of_it(predictor: PagedPredictor) -> None:
    found = predictor({"prompt": np.array(["a"]), "params": np.array([math.nan]), "messages": np.array([math.nan])})
    assert list(found["error"]) == [""]
    assert found["messages"].tolist() == found["params"].tolist() == [None]
    assert found["prompt"].tolist() == ["a"]


def test_chats_come_back_as_lists_which_arrow_need_not_pickle(predictor: PagedPredictor) -> None:
    found = ask(predictor, [None], messages=[CHAT])
    assert found["messages"][0] == [{"role": "user", "content": "hi"}]


def test_columns_have_one_type_whether_rows_fail_or_not(predictor: PagedPredictor) -> None:
    good, bad = ask(predictor, ["a"]), ask(predictor, [""])
    for name in good.keys() - {"prompt", "params"}:
        assert good[name].dtype == bad[name].dtype
        assert type(good[name][0]) is type(bad[name][0])


def test_more_rows_than_run_at_once_wait_and_none_is_lost(folder: str) -> None:
    with PagedPredictor(folder, {"max_tokens": 2}, max_num_seqs=2, kv_cache_memory="256KiB") as predictor:
        found = predictor({"prompt": np.array([f"row {index}" for index in range(20)])})
        assert set(found["error"]) == {""}
        assert predictor._service.num_unfinished == 0


def test_threads_share_one_engine(predictor: PagedPredictor) -> None:
    alone = [ask(predictor, [text] * 3)["token_ids"][0] for text in "abcd"]
    found: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda i=i, text=text: found.update({i: ask(predictor, [text] * 3)}))
        for i, text in enumerate("abcd")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[index]["token_ids"][0] for index in range(4)] == alone


@pytest.mark.parametrize("times", [1, 2])
def test_rows_lost_with_a_step_are_tried_once_more(folder: str, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    with PagedPredictor(folder, {"max_tokens": 2}) as predictor:
        steps, left = Engine._step, [times]

        def failing(engine: Engine, drain: bool) -> Any:
            if left[0]:
                left[0] -= 1
                raise MemoryError("no room")
            return steps(engine, drain)

        monkeypatch.setattr(Engine, "_step", failing)
        found = predictor({"prompt": np.array(["a", "b"])})
        assert (set(found["error"]) == {""}) is (times == 1)
        assert times == 1 or all("EngineFailed" in error for error in found["error"])
        assert list(predictor({"prompt": np.array(["a"])})["error"]) == [""]


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        ({"question": np.array(["a"])}, "the columns are question; prompt_column='prompt'"),
        ({"prompt": np.array(["a"])}, "params_column='params'"),
        ({"prompt": np.array(["a"]), "params": np.array([None]), "text": np.array(["b"])}, "'text'.*output_prefix"),
        ([{"prompt": "a"}], 'a list.*batch_format="numpy"'),
    ],
)
def test_columns_that_do_not_fit_are_named(predictor: PagedPredictor, batch: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        predictor(batch)


def test_a_prefix_keeps_the_datasets_own_columns(folder: str) -> None:
    with PagedPredictor(folder, {"max_tokens": 1}, prompt_column="text", output_prefix="answer_") as predictor:
        found = predictor({"text": np.array(["hello"])})
    assert list(found["text"]) == ["hello"]
    assert list(found["answer_finish_reason"]) == ["length"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"params": {"n": 2}}, "n=2"),
        ({"params": SamplingParams(logprobs=1)}, "logprobs=1"),
        ({"params": {"max_token": 2}}, "max_token"),
        ({"params": "greedy"}, "'greedy'"),
        ({"max_waiting": 3}, "max_waiting=3.*batch_size"),
        ({"chat_template_kwargs": {"tokenize": True}}, "'tokenize'"),
    ],
)
def test_what_no_row_could_have_is_refused_before_the_first(folder: str, arguments: Any, reason: str) -> None:
    with pytest.raises((ConfigError, RequestRefused), match=reason):
        PagedPredictor(folder, **arguments)


def test_a_predictor_that_was_closed_says_so(folder: str) -> None:
    with PagedPredictor(folder) as predictor:
        pass
    with pytest.raises(EngineClosed):
        predictor({"prompt": np.array(["a"])})


def test_pickling_a_predictor_names_the_class_as_the_way_out(predictor: PagedPredictor) -> None:
    with pytest.raises(NotPicklable, match="fn_constructor_kwargs"):
        pickle.dumps(predictor)


def test_a_missing_ray_is_told_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "ray.data", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'paged-backend\[ray\]'"):
        _ = ray_integration.PagedPredictor

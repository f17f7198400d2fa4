"""Texts that go on."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from scripted_engine import ScriptedService
from server_checks import Exchange, events_of, text_body
from service_checks import wait_until

PATH = "/v1/completions"


async def ask(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await client.post(PATH, json=text_body(**fields))
    assert answer.status_code == 200, answer.text
    return answer.json()


async def refused(client: httpx.AsyncClient, **fields: Any) -> tuple[str, str | None]:
    answer = await client.post(PATH, json=text_body(**fields))
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["message"], answer.json()["error"]["param"]


async def texts_of_stream(client: httpx.AsyncClient, **fields: Any) -> dict[int, str]:
    answer = await client.post(PATH, json=text_body(**fields, stream=True))
    texts: dict[int, str] = {}
    for each in events_of(answer.text):
        for choice in each["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


async def test_a_greedy_answer_is_the_engines(client: httpx.AsyncClient, service: ScriptedService):
    output = await service.submit(service.engine.tokenizer("hi")["input_ids"], {"max_tokens": 8})
    answer = await ask(client)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == (output.text, "length", None)
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (2, 8, 10)


async def test_the_same_token_ids_have_the_same_answer(client: httpx.AsyncClient, service: ScriptedService):
    ids = service.engine.tokenizer("hi")["input_ids"]
    texts = [(await ask(client, prompt=prompt))["choices"][0]["text"] for prompt in ("hi", ids, [ids], ["hi"])]
    assert len(set(texts)) == 1


async def test_several_prompts_have_n_choices_each_in_their_order(client: httpx.AsyncClient, service: ScriptedService):
    service.writer = lambda prompt, params: prompt.upper()
    answer = await ask(client, prompt=["ab", "cd"], n=2)
    assert [(each["index"], each["text"]) for each in answer["choices"]] == [(0, "AB"), (1, "AB"), (2, "CD"), (3, "CD")]
    assert answer["usage"]["prompt_tokens"] == 4


@pytest.mark.parametrize("fields", [{}, {"n": 2, "echo": True}, {"prompt": ["ab", "cd"], "n": 2}, {"stop": "y"}])
async def test_a_stream_joins_to_the_whole(client: httpx.AsyncClient, service: ScriptedService, fields: dict[str, Any]):
    service.writer = lambda prompt, params: f"{prompt} says é and y"
    whole = await ask(client, **fields, logprobs=None)
    assert await texts_of_stream(client, **fields) == {each["index"]: each["text"] for each in whole["choices"]}


async def test_the_last_event_tells_the_usage_where_it_is_wanted(client: httpx.AsyncClient):
    answer = await client.post(PATH, json=text_body(stream=True, stream_options={"include_usage": True}))
    *events, last = events_of(answer.text)
    assert [each["usage"] for each in events] == [None] * len(events)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 8)


async def test_echo_puts_the_prompt_first(client: httpx.AsyncClient, service: ScriptedService):
    service.writer = lambda prompt, params: "!"
    ids = service.engine.tokenizer("hi")["input_ids"]
    assert [(await ask(client, prompt=p, echo=True))["choices"][0]["text"] for p in ("hi", ids)] == ["hi!", "hi!"]


async def test_a_stop_text_ends_and_is_left_out(client: httpx.AsyncClient, service: ScriptedService):
    service.writer = lambda prompt, params: "one two three"
    (choice,) = (await ask(client, stop=[" th", "x"], max_tokens=20))["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("one two", "stop")


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_are_lists_side_by_side(client: httpx.AsyncClient, service: ScriptedService, stream: bool):
    service.writer = lambda prompt, params: "abc"
    answer = await client.post(PATH, json=text_body(logprobs=2, max_tokens=3, stream=stream))
    found = [each["choices"][0]["logprobs"] for each in (events_of(answer.text) if stream else [answer.json()])]
    told = {name: [item for each in found for item in each[name]] for name in found[0]}
    assert (told["tokens"], told["text_offset"]) == (["a", "b", "c"], [0, 1, 2])
    assert all(value < 0 for value in told["token_logprobs"])
    assert [len(each) for each in told["top_logprobs"]] == [2, 2, 2]


async def test_no_logprob_is_below_what_json_and_openai_say(client: httpx.AsyncClient, service: ScriptedService):
    token = service.engine.tokenizer("a")["input_ids"][0]
    answer = await ask(client, logprobs=20, logit_bias={str(token): -100}, max_tokens=2)
    assert min(min(each.values()) for each in answer["choices"][0]["logprobs"]["top_logprobs"]) >= -9999


async def test_a_seed_makes_drawn_tokens_come_again(client: httpx.AsyncClient):
    first, again, other = [
        (await ask(client, temperature=1.5, seed=seed, n=2, max_tokens=6))["choices"] for seed in (7, 7, 8)
    ]
    assert first == again != other
    assert first[0]["text"] != first[1]["text"]


async def test_sampling_parameters_reach_the_engine(client: httpx.AsyncClient, service: ScriptedService):
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "seed": 3,
        "top_k": 9,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "min_tokens": 2,
        "ignore_eos": True,
        "max_tokens": 3,
    }
    await ask(client, **given, stop_token_ids=[5], bad_words=["x"], logit_bias={"7": -1.5})
    (params,) = service.params
    assert {name: getattr(params, name) for name in given} == given
    assert (params.stop_token_ids, params.bad_words, params.logit_bias) == ((5,), ("x",), {7: -1.5})


async def test_openais_defaults_draw_as_many_tokens_as_its_api_does(
    client: httpx.AsyncClient, service: ScriptedService
):
    await client.post(PATH, json={"model": "tiny", "prompt": "hi"})
    (params,) = service.params
    assert (params.temperature, params.max_tokens, params.top_p, params.n) == (1.0, 16, 1.0, 1)


async def test_fields_of_openais_service_change_nothing(client: httpx.AsyncClient):
    plain = await ask(client)
    more = await ask(client, user="u", metadata={"a": "b"}, store=True, service_tier="auto", prompt_cache_key="k")
    assert plain["choices"] == more["choices"]


@pytest.mark.parametrize(
    ("fields", "why", "param"),
    [
        ({"suffix": "x"}, "suffix is not served", "suffix"),
        ({"best_of": 3}, "best_of=3 is not served", "best_of"),
        ({"echo": True, "logprobs": 1}, "prompts have no logprobs here", "echo"),
        ({"stream_options": {"include_usage": True}}, "goes with stream: true only", "stream_options"),
        ({"prompt": ["x"] * 600, "n": 2}, "600 prompts with n=2 are more than 1024 choices", "n"),
        ({"prompt": ""}, "the prompt is empty", None),
        ({"prompt": []}, "prompt", "prompt"),
        ({"prompt": [[]]}, "prompt", "prompt"),
        ({"prompt": [99999]}, "token id 99999 is outside the vocabulary", None),
        ({"prompt": "x" * 5000}, "beyond the 4096 positions", None),
        ({"max_tokens": 5000}, "beyond the 4096 positions", None),
        ({"max_tokens": 0}, "max_tokens: input should be greater than or equal to 1, got 0", "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens: input should be a valid integer", "max_tokens"),
        ({"temperature": -0.1}, "temperature: input should be greater than or equal to 0", "temperature"),
        ({"temperature": True}, "temperature: input should be a valid number", "temperature"),
        ({"n": 1000}, "n: input should be less than or equal to 128", "n"),
        ({"stop": ["x"] * 10000}, "stop: list should have at most 64 items", "stop"),
        ({"stop": ""}, "stop: ", "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias must map token ids to numbers", "logit_bias"),
        ({"logit_bias": {"7": 101}}, "logit_bias.7: input should be less than or equal to 100", "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias names token 99999", None),
        ({"logprobs": 21}, "logprobs: input should be less than or equal to 20", "logprobs"),
        ({"deadline_s": -1}, "deadline_s: input should be greater than 0", "deadline_s"),
        ({"top_q": 1}, "unknown argument 'top_q'", "top_q"),
        ({"regex": "("}, "regex='(' cannot be followed", None),
        ({"min_tokens": 9}, "min_tokens=9 is above max_tokens=8", None),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(
    client: httpx.AsyncClient, fields: dict[str, Any], why: str, param: str | None
):
    message, named = await refused(client, **fields)
    assert why in message
    assert named == param


async def test_another_model_is_not_found(client: httpx.AsyncClient):
    answer = await client.post(PATH, json=text_body(model="gpt-9"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert "the model is called 'tiny'" in answer.json()["error"]["message"]


async def test_where_one_prompt_of_several_is_refused_none_is_answered(
    client: httpx.AsyncClient, service: ScriptedService
):
    assert "outside the vocabulary" in (await refused(client, prompt=[[5, 6], [99999]], max_tokens=3000))[0]
    wait_until(lambda: service.num_unfinished == 0)


async def test_a_request_that_is_not_done_in_time_says_so(client: httpx.AsyncClient, service: ScriptedService):
    for stream in (False, True):
        service.pause()
        task = asyncio.ensure_future(client.post(PATH, json=text_body(queue_timeout_s=0.01, stream=stream)))
        answer = await task
        service.resume()
        assert (answer.status_code, answer.json()["error"]["code"]) == (408, "timeout")
        assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["hi", ["hi", "ho"]])
async def test_a_client_that_goes_away_takes_its_requests_along(
    app: Any, service: ScriptedService, stream: bool, prompt: Any
):
    exchange = Exchange(app, PATH, text_body(prompt=prompt, max_tokens=4000, ignore_eos=True, stream=stream))
    if stream:
        await exchange.has_news.wait()
    else:
        await asyncio.to_thread(wait_until, lambda: service.num_unfinished > 0)
    exchange.go_away()
    await exchange.task
    await asyncio.to_thread(wait_until, lambda: service.num_unfinished == 0)
    assert exchange.status != 200 or (stream and not exchange.answer.endswith(b"[DONE]\n\n"))

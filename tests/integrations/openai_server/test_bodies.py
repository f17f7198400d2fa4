"""What a body may hold."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from server_checks import chat_body, text_body

from paged_backend.integrations.openai_server.bodies import ChatBody, CompletionBody, SamplingBody
from paged_backend.request.options import RequestOptions
from paged_backend.sampling_params import SamplingParams

# Python objects, which no body can hold, what a server decides by itself, and what OpenAI calls otherwise.
NOT_IN_BODIES = {
    *("stop_condition", "metadata", "lockstep", "prompt_embeds", "request_id"),
    *("logits_processors", "logprobs_mode", "json_schema", "shown_special_tokens", "max_tokens", "logprobs"),
}


def test_all_that_a_request_may_say_can_be_said_in_a_body():
    known = {*SamplingParams.__dataclass_fields__, *RequestOptions.__annotations__}
    assert known - NOT_IN_BODIES <= SamplingBody.model_fields.keys()


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": float("nan")},
        {"top_p": float("inf")},
        {"deadline_s": float("inf")},
        {"seed": 2**70},
        {"seed": 1.0},
        {"stream": "true"},
        {"n": True},
        {"model": None},
        {"prompt": {"text": "x"}},
        {"prompt": [1, "x"]},
        {"stop": [1]},
        {"client_id": "x" * 300},
        {"logit_bias": {str(token): 1 for token in range(2000)}},
    ],
)
def test_no_value_becomes_another(fields: dict[str, Any]):
    with pytest.raises(ValidationError):
        CompletionBody(**text_body(**fields))


def test_nothing_given_is_as_good_as_left_out():
    nothing = dict.fromkeys(set(CompletionBody.model_fields) - {"model", "prompt"})
    assert CompletionBody(**{**nothing, "model": "m", "prompt": "p"}).stop is None


def test_what_clients_send_back_of_answers_is_passed_over():
    answer = {"role": "assistant", "content": "x", "annotations": [], "audio": None, "refusal": None}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}, "index": 0}
    body = ChatBody(**chat_body(messages=[{**answer, "tool_calls": [call]}]))
    assert body.messages[0].content == "x"


def test_the_schema_of_an_answer_comes_out_as_it_went_in():
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    body = ChatBody(**chat_body(response_format=form))
    assert body.response_format is not None
    assert body.response_format.model_dump(exclude_none=True) == form

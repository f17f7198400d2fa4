"""The options of a request stand in one list, from which everything that takes them reads."""

from __future__ import annotations

from dataclasses import fields

import pytest

from paged_backend import SamplingParams
from paged_backend.errors import RequestRefused
from paged_backend.request.options import RequestOptions, request_fields


def test_an_option_that_there_is_not_lists_those_there_are():
    with pytest.raises(RequestRefused, match="unknown request option 'prio'; choose from request_id, priority, dead"):
        request_fields({"prio": 1}, 0.0)


def test_langchain_takes_every_option_and_parameter_but_those_left_out_on_purpose():
    pytest.importorskip("langchain_core")
    from paged_backend.integrations.langchain.paged_model import SAMPLING, SCHEDULING, PagedModel

    # What a chain cannot give, or only a program that counts on one engine would.
    of_programs = {"request_id", "stop_condition", "metadata", "lockstep", "prompt_embeds"}
    options = {"timeout" if name == "timeout_s" else name for name in RequestOptions.__annotations__}
    assert set(SCHEDULING) == options - of_programs
    # Those under LangChain's own names: stop is an argument of its calls, logprobs a flag there.
    elsewhere = {"stop", "include_stop_str_in_output", "logprobs", "logprobs_mode"}
    # Which marks are shown is for the parsers of an answer to say.
    elsewhere |= {"shown_special_tokens"}
    assert set(SAMPLING) == {field.name for field in fields(SamplingParams)} - elsewhere
    assert {*SAMPLING, *SCHEDULING} <= set(PagedModel.model_fields)

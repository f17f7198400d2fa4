"""Constrained decoding: whatever the model's weights say, the output matches what was asked for."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator

import pytest
import torch
from pydantic import BaseModel
from service_checks import Script, assert_idle
from tiny_models import make_tiny
from tiny_tokenizers import byte_tokenizer

from paged_backend import Engine, SamplingParams
from paged_backend.errors import ConfigError, RequestRefused, SamplingFailed

# A random model fills every string and number to its end, so both are bounded.
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    tokenizer = byte_tokenizer()
    # Wider than the tokenizer, as vocabularies padded to a round size are.
    with Engine(
        make_tiny("llama", vocab_size=len(tokenizer) + 13, max_position_embeddings=2048),
        tokenizer,
        kv_cache_memory="4MiB",
    ) as engine:
        yield engine
        assert_idle(engine)


def one(engine: Engine, **params: object) -> tuple[str, str | None]:
    (output,) = engine.generate("Tell me", SamplingParams(max_tokens=80, **params))
    assert output.error is None
    return output.text, output.finish_reason


@pytest.mark.parametrize("seed", range(3))
def test_an_output_is_json_of_the_schema(engine: Engine, seed: int) -> None:
    text, reason = one(engine, json_schema=PERSON, temperature=1.0, seed=seed)
    person = json.loads(text)
    assert reason == "stop"
    assert set(person) == {"name", "age"}
    assert 0 <= person["age"] <= 150
    assert len(person["name"]) <= 6


def test_a_schema_may_be_text_or_a_pydantic_class(engine: Engine) -> None:
    class Answer(BaseModel, extra="forbid"):
        right: bool

    for schema in (Answer, json.dumps(Answer.model_json_schema())):
        assert json.loads(one(engine, json_schema=schema)[0])["right"] in (True, False)


def test_an_output_matches_the_regular_expression(engine: Engine) -> None:
    text, reason = one(engine, regex=r"\d{3}-[a-c]{2}", temperature=1.5, seed=3)
    assert re.fullmatch(r"\d{3}-[a-c]{2}", text)
    assert reason == "stop"


def test_an_output_is_a_sentence_of_the_grammar(engine: Engine) -> None:
    text, _ = one(engine, grammar='start: greeting " " name\ngreeting: "hello" | "hi"\nname: /[a-z]{1,4}/')
    assert re.fullmatch(r"(hello|hi) [a-z]{1,4}", text)


def test_requests_of_one_batch_match_each_their_own(engine: Engine) -> None:
    patterns = ["a{4}", None, "[0-9]{6}", "b+c"]
    params = [SamplingParams(max_tokens=40, regex=p, temperature=1.0, seed=5) for p in patterns]
    together = engine.generate(["Tell me"] * 4, params)
    for pattern, p, output in zip(patterns, params, together, strict=True):
        assert pattern is None or re.fullmatch(pattern, output.text) or output.finish_reason == "length"
        (alone,) = engine.generate("Tell me", p)
        assert alone.token_ids == output.token_ids


def test_each_of_several_samples_follows_on_its_own(engine: Engine) -> None:
    params = SamplingParams(regex="[0-9]{5}x?", n=3, temperature=2.0, seed=1)
    outputs = engine.generate("Tell me", params)
    assert all(re.fullmatch("[0-9]{5}x?", output.text) for output in outputs)
    assert len({output.text for output in outputs}) > 1


def test_an_output_cut_off_by_max_tokens_matches_the_beginning(engine: Engine) -> None:
    (output,) = engine.generate("Tell me", SamplingParams(json_schema=PERSON, max_tokens=5))
    assert output.finish_reason == "length"
    assert output.text == '{"nam'


def test_preempted_requests_still_match() -> None:
    tokenizer = byte_tokenizer()
    model = make_tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=2048)
    params = [SamplingParams(regex="[a-z]{40}", temperature=1.0, seed=seed, max_tokens=60) for seed in range(4)]
    with Engine(model, tokenizer, kv_cache_memory="1MiB") as roomy:
        expected = [output.token_ids for output in roomy.generate(["Tell me"] * 4, params)]
    with Engine(model, tokenizer, block_size=8, kv_cache_memory="56KiB", enable_prefix_caching=False) as engine:
        outputs = engine.generate(["Tell me"] * 4, params)
        assert [output.token_ids for output in outputs] == expected
        assert engine.stats().num_preemptions > 0
    assert all(re.fullmatch("[a-z]{40}", output.text) for output in outputs)


def test_a_processor_cannot_lead_out_of_the_constraint(engine: Engine) -> None:
    """It forces a token that does not fit: nothing is left to draw, and the request fails alone."""
    prompt = engine.tokenizer("Tell me")["input_ids"]
    script = Script(len(prompt), engine.tokenizer("nothing")["input_ids"])
    params = SamplingParams(regex="[0-9]+", logits_processors=[script])
    failed, fine = engine.generate([prompt, prompt], [params, SamplingParams(regex="[0-9]{2}")])
    assert failed.finish_reason == "error"
    assert isinstance(failed.error, SamplingFailed)
    assert re.fullmatch("[0-9]{2}", fine.text)


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"regex": "[a-"}, "unclosed character class"),
        ({"grammar": 'start: "a'}, "lexer error"),
        ({"json_schema": {"type": "nonsense"}}, "nonsense"),
        (
            {"json_schema": {"oneOf": [{"required": ["a"]}, {"properties": {"b": {"type": "string"}}}]}},
            "Write anyOf instead",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused_when_it_is_added(engine: Engine, params: dict, says: str) -> None:
    with pytest.raises(RequestRefused, match=says):
        engine.add_request("Tell me", SamplingParams(**params))


@pytest.mark.parametrize(
    "params",
    [
        {"regex": "a", "grammar": 'start: "a"'},
        {"json_schema": {}, "regex": "a"},
        {"regex": "a", "ignore_eos": True},
        {"regex": 7},
        {"json_schema": "{"},
        {"json_schema": [1]},
        {"json_schema": {"type": object()}},
    ],
)
def test_unusable_params_are_refused_where_they_are_made(params: dict) -> None:
    with pytest.raises(ConfigError):
        SamplingParams(**params)


def test_a_schema_that_its_owner_changes_later_changes_no_request() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    params = SamplingParams(json_schema=schema)
    schema["properties"]["a"]["type"] = "string"
    assert params.json_schema == {"type": "object", "properties": {"a": {"type": "integer"}}}


def test_an_engine_without_a_tokenizer_refuses() -> None:
    with Engine(make_tiny("llama"), kv_cache_memory="1MiB") as engine, pytest.raises(RequestRefused, match="tokenizer"):
        engine.add_request([5, 6], SamplingParams(regex="a", max_tokens=9))


def test_a_model_that_cannot_end_fails_the_request_with_the_reason() -> None:
    tokenizer = byte_tokenizer()
    model = make_tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=2048, eos_token_id=None)
    model.generation_config.eos_token_id = None
    with Engine(model, tokenizer, kv_cache_memory="1MiB") as engine:
        (output,) = engine.generate("Tell me", SamplingParams(regex="a", max_tokens=9))
    assert "end-of-sequence" in str(output.error)


def test_without_the_library_the_refusal_names_the_extra(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    with pytest.raises(RequestRefused, match=r"paged-backend\[structured\]"):
        engine.add_request("Tell me", SamplingParams(regex="a", max_tokens=9))


def test_logprobs_stay_those_of_the_model_unless_asked_for(engine: Engine) -> None:
    (raw,) = engine.generate("Tell me", SamplingParams(regex="a{3}", logprobs=0))
    (processed,) = engine.generate("Tell me", SamplingParams(regex="a{3}", logprobs=0, logprobs_mode="processed"))
    assert raw.logprobs is not None
    assert all(next(iter(entry.values())) < -0.1 for entry in raw.logprobs)
    assert processed.logprobs is not None
    torch.testing.assert_close([next(iter(entry.values())) for entry in processed.logprobs], [0.0] * 4)

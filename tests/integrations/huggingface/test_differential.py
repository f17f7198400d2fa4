"""Drawn calls of ``generate``: stock and the paged engine agree on every field, and wrong versions of it do not."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from stock_equality import assert_same_scores, assert_same_tokens
from tiny_models import make_tiny
from tiny_tokenizers import byte_level_bpe
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from paged_backend.errors import SamplingFailed, UnsupportedCall
from paged_backend.integrations.huggingface import decoding, row_sampling
from paged_backend.integrations.huggingface.loop import GenerationLoop

VOCAB_SIZE = 330
FAMILIES = ("llama", "gemma2", "gpt2")
PARTS = ("processor", "criterion", "prefix", "stop strings")
SETTINGS = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck), "database": None}


@cache
def model_of(family):
    return make_tiny(family, vocab_size=VOCAB_SIZE)


def lean(input_ids, scores):
    """A processor that depends on the padded row, its length and the other rows."""
    scores = scores + 0.3 * scores.mean(dim=0, keepdim=True)
    scores[:, (input_ids.shape[1] + int(input_ids[0, 0])) % VOCAB_SIZE] += 3.0
    return scores


class EndsOddRows:
    """A criterion with a memory: the odd rows end at its third call."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return (torch.arange(len(input_ids)) % 2 == 1) & (self.calls >= 3)


@dataclass
class Call:
    """One call of ``generate``, made anew for each way so that no state is shared."""

    family: str
    prompts: list[list[int]]
    options: dict[str, Any]
    parts: frozenset[str]
    config_in: str
    paged_config: dict[str, Any]
    beside: int
    mask: bool = True
    inputs: dict[str, torch.Tensor] = field(init=False)

    def __post_init__(self):
        longest = max(map(len, self.prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in self.prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in self.prompts])
        self.inputs = {"input_ids": ids, "attention_mask": mask} if self.mask else {"input_ids": ids}

    def arguments(self, **more):
        options = self.options | more
        arguments = dict(self.inputs)
        if "processor" in self.parts:
            arguments["logits_processor"] = LogitsProcessorList([lean])
        if "criterion" in self.parts:
            arguments["stopping_criteria"] = StoppingCriteriaList([EndsOddRows()])
        if "prefix" in self.parts:
            arguments["prefix_allowed_tokens_fn"] = lambda row, ids: [3 + row, 40 + len(ids) % 9, 99, int(ids[-1])]
        if "stop strings" in self.parts:
            options["stop_strings"] = ["e", "th"]
            arguments["tokenizer"] = byte_level_bpe()
        if self.config_in == "argument":
            arguments["generation_config"] = GenerationConfig(**options)
        else:
            arguments |= options
        return arguments

    def run_stock(self, **more):
        return model_of(self.family).generate(**self.arguments(**more))

    def run_paged_alone(self):
        paged = {"cache_impl": "paged", "paged_config": self.paged_config}
        return model_of(self.family).generate(**self.arguments(), **paged)

    def run_paged(self):
        """Paged, with the same call from other threads beside it."""
        with ThreadPoolExecutor(1 + self.beside) as pool:
            futures = [pool.submit(self.run_paged_alone) for _ in range(1 + self.beside)]
            return futures[0].result()


@st.composite
def calls(draw, *, by_rows: bool = False):
    """Any call, or one that the engine serves row by row, without stock's own loop."""
    token = st.integers(3, VOCAB_SIZE - 1)
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": draw(st.sampled_from([0, 9]))}
    count = draw(st.integers(1, 7))
    num_rows = draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(1, 12), min_size=num_rows, max_size=num_rows))
    prompts = [draw(st.lists(token, min_size=n, max_size=n)) for n in lengths]
    mask = draw(st.booleans()) or options["pad_token_id"] != 0
    if draw(st.booleans()):
        options["max_length"] = max(lengths) + count
    else:
        options["max_new_tokens"] = count
    # Many of them, so that rows come to one now and then.
    eos = draw(st.sampled_from([None, 0, "many", "many"]))
    options["eos_token_id"] = list(range(1, VOCAB_SIZE, 4)) if eos == "many" else eos
    least = draw(st.integers(0, count))
    options |= draw(st.sampled_from([{}, {"min_new_tokens": least}, {"min_length": max(lengths) + least}]))
    outputs = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    options |= draw(
        st.sampled_from(
            [{}]
            if by_rows
            else [{}, {}, outputs, {**outputs, "output_logits": False}, {**outputs, "output_scores": False}]
        )
    )
    maybe = {
        "repetition_penalty": st.sampled_from([0.8, 1.5]),
        "no_repeat_ngram_size": st.integers(1, 2),
        "encoder_repetition_penalty": st.just(1.4),
        "bad_words_ids": st.just([[229], [60, 61]]),
        "suppress_tokens": st.just(list(range(0, VOCAB_SIZE, 7))),
        "forced_eos_token_id": st.just(5),
        "renormalize_logits": st.just(True),
        "use_cache": st.just(False),
        "top_k": st.just(1),
    }
    names = ["repetition_penalty"] if by_rows else sorted(maybe)
    for name in draw(st.lists(st.sampled_from(names), max_size=4, unique=True)):
        options[name] = draw(maybe[name])
    if options.get("top_k") == 1:
        # Sampling with one choice.
        options |= {"do_sample": True, "num_return_sequences": draw(st.integers(1, 2)), "temperature": 0.5}
    return Call(
        draw(st.sampled_from(FAMILIES)),
        prompts,
        options,
        frozenset() if by_rows else draw(st.frozensets(st.sampled_from(PARTS), max_size=2)),
        draw(st.sampled_from(["kwargs", "argument"])),
        draw(st.sampled_from([{}, {"max_num_batched_tokens": 5}, {"block_size": 4, "batching": "separate"}])),
        draw(st.sampled_from([0, 0, 2])),
        mask,
    )


def assert_agree(call: Call) -> None:
    """The two ways return the same, but for rounding where stock's two best scores nearly tie."""
    try:
        theirs = call.run_stock()
    except RuntimeError:
        # Processors have left a row no token to draw.
        with pytest.raises((RuntimeError, SamplingFailed)):
            call.run_paged()
        return
    ours = call.run_paged()
    assert type(ours) is type(theirs)
    whole = isinstance(theirs, dict)
    if not torch.equal(*(out.sequences if whole else out for out in (ours, theirs))):
        told = call.run_stock(return_dict_in_generate=True, output_scores=True)
        assert_same_tokens(ours.sequences if whole else ours, told.sequences, told.scores)
        return
    if not whole:
        assert ours.dtype == theirs.dtype
        return
    assert list(ours) == list(theirs)
    assert_same_scores(ours.scores, theirs.scores)
    assert_same_scores(ours.logits, theirs.logits)
    if theirs.cache is not None:
        assert ours.cache.get_seq_length() == theirs.cache.get_seq_length()


@given(call=calls())
@settings(max_examples=50, **SETTINGS)
def test_drawn_calls_agree_with_stock(call):
    assert_agree(call)


def differs(call: Call) -> bool:
    try:
        assert_agree(call)
    except UnsupportedCall:
        return False
    except Exception:
        return True
    return False


def loop_with(**attributes):
    """GenerationLoop with some of its attributes replaced once it is made."""

    class Mutant(GenerationLoop):
        def __init__(self, *args):
            super().__init__(*args)
            for name, change in attributes.items():
                setattr(self, name, change(getattr(self, name)))

    return Mutant


def without_stops(*args, **options):
    fields = row_sampling.row_fields(*args, **options)
    return None if fields is None else [{**own, "stop_token_ids": []} for own in fields]


most_tokens = decoding._max_new_tokens
field_of = row_sampling._field
pad_to = decoding._padded
MUTANTS = {
    "end-of-sequence tokens are ignored": (decoding, "row_fields", without_stops),
    "one token too few": (decoding, "_max_new_tokens", lambda *args: max(1, most_tokens(*args) - 1)),
    "padded with token 0": (decoding, "_padded", lambda ids, outputs, pad: pad_to(ids, outputs, None)),
    "a penalty is lost": (
        row_sampling,
        "_field",
        lambda processor, *args: (
            ("repetition_penalty", 1.0) if "Repetition" in type(processor).__name__ else field_of(processor, *args)
        ),
    ),
    "minimum lengths forget the padding": (
        row_sampling,
        "_field",
        lambda processor, row, *args: field_of(
            processor, replace(row, num_shown=row.num_shown - row.num_padding), *args
        ),
    ),
    "finished rows are dropped though it shows": (
        decoding,
        "GenerationLoop",
        loop_with(_drops_finished=lambda _: True),
    ),
    "finished rows are not padded": (decoding, "GenerationLoop", loop_with(_pad=lambda _: None)),
    "processors see a shorter row": (
        decoding,
        "GenerationLoop",
        loop_with(_processors=lambda processors: lambda ids, scores: processors(ids[:, 1:], scores)),
    ),
    "criteria see a shorter row": (
        decoding,
        "GenerationLoop",
        loop_with(_criteria=lambda criteria: lambda ids, scores: criteria(ids[:, :-1], scores)),
    ),
    "criteria of the caller are lost": (
        decoding,
        "GenerationLoop",
        loop_with(_criteria=lambda criteria: type(criteria)(c for c in criteria if not isinstance(c, EndsOddRows))),
    ),
    "scores are those before the processors": (
        decoding,
        "GenerationLoop",
        loop_with(scores=lambda scores: None if scores is None else (torch.zeros(1),)),
    ),
}


# What shows only in calls without stock's loop, of which few are drawn otherwise.
BY_ROWS = (
    "end-of-sequence tokens are ignored",
    "padded with token 0",
    "a penalty is lost",
    "minimum lengths forget the padding",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_drawn_calls_tell_a_wrong_version_apart(monkeypatch, name):
    monkeypatch.setattr(*MUTANTS[name])
    find(
        calls(by_rows=name in BY_ROWS),
        differs,
        settings=settings(max_examples=300, phases=[Phase.generate], **SETTINGS),
    )

"""On real weights, ragged natural prompts get the tokens that one padded stock generate gives them."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_greedy
from transformers import AutoModelForCausalLM, AutoTokenizer

from paged_backend import sample_model

NUM_TOKENS = 24
_SUBJECTS = [
    "the harbour at dawn",
    "a clockmaker who never slept",
    "rain on a slate roof",
    "the price of bread in wartime",
    "why the sky is blue",
    "a sorting algorithm",
]
_OPENINGS = ["Write about", "Explain", "Tell me a story of", "List three facts on", "Dear editor, concerning"]
_MIDDLES = [
    "Keep it short.",
    "The reader is ten years old and likes questions.",
    "Mention the weather, the time of day, and at least one animal that lives near water.",
    "Somebody wrote about this before, in a book that is now lost, and quoted an old letter at length.",
    "Begin with what everyone knows; go on to what few people know; end with what nobody can know yet.",
]


def natural_prompts() -> list[str]:
    prompts = []
    for index, num_sentences in enumerate([0, 1, 7, 2, 0, 4]):
        middle = " ".join(_MIDDLES[(index + sentence) % 5] for sentence in range(num_sentences))
        prompts.append(f"{_OPENINGS[index % 5]} {_SUBJECTS[index]}. {middle}".strip())
    return prompts


@pytest.fixture(scope="module")
def real():
    folder = sample_model.fetch()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    inputs = tokenizer(natural_prompts(), return_tensors="pt", padding=True)
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False}
    expected = model.generate(**inputs, **options)
    return model, inputs, options, expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        {"batching": "shared", "block_size": 1, "max_num_seqs": 3},
        {"batching": "separate", "block_size": 256, "max_num_batched_tokens": 48},
    ],
    ids=str,
)
def test_paged_generate_gives_the_tokens_of_padded_stock_generate(real, config):
    model, inputs, options, expected = real
    lengths = inputs["attention_mask"].sum(1)
    assert lengths.min() < 10
    assert lengths.max() > 120
    got = model.generate(**inputs, **options, cache_impl="paged", paged_config=config)
    assert got.dtype == expected.dtype
    width = inputs["input_ids"].shape[1]
    if got.shape != expected.shape:
        longest = max(got.shape[1], expected.shape[1])
        pad = torch.nn.functional.pad
        got, expected = (pad(t, (0, longest - t.shape[1]), value=0) for t in (got, expected))
    for row, length in enumerate(lengths.tolist()):
        prompt = inputs["input_ids"][row, width - length :].tolist()
        assert_greedy(model, prompt, got[row, width:].tolist(), expected[row, width:].tolist())

"""A program that holds the engine and ``generate`` to stock on whichever transformers it finds."""

from __future__ import annotations

import sys
from typing import Any

import torch
import transformers
from oracle import assert_greedy, draw_prompts, stock_greedy
from stock_equality import assert_equals_stock, assert_same_cache, left_padded
from tiny_models import make_tiny
from torch import Tensor
from transformers import PreTrainedModel

import paged_backend
from paged_backend import Engine, SamplingParams

FAMILIES = ("llama", "mistral", "gemma2", "gpt2")
LENGTHS = [5, 23, 9]
NUM_TOKENS = 12


def check(family: str) -> None:
    """Compare the engine and ``generate`` with stock on a tiny model."""
    model = make_tiny(family)
    if family == "gemma2":
        # Early versions run it by default with an attention that ignores its soft cap.
        model.set_attn_implementation("eager")
    prompts = draw_prompts(LENGTHS)
    with Engine(model, max_num_batched_tokens=16, block_size=7) as engine:
        outputs = engine.generate(prompts, SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_greedy(model, prompt, output.token_ids, stock_greedy(model, prompt, NUM_TOKENS))
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert_equals_stock(model, left_padded(LENGTHS), **options)
    assert_equals_stock(model, left_padded(LENGTHS), **options, repetition_penalty=1.3)
    for inputs in (left_padded(LENGTHS), left_padded([9])):
        check_cache(model, inputs, {**options, "return_dict_in_generate": True})


def check_cache(model: PreTrainedModel, inputs: dict[str, Tensor], options: dict[str, Any]) -> None:
    """Compare what the returned caches hold after tokens and after embeddings."""
    embeds = model.get_input_embeddings()(inputs["input_ids"]).detach()
    for given in (inputs, {**inputs, "input_ids": None, "inputs_embeds": embeds}):
        stock, paged = (model.generate(**given, **options, cache_impl=which) for which in (None, "paged"))
        name = "cache" if "cache" in stock else "past_key_values"
        assert_same_cache(paged[name], stock[name])


def main() -> None:
    """Check every family; the arguments are the expected version and name of the cache in a model's output."""
    version, cache_name = sys.argv[1:]
    assert transformers.__version__ == version, f"found transformers {transformers.__version__}, not {version}"
    torch.set_num_threads(1)
    output = make_tiny("llama")(torch.tensor([[5, 6, 7]]))
    assert getattr(output, cache_name, None) is not None, f"its cache is not called {cache_name}"
    paged_backend.install()
    for family in FAMILIES:
        check(family)
        print(f"{family} equals stock", flush=True)


if __name__ == "__main__":
    main()

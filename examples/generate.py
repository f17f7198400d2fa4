"""Answer prompts of different lengths through the paged engine, with one more argument to ``model.generate``."""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import paged_backend
from paged_backend import sample_model

PROMPTS = [
    "Water boils at",
    "A short list of things to pack for a weekend in the mountains, in order of importance:",
    "Dear Maria,\n\nthank you for the parcel. The jam arrived safely, and we opened the first jar at once. Now",
]


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder or hub id; by default a small model that is fetched once")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    arguments = parser.parse_args()
    name = arguments.model or sample_model.fetch()
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)

    paged_backend.install()
    tokens = model.generate(**inputs, max_new_tokens=arguments.max_new_tokens, do_sample=False, cache_impl="paged")

    for text in tokenizer.batch_decode(tokens, skip_special_tokens=True):
        print(f"{text}\n{'-' * 40}")


if __name__ == "__main__":
    main()

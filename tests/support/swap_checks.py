"""What the tests of swaps share: models whose layers are swapped whole or in part, and their tokens beside stock's."""

from __future__ import annotations

from oracle import stock_greedy
from transformers import PreTrainedModel

from paged_backend import Engine, SamplingParams

PROMPTS = [list(range(5, 45)), [9, 20, 33], [7] * 17, list(range(100, 130))]
NUM_TOKENS = 8
# Families whose layers have the common pattern, and those of which only parts are known.
WHOLE = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"]
PARTLY = ["gpt2", "opt", "phimoe", "llama4", "deepseek_v2", "gpt_oss"]


def tokens(engine: Engine) -> list[list[int]]:
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    return [output.token_ids for output in engine.generate(PROMPTS, params)]


def stock_tokens(model: PreTrainedModel) -> list[list[int]]:
    return [stock_greedy(model, prompt, NUM_TOKENS) for prompt in PROMPTS]

"""Time a batch of short chats through ChatPaged and through LangChain's own HuggingFacePipeline, on the same weights.

python examples/langchain_throughput.py --model path/to/model

Needs langchain-huggingface. Both decode greedily to the same number of tokens on the same threads, in one process, one
after the other, each warmed up by a short call.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from langchain_core.messages import HumanMessage

from paged_backend.integrations.langchain import ChatPaged

SUBJECTS = ["rivers", "bread", "ships", "clouds", "cats", "clocks", "bridges", "maps"]


def main() -> None:
    """Run both and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a model folder or hub id with a chat template")
    parser.add_argument("--num-chats", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    questions = [f"Question {i}: tell me something about {SUBJECTS[i % 8]}." for i in range(arguments.num_chats)]

    chat = ChatPaged(
        model=arguments.model,
        max_tokens=arguments.max_tokens,
        ignore_eos=True,
        engine_kwargs={"model_kwargs": {"dtype": torch.float32}},
    )
    ours = seconds(lambda: chat.batch(questions), warm_up=lambda: chat.invoke("Hello.", max_tokens=2))
    num_tokens = arguments.num_chats * arguments.max_tokens
    print(f"ChatPaged.batch        {ours:7.2f} s  {num_tokens / ours:7.1f} tokens/s")

    stock = stock_chat(arguments.model, arguments.max_tokens)
    theirs = seconds(lambda: stock(questions), warm_up=lambda: stock(["Hello."]))
    print(f"ChatHuggingFace.batch  {theirs:7.2f} s  {num_tokens / theirs:7.1f} tokens/s")
    print(f"ratio {theirs / ours:.1f}")


def stock_chat(model: str, max_tokens: int) -> Callable[[list[str]], object]:
    """ChatHuggingFace over a transformers pipeline, which runs one chat after the other."""
    from langchain_huggingface import ChatHuggingFace, HuggingFacePipeline
    from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loaded.generation_config.max_length = None
    task = pipeline(
        "text-generation",
        model=loaded,
        tokenizer=tokenizer,
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        do_sample=False,
        return_full_text=False,
    )
    chat = ChatHuggingFace(llm=HuggingFacePipeline(pipeline=task, model_id=model), tokenizer=tokenizer)
    # Threads would run the one pipeline against itself.
    return lambda questions: chat.batch([[HumanMessage(q)] for q in questions], {"max_concurrency": 1})


def seconds(work: Callable[[], object], warm_up: Callable[[], object]) -> float:
    """How long the work takes once warm."""
    warm_up()
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()

"""Chat through LangChain: many conversations at once, a stream, structured output, and a turn that reuses the cache.

python examples/langchain_chat.py --model path/to/model
"""

from __future__ import annotations

import argparse
import asyncio

from pydantic import BaseModel, Field

from paged_backend.integrations.langchain import ChatPaged

QUESTIONS = ["Name a river.", "Name a planet.", "What is bread made of?", "Why is the sky blue?"]


class Review(BaseModel):
    """A review of a film."""

    title: str = Field(max_length=20)
    stars: int = Field(ge=1, le=5)


async def main() -> None:
    """Chat in each of the ways."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a model folder or hub id with a chat template")
    parser.add_argument("--max-tokens", type=int, default=24)
    arguments = parser.parse_args()
    chat = ChatPaged(model=arguments.model, max_tokens=arguments.max_tokens)

    # All of them run in one batch; urgent ones may go first where the policy looks at priorities.
    answers = await chat.abatch(QUESTIONS, priority=1)
    for question, answer in zip(QUESTIONS, answers, strict=True):
        print(f"{question} -> {answer.text!r} ({answer.response_metadata['finish_reason']})")

    print("streamed:", end=" ")
    async for chunk in chat.astream("Tell me a story."):
        print(chunk.text, end="", flush=True)
    print()

    history = [("user", QUESTIONS[0]), ("ai", answers[0].text), ("user", "Another one.")]
    usage = (await chat.ainvoke(history)).usage_metadata
    cached = usage["input_token_details"]["cache_read"]
    print(f"second turn: {usage['input_tokens']} prompt tokens, {cached} of them from the prefix cache")

    review = await chat.with_structured_output(Review).ainvoke("Review a film about ships.", max_tokens=256)
    print("structured:", review)


if __name__ == "__main__":
    asyncio.run(main())

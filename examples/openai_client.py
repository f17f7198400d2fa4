"""Ask a server through OpenAI's own client: an answer, many at once, a stream, a tool call and a form to keep to.

paged-backend serve path/to/model
python examples/openai_client.py --base-url http://127.0.0.1:8000/v1
"""

from __future__ import annotations

import argparse
import asyncio
import json

from openai import AsyncOpenAI
from pydantic import BaseModel, Field

QUESTIONS = ["Name a river.", "Name a planet.", "What is bread made of?", "Why is the sky blue?"]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
        },
    },
}


class Review(BaseModel):
    """A review of a film."""

    title: str = Field(max_length=20)
    stars: int = Field(ge=1, le=5)


def user(text: str) -> list[dict[str, str]]:
    """A conversation that begins."""
    return [{"role": "user", "content": text}]


async def main() -> None:
    """Ask in each of the ways."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none", help="one of the server's keys, if it asks for any")
    parser.add_argument("--max-tokens", type=int, default=24)
    arguments = parser.parse_args()
    async with AsyncOpenAI(base_url=arguments.base_url, api_key=arguments.api_key) as client:
        model = (await client.models.list()).data[0].id
        chat, limit = client.chat.completions, arguments.max_tokens

        # All of them run in one batch. What OpenAI's API does not know goes into extra_body.
        urgent = {"priority": -1, "deadline_s": 60}
        answers = await asyncio.gather(
            *(
                chat.create(model=model, messages=user(question), max_tokens=limit, extra_body=urgent)
                for question in QUESTIONS
            )
        )
        for question, answer in zip(QUESTIONS, answers, strict=True):
            choice = answer.choices[0]
            print(f"{question} -> {choice.message.content!r} ({choice.finish_reason})")

        print("streamed:", end=" ")
        stream = await chat.create(model=model, messages=user("Tell me a story."), max_tokens=limit, stream=True)
        async for chunk in stream:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        print()

        forced = {"type": "function", "function": {"name": "get_weather"}}
        asked = await chat.create(
            model=model, messages=user("How is the weather in Paris?"), tools=[WEATHER], tool_choice=forced
        )
        call = asked.choices[0].message.tool_calls[0].function
        print(f"calls {call.name}({json.loads(call.arguments)})")

        parsed = await chat.parse(
            model=model, messages=user("Review a film about ships."), response_format=Review, max_tokens=256
        )
        print("structured:", parsed.choices[0].message.parsed)


if __name__ == "__main__":
    asyncio.run(main())

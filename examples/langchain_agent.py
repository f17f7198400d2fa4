"""An agent with a tool on a local model, several questions at once in one running batch.

python examples/langchain_agent.py --model path/to/model

A model that was trained to call tools decides by itself; for one that was not, --force makes the first answer of each
question a call, by constrained decoding.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Literal

from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import tool

from paged_backend.integrations.langchain import ChatPaged

QUESTIONS = ["What is the weather in Oslo?", "Is it raining in Lima?", "Do I need a coat in Cairo?"]


@tool
def get_weather(city: Literal["Oslo", "Lima", "Cairo"]) -> str:
    """Tell the weather of a city."""
    return {"Oslo": "snow, -3 degrees", "Lima": "fog, 17 degrees", "Cairo": "sun, 31 degrees"}[city]


@wrap_model_call
async def call_first(request, handler):
    """Force a tool call as the first answer."""
    if not any(isinstance(message, ToolMessage) for message in request.messages):
        request = request.override(tool_choice="any")
    return await handler(request)


async def main() -> None:
    """Ask all questions at once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a model folder or hub id with a chat template")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--force", action="store_true", help="make the first answer a call")
    arguments = parser.parse_args()

    chat = ChatPaged(model=arguments.model, max_tokens=arguments.max_tokens)
    agent = create_agent(
        chat, [get_weather], system_prompt="Answer briefly.", middleware=[call_first] if arguments.force else []
    )
    runs = [agent.ainvoke({"messages": [("user", question)]}) for question in QUESTIONS]
    for question, result in zip(QUESTIONS, await asyncio.gather(*runs), strict=True):
        print(f"user: {question}")
        for message in result["messages"][1:]:
            if isinstance(message, AIMessage):
                for call in message.tool_calls:
                    print(f"  calls {call['name']}({call['args']})")
            if message.text:
                print(f"  {message.type}: {message.text}")


if __name__ == "__main__":
    asyncio.run(main())

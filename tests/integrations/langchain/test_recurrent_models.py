"""Chats on models that keep recurrent state: what calls, batches and streams say is what stock says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from langchain_core.messages import BaseMessage, HumanMessage
from oracle import stock_greedy
from recurrent_models import make_recurrent
from tiny_tokenizers import byte_tokenizer
from transformers import PreTrainedModel

from paged_backend import AsyncEngine, Engine
from paged_backend.integrations.langchain import ChatPaged

LENGTH = 12
BLOCK_SIZE = 8


# One that goes on from a state with many tokens at once, and one that does token by token.
@pytest.fixture(scope="module", params=["qwen3_next", "jamba"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return make_recurrent(request.param)


@pytest.fixture
def chat(model: PreTrainedModel) -> Iterator[ChatPaged]:
    engine = Engine(model, byte_tokenizer(), block_size=BLOCK_SIZE, max_num_batched_tokens=64, optimize="none")
    with AsyncEngine(engine) as service:
        yield ChatPaged.from_engine(service, model="tiny", max_tokens=LENGTH, ignore_eos=True)


def stock(model: PreTrainedModel, messages: Sequence[BaseMessage]) -> str:
    tokenizer = byte_tokenizer()
    roles = {"human": "user", "ai": "assistant"}
    conversation = [{"role": roles[message.type], "content": message.content} for message in messages]
    prompt = tokenizer.apply_chat_template(conversation, add_generation_prompt=True)["input_ids"]
    return tokenizer.decode(stock_greedy(model, prompt, LENGTH), skip_special_tokens=True)


def test_a_batch_and_a_stream_say_what_stock_says(model: PreTrainedModel, chat: ChatPaged) -> None:
    questions = [[HumanMessage(text)] for text in ("Why?", "How long is a piece of string?", "x")]
    expected = [stock(model, question) for question in questions]
    assert len(set(expected)) == len(expected)
    assert [message.text for message in chat.batch(questions)] == expected
    assert "".join(chunk.text for chunk in chat.stream(questions[1])) == expected[1]


def test_the_next_turn_goes_on_from_the_state_of_the_one_before(model: PreTrainedModel, chat: ChatPaged) -> None:
    first = [HumanMessage("How long is a piece of string?")]
    answer = chat.invoke(first)
    second = [*first, answer, HumanMessage("Why?")]
    assert (message := chat.invoke(second)).text == stock(model, second)
    # The state is kept at the end of the last block before a prompt's last token.
    whole_blocks = (answer.usage_metadata["input_tokens"] - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert message.usage_metadata["input_token_details"]["cache_read"] >= whole_blocks > 0

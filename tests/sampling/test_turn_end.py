"""Which tokens end an answer: what the template writes behind one, and the end of sequence."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_models import make_tiny
from tiny_tokenizers import byte_tokenizer

from paged_backend import Engine, turn_end_ids

EACH = "{% for m in messages %}{{ m.role }}:{{ m.content }}"
SPECIAL = "<|end_of_turn|>"


@pytest.fixture(scope="module")
def engine() -> Any:
    tokenizer = byte_tokenizer(None)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>", SPECIAL]})
    tokenizer.add_tokens(["<|end_of_turn|>!"], special_tokens=True)
    # The model has no token for the last one.
    with Engine(make_tiny("llama", vocab_size=len(tokenizer) - 1), tokenizer, kv_cache_memory="1MiB") as engine:
        yield engine


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (EACH + SPECIAL + "\n{% endfor %}", SPECIAL),
        (EACH + "  \n" + SPECIAL + "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}", SPECIAL),
        # One that opens the next turn whether it is asked to or not.
        (EACH + "<|end|>{% endfor %}" + SPECIAL, "<|end|>"),
        (EACH + "</s>{% endfor %}", None),
        (EACH + "\n{% endfor %}", None),
        (EACH + "." + SPECIAL + "{% endfor %}", None),
        (EACH + SPECIAL + "!{% endfor %}", None),
        ("{% for m in messages %}{{ m.role }}{% endfor %}" + SPECIAL, None),
        ("{{ raise_exception('not this') }}", None),
    ],
)
def test_the_special_token_behind_an_answer_ends_it_as_the_end_of_sequence_does(
    engine: Engine, template: str, end: str | None
) -> None:
    tokenizer: Any = engine.tokenizer
    expected = {tokenizer.eos_token_id} | ({tokenizer.convert_tokens_to_ids(end)} if end else set())
    assert set(turn_end_ids(engine, template)) == expected
    tokenizer.chat_template = template
    assert set(turn_end_ids(engine)) == expected


def test_a_tokenizer_whose_end_of_sequence_was_replaced_is_asked_again(engine: Engine) -> None:
    tokenizer: Any = engine.tokenizer
    before, template = tokenizer.eos_token, EACH + "\n{% endfor %}"
    try:
        tokenizer.eos_token = SPECIAL
        assert turn_end_ids(engine, template) == (tokenizer.convert_tokens_to_ids(SPECIAL),)
    finally:
        tokenizer.eos_token = before
    assert turn_end_ids(engine, template) == (tokenizer.eos_token_id,)

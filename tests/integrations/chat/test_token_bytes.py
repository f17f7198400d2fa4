"""The bytes of tokens join to the text, whatever a token holds: part of a character, a space, the middle of a word."""

from __future__ import annotations

from typing import Any

import pytest
from service_checks import Script
from tiny_models import make_tiny
from tiny_tokenizers import SENTENCES, byte_fallback_bpe, byte_level_bpe, word_piece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from paged_backend import Engine
from paged_backend.integrations.chat.token_bytes import TokenBytes
from paged_backend.integrations.langchain import ChatPaged, PagedLLM


def metaspace() -> PreTrainedTokenizerFast:
    """As SentencePiece's unigrams: words begin with U+2581, which decoding leaves out at the start of a text."""
    pieces = ["<unk>", "</s>", "▁", "▁The", "▁qu", "ick", "▁fox", "▁▁", "é"]
    tokenizer = Tokenizer(models.Unigram([(piece, -float(n)) for n, piece in enumerate(pieces)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


def slow_sentencepiece() -> PreTrainedTokenizerFast:
    """With the rule of the tokenizers that are not of the tokenizers library."""
    tokenizer = metaspace()
    tokenizer.convert_tokens_to_string = lambda pieces: "".join(pieces).replace("▁", " ").strip()
    return tokenizer


def spelt(tokenizer: Any, token_ids: list[int]) -> bytes:
    spell = TokenBytes(tokenizer)
    return b"".join(spell(token_id, is_first=place == 0) for place, token_id in enumerate(token_ids))


@pytest.mark.parametrize("text", SENTENCES)
@pytest.mark.parametrize("make", [byte_level_bpe, byte_fallback_bpe])
def test_bytes_of_any_text_join_to_it(make: Any, text: str) -> None:
    tokenizer = make()
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert spelt(tokenizer, token_ids).decode() == tokenizer.decode(token_ids) == text


@pytest.mark.parametrize(
    ("make", "pieces", "expected"),
    [
        (byte_level_bpe, ["Ġ", "ç", "ķ"], [b" ", b"\xe7", b"\x95"]),
        (byte_fallback_bpe, ["▁The", "▁", "<0xE6>", "<0xBC>"], [b"The", b" ", b"\xe6", b"\xbc"]),
        (metaspace, ["▁The", "▁qu", "ick", "▁▁", "é"], [b"The", b" qu", b"ick", b"  ", "é".encode()]),
        (slow_sentencepiece, ["▁The", "▁", "▁qu", "ick"], [b"The", b" ", b" qu", b"ick"]),
        (word_piece, ["the", "q", "##u", "."], [b"the", b" q", b"u", b" ."]),
    ],
)
def test_each_token_has_its_own_bytes_and_the_space_before_it(
    make: Any, pieces: list[str], expected: list[bytes]
) -> None:
    tokenizer = make()
    if make is byte_fallback_bpe and "▁The" not in tokenizer.get_vocab():
        pieces, expected = ["▁", *pieces[1:]], [b"", *expected[1:]]
    token_ids = tokenizer.convert_tokens_to_ids(pieces)
    assert tokenizer.unk_token_id is None or tokenizer.unk_token_id not in token_ids
    spell = TokenBytes(tokenizer)
    assert [spell(token, is_first=place == 0) for place, token in enumerate(token_ids)] == expected


def test_special_tokens_are_spelt_and_tokens_that_nobody_knows_are_empty() -> None:
    tokenizer = metaspace()
    tokenizer.add_tokens(["<▁tool>"], special_tokens=True)
    spell = TokenBytes(tokenizer)
    assert spell(tokenizer.eos_token_id) == b"</s>"
    assert spell(len(tokenizer) - 1) == "<▁tool>".encode()
    assert len(tokenizer) - 1 in spell.special_ids
    assert spell(len(tokenizer) + 5) == b""


@pytest.mark.parametrize("make", [byte_level_bpe, byte_fallback_bpe])
def test_logprobs_of_an_answer_join_to_it(make: Any) -> None:
    tokenizer, text = make(), "fox 漢é you"
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    vocab_size = len(tokenizer) + 3
    with Engine(make_tiny("llama", vocab_size=vocab_size), tokenizer, kv_cache_memory="1MiB") as engine:
        prompt = tokenizer("go")["input_ids"]
        # A special token first, which is no part of the text and leaves what follows at its start.
        written = [tokenizer.eos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]]
        options = {"logits_processors": [Script(len(prompt), written)], "max_tokens": len(written), "ignore_eos": True}
        options |= {"logprobs": True, "top_logprobs": 2}
        message = ChatPaged.from_engine(engine, **options).invoke("go")
        (generation,) = PagedLLM.from_engine(engine, **options).generate(["go"]).generations[0]
    for answer, info in ((message.text, message.response_metadata), (generation.text, generation.generation_info)):
        end, *entries = info["logprobs"]["content"]
        assert answer == text == b"".join(bytes(entry["bytes"]) for entry in entries).decode()
        assert end["token"] == tokenizer.eos_token
        for entry in entries:
            assert entry["token"] == bytes(entry["bytes"]).decode(errors="replace")
            assert any(top["bytes"] == entry["bytes"] for top in entry["top_logprobs"])

"""Log probabilities of tokens, in OpenAI's form."""

from __future__ import annotations

from tiny_tokenizers import byte_fallback_bpe, byte_tokenizer

from paged_backend.integrations.chat.token_logprobs import TokenLogprobs

TOKENIZER = byte_tokenizer()


def test_an_entry_has_its_token_and_the_likeliest_first():
    a, b = TOKENIZER("ab")["input_ids"]
    (entry,) = TokenLogprobs(TOKENIZER).entries([a], [{a: -2.0, b: -0.5}])
    assert (entry["token"], entry["bytes"], entry["logprob"]) == ("a", [97], -2.0)
    assert [(top["token"], top["logprob"]) for top in entry["top_logprobs"]] == [("b", -0.5), ("a", -2.0)]


def test_as_many_of_the_likeliest_are_told_as_are_wanted():
    a, b = TOKENIZER("ab")["input_ids"]
    (entry,) = TokenLogprobs(TOKENIZER, num_top=1).entries([a], [{a: -2.0, b: -0.5}])
    assert [top["token"] for top in entry["top_logprobs"]] == ["b"]
    (entry,) = TokenLogprobs(TOKENIZER, num_top=0).entries([a], [{a: -2.0}])
    assert (entry["logprob"], entry["top_logprobs"]) == (-2.0, [])


def test_only_the_first_token_of_an_output_leaves_its_space_out():
    tokenizer = byte_fallback_bpe()
    the = tokenizer.convert_tokens_to_ids("▁The")
    told = TokenLogprobs(tokenizer)
    tokens = [told.entries([the], [{the: -1.0}])[0]["token"] for _ in range(2)]
    assert tokens == ["The", " The"]

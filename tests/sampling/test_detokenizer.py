"""IncrementalDetokenizer against decoding everything at once, on each kind of tokenizer."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import SENTENCES, byte_fallback_bpe, byte_level_bpe, word_piece
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from paged_backend.sampling.detokenizer import IncrementalDetokenizer, tokenizer_lock

KINDS = {"byte_level": byte_level_bpe, "byte_fallback": byte_fallback_bpe, "word_piece": word_piece}


def pieces_of(tokenizer: PreTrainedTokenizerFast, token_ids: Sequence[int], hold_back: Sequence[str] = ()) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, hold_back)
    return [detokenizer.add([token]) for token in token_ids] + [detokenizer.finish()]


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(data=st.data())
def test_pieces_join_to_the_whole_text_for_any_tokens(kind: str, data: st.DataObject) -> None:
    tokenizer = KINDS[kind]()
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=60))
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(words=st.lists(st.sampled_from([*" ".join(SENTENCES).split(" "), "\n\n", "😀", "中文", "'s", "."]), max_size=30))
def test_pieces_join_to_the_whole_text_for_real_text(kind: str, words: list[str]) -> None:
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode(" ".join(words), add_special_tokens=False)
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_no_piece_of_valid_text_holds_half_a_character(kind: str) -> None:
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode("a 😀 and 日本語 here", add_special_tokens=False)
    assert len(ids) > len("a 😀 and 日本語 here") - 5
    assert all("\ufffd" not in piece for piece in pieces_of(tokenizer, ids))


def test_a_character_comes_as_soon_as_its_last_token_is_there() -> None:
    tokenizer = byte_level_bpe()
    ids = tokenizer.encode("中", add_special_tokens=False)
    assert len(ids) == 3
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.add([token]) for token in ids] == ["", "", "中"]


def test_half_a_character_at_the_end_comes_with_finish() -> None:
    tokenizer = byte_level_bpe()
    detokenizer = IncrementalDetokenizer(tokenizer)
    ids = tokenizer.encode("ok 中", add_special_tokens=False)[:-1]
    assert detokenizer.add(ids) == "ok "
    assert detokenizer.finish() == "\ufffd"


def test_byte_tokens_wait_for_the_end_of_their_run() -> None:
    tokenizer = byte_fallback_bpe()
    complete = tokenizer.convert_tokens_to_ids(["<0xE4>", "<0xB8>", "<0xAD>"])
    stray = tokenizer.convert_tokens_to_ids(["<0x80>"])
    after = tokenizer.encode("fox", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.add(complete) == ""
    assert detokenizer.add(after) == "中 fox"
    # One byte too many turns the whole run into replacements, so nothing of it may have been given out.
    assert tokenizer.decode(complete + stray + after) == "\ufffd" * 4 + " fox"
    assert "".join(pieces_of(tokenizer, complete + stray + after)) == "\ufffd" * 4 + " fox"


def test_a_space_waits_while_punctuation_could_take_it_away() -> None:
    tokenizer = word_piece()
    ids = tokenizer.encode("the dog , the fox .", add_special_tokens=False)
    assert tokenizer.decode(ids) == "the dog, the fox."
    assert "".join(pieces_of(tokenizer, ids)) == "the dog, the fox."


def test_several_tokens_may_come_at_once() -> None:
    tokenizer = byte_level_bpe()
    ids = tokenizer.encode(SENTENCES[0] + SENTENCES[3], add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer)
    chunks = [detokenizer.add(ids[start : start + 7]) for start in range(0, len(ids), 7)]
    assert "".join(chunks) + detokenizer.finish() == SENTENCES[0] + SENTENCES[3]


def test_special_tokens_give_no_text() -> None:
    tokenizer = byte_level_bpe()
    detokenizer = IncrementalDetokenizer(tokenizer)
    ids = tokenizer.encode("hello", add_special_tokens=False)
    assert detokenizer.add([tokenizer.eos_token_id, *ids, tokenizer.eos_token_id]) == "hello"
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_shown_special_tokens_are_text_and_others_are_not(kind: str, data: st.DataObject) -> None:
    tokenizer = copy.deepcopy(KINDS[kind]())
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in ("<call>", "<hidden>")], special_tokens=True)
    shown, hidden = tokenizer.convert_tokens_to_ids(["<call>", "<hidden>"])
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1) | st.sampled_from([shown, hidden]), max_size=30))
    detokenizer = IncrementalDetokenizer(tokenizer, shown=["<call>", "words"])
    text = "".join([detokenizer.add([token]) for token in ids]) + detokenizer.finish()
    left_out = {hidden, *tokenizer.all_special_ids}
    assert text == tokenizer.decode([token for token in ids if token not in left_out])
    assert text.count("<call>") >= ids.count(shown)
    assert "<hidden>" not in text


def test_the_beginning_of_a_held_back_text_waits() -> None:
    tokenizer = byte_level_bpe()
    detokenizer = IncrementalDetokenizer(tokenizer, hold_back=["\nUser", "END"])
    given = ["hi", "\n", "U", "n", "E", "N", "d", "\n"]
    got = [detokenizer.add(tokenizer.encode(text, add_special_tokens=False)) for text in given]
    assert got == ["hi", "", "", "\nUn", "", "", "ENd", ""]
    assert detokenizer.finish() == "\n"


def test_finish_gives_the_rest_of_a_text_cut_at_a_stop_string() -> None:
    tokenizer = byte_level_bpe()
    detokenizer = IncrementalDetokenizer(tokenizer, hold_back=["STOP"])
    shown = detokenizer.add(tokenizer.encode("one twoST", add_special_tokens=False))
    assert shown == "one two"
    assert detokenizer.finish("one two") == ""


def test_each_token_decodes_few_others_however_long_the_text() -> None:
    tokenizer = byte_level_bpe()
    ids = tokenizer.encode(" ".join(SENTENCES) * 20, add_special_tokens=False)
    decoded: list[int] = []

    class Counting:
        def __getattr__(self, name: str) -> object:
            return getattr(tokenizer, name)

        def decode(self, token_ids: list[int], **options: object) -> str:
            decoded.append(len(token_ids))
            return tokenizer.decode(token_ids, **options)

    text = "".join(pieces_of(Counting(), ids))  # type: ignore[arg-type]
    assert text == tokenizer.decode(ids)
    assert len(ids) > 3000
    assert max(decoded) <= 32
    assert sum(decoded) <= 20 * len(ids)


def test_invalid_bytes_without_end_stay_cheap() -> None:
    tokenizer = byte_level_bpe()
    stray = next(token for token in range(len(tokenizer)) if tokenizer.decode([token]) == "\ufffd")
    detokenizer = IncrementalDetokenizer(tokenizer)
    got = [detokenizer.add([stray]) for _ in range(300)]
    assert len(detokenizer._window) <= 32
    assert "".join(got) + detokenizer.finish() == tokenizer.decode([stray] * 300)


def test_a_tokenizer_that_decodes_in_its_own_way_is_asked() -> None:
    stock = byte_level_bpe()

    class Loud(PreTrainedTokenizerFast):
        def _decode(self, *args: object, **options: object) -> str:
            return super()._decode(*args, **options).upper()

    tokenizer = Loud(tokenizer_object=stock.backend_tokenizer)
    ids = stock.encode("quiet words", add_special_tokens=False)
    assert "".join(pieces_of(stock, ids)) == "quiet words"
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids) == "QUIET WORDS"
    stock.decode = lambda token_ids, **options: "mine"[: len(token_ids)]  # type: ignore[method-assign]
    try:
        assert "".join(pieces_of(stock, [5, 6, 7, 8])) == "mine"
    finally:
        del stock.decode


def test_threads_that_hold_the_lock_share_a_tokenizer() -> None:
    tokenizer = byte_level_bpe()
    text = SENTENCES[0] * 5

    def use(seed: int) -> bool:
        # Padding changes the fast tokenizer itself, which fails while another thread decodes with it.
        for _ in range(30):
            with tokenizer_lock(tokenizer):
                ids = tokenizer(text, padding="max_length", max_length=400 + seed, truncation=True)["input_ids"]
            length = random.Random(seed).randint(1, 400)
            if "".join(pieces_of(tokenizer, ids[:length][:40])) != text[: len(tokenizer.decode(ids[:length][:40]))]:
                return False
        return True

    tokenizer.pad_token = tokenizer.eos_token
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(use, range(4)))


def test_a_tokenizer_has_one_lock() -> None:
    assert tokenizer_lock(byte_level_bpe()) is tokenizer_lock(byte_level_bpe())
    assert tokenizer_lock(byte_level_bpe()) is not tokenizer_lock(word_piece())

"""BatchStreamer hands out the text of every row as it is generated."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from queue import Empty

import pytest
from stock_equality import LENGTH, left_padded
from tiny_models import make_tiny
from tiny_tokenizers import byte_fallback_bpe, byte_level_bpe

from paged_backend import BatchStreamer

LENGTHS = [7, 1, 23, 12]


@pytest.fixture(scope="module", params=[byte_level_bpe, byte_fallback_bpe], ids=["byte level", "byte fallback"])
def setting(request):
    """A tokenizer, a model of its vocabulary, and a padded batch."""
    tokenizer = request.param()
    return tokenizer, make_tiny("llama", vocab_size=len(tokenizer)), left_padded(LENGTHS, vocab_size=len(tokenizer))


def streamed(setting, cache_impl, skip_prompt=True, **options):
    tokenizer, model, inputs = setting
    # These calls have no end-of-sequence token unless they say so, but their tokenizers do.
    eos = options.get("eos_token_id") or ()
    streamer = BatchStreamer(tokenizer, skip_prompt=skip_prompt, eos_token_id=eos, timeout=60)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(
            model.generate, **inputs, **{**LENGTH, **options}, cache_impl=cache_impl, streamer=streamer
        )
        pieces = list(streamer)
        texts = ["".join(text for r, text in pieces if r == row) for row in range(len(LENGTHS))]
        return pieces, texts, future.result()


@pytest.mark.parametrize("cache_impl", [None, "paged"])
def test_the_pieces_of_a_row_join_to_its_text(setting, cache_impl):
    tokenizer = setting[0]
    pieces, texts, out = streamed(setting, cache_impl)
    assert texts == [tokenizer.decode(row[23:], skip_special_tokens=True) for row in out]
    assert len(pieces) > len(LENGTHS)
    assert all(piece.text for piece in pieces)


def test_rows_take_turns(setting):
    pieces, _, _ = streamed(setting, "paged")
    rows = [piece.row for piece in pieces]
    assert rows != sorted(rows)


def test_prompts_come_first_unless_they_are_skipped(setting):
    tokenizer, _, inputs = setting
    _, texts, out = streamed(setting, "paged", skip_prompt=False)
    for row, text in enumerate(texts):
        assert text == tokenizer.decode(out[row], skip_special_tokens=True)
        assert text.startswith(tokenizer.decode(inputs["input_ids"][row, -LENGTHS[row] : -1])[:1])


@pytest.mark.parametrize("cache_impl", [None, "paged"])
def test_a_row_ends_at_its_end_of_sequence_token(setting, cache_impl):
    tokenizer, model, inputs = setting
    new = model.generate(**inputs, **LENGTH)[:, 23:]
    eos = int(new[1, 5])
    # A padding token that is no special token would show.
    _, texts, out = streamed(setting, cache_impl, eos_token_id=eos, pad_token_id=70)
    for row, text in enumerate(texts):
        tokens = out[row, 23:].tolist()
        kept = tokens[: tokens.index(eos) + 1] if eos in tokens else tokens
        assert text == tokenizer.decode(kept, skip_special_tokens=True)


def test_a_row_of_the_paged_engine_ends_where_anything_ends_it(setting):
    tokenizer, model, inputs = setting
    stop = int(model.generate(**inputs, **LENGTH)[2, 23 + 3])

    def criterion(input_ids, scores):
        return input_ids[:, -1] == stop

    _, texts, out = streamed(
        setting, "paged", stopping_criteria=[criterion], eos_token_id=len(tokenizer) - 1, pad_token_id=70
    )
    assert texts[2] == tokenizer.decode(out[2, 23 : 23 + 4], skip_special_tokens=True)


def test_a_streamer_serves_one_call_after_another(setting):
    tokenizer, model, inputs = setting
    streamer = BatchStreamer(tokenizer, eos_token_id=(), timeout=60)
    first = model.generate(**inputs, **LENGTH, cache_impl="paged", streamer=streamer)
    one_row = {name: value[2:3] for name, value in inputs.items()}
    model.generate(**one_row, **LENGTH, cache_impl="paged", streamer=streamer)
    texts = [list(streamer), list(streamer)]
    expected = tokenizer.decode(first[2, 23:], skip_special_tokens=True)
    assert ["".join(text for row, text in pieces if row == at) for pieces, at in zip(texts, (2, 0), strict=True)] == [
        expected
    ] * 2


def test_waiting_for_text_ends_after_the_timeout(setting):
    with pytest.raises(Empty):
        next(iter(BatchStreamer(setting[0], timeout=0.01)))


def test_on_text_may_be_overridden(setting):
    tokenizer, model, inputs = setting

    class Collects(BatchStreamer):
        texts = [""] * len(LENGTHS)

        def on_text(self, row, text):
            self.texts[row] += text

    streamer = Collects(tokenizer, eos_token_id=())
    out = model.generate(**inputs, **LENGTH, cache_impl="paged", streamer=streamer)
    assert streamer.texts == [tokenizer.decode(row[23:], skip_special_tokens=True) for row in out]

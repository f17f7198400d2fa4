"""Tokenizers of the usual kinds, trained in memory on a few sentences, and one of single bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, doesn't it? Yes! It's 3.14 or so; they've seen it.",
    "Stop here. User: hello\n\nAssistant: hi there, how are you?\n",
    "Größe und Straße, naïve café, Ελληνικά, русский текст",
    "日本語の文章と中文字符、混在。",
    "emoji 😀 family 👩‍👩‍👧 flag 🇩🇪 done",
]

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")
CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"


def byte_tokenizer(chat_template: str | None = CHAT_TEMPLATE, marks: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are the 256 bytes, after the three special tokens that tiny models expect.

    marks: further special tokens, after the bytes.
    """
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, bos, eos = SPECIAL_TOKENS
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos)
    fast.chat_template = chat_template
    fast.add_tokens([AddedToken(mark, special=True) for mark in marks], special_tokens=True)
    return fast


@cache
def byte_level_bpe(vocab_size: int = 330) -> PreTrainedTokenizerFast:
    """As GPT-2's: any byte is a token, so most emoji and CJK characters are split over tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


@cache
def byte_fallback_bpe() -> PreTrainedTokenizerFast:
    """As Llama 2's: words begin with U+2581; characters outside the vocabulary are spelt in bytes such as <0xE4>."""
    words = [("▁" + sentence.replace(" ", "▁")) for sentence in SENTENCES[:2]]
    trained = Tokenizer(models.BPE())
    trained.train_from_iterator(words, trainers.BpeTrainer(vocab_size=140, show_progress=False))
    learned = json.loads(trained.to_str())["model"]
    # Bytes are ordinary tokens of the vocabulary: as special ones, decoding would skip them.
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learned["vocab"]]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [(left, right) for left, right in learned["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@cache
def word_piece() -> PreTrainedTokenizerFast:
    """As BERT's: pieces within a word begin with ##, and decoding takes spaces out before punctuation."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer: Any = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=["[UNK]", "[SEP]"], show_progress=False, continuing_subword_prefix="##"
    )
    tokenizer.train_from_iterator(SENTENCES[:2], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[SEP]", clean_up_tokenization_spaces=True
    )

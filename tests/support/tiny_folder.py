"""A tiny random model and a tokenizer of bytes, saved as a folder that ``from_pretrained`` reads."""

from __future__ import annotations

from pathlib import Path

from tiny_models import make_tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")
CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"


def byte_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are the 256 bytes, after the three special tokens that tiny models expect."""
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, bos, eos = SPECIAL_TOKENS
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos)
    fast.chat_template = chat_template
    return fast


def save_tiny(folder: Path, family: str = "llama", max_positions: int = 2048) -> Path:
    """Save a tiny model of `family` and its tokenizer; returns the folder."""
    tokenizer = byte_tokenizer()
    make_tiny(family, vocab_size=len(tokenizer), max_position_embeddings=max_positions).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

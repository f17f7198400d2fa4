"""The tokens that end a turn of a chat."""

from __future__ import annotations

import weakref
from typing import Any

from paged_backend.sampling.detokenizer import tokenizer_lock

# By the template and the end of sequence, which their owner may replace.
_written: weakref.WeakKeyDictionary[Any, dict[tuple[str, Any], tuple[int, ...]]] = weakref.WeakKeyDictionary()


def turn_end_ids(engine: Any, chat_template: str | None = None) -> tuple[int, ...]:
    """The token ids that end an answer in a chat with the model of ``engine``, for ``stop_token_ids``.

    The tokenizer's end-of-sequence token, and the special token that the chat template writes behind an answer: the
    model's generation config may list neither. chat_template: in place of the tokenizer's own.
    """
    tokenizer = engine.tokenizer
    key = (chat_template or repr(tokenizer.chat_template), tokenizer.eos_token_id)
    known = _written.setdefault(tokenizer, {})
    if key not in known:
        ends = {tokenizer.eos_token_id, _behind_an_answer(tokenizer, chat_template)} - {None}
        known[key] = tuple(sorted(ends))
    vocab_size = engine.twin.vocab_size
    # A tokenizer may know tokens that the model cannot write.
    return tuple(token for token in known[key] if token < vocab_size)


def _behind_an_answer(tokenizer: Any, chat_template: str | None) -> int | None:
    answer = "This is it."
    messages = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": answer}]
    try:
        with tokenizer_lock(tokenizer):
            text = tokenizer.apply_chat_template(messages, chat_template=chat_template, tokenize=False)
            tokens = {token.content: token_id for token_id, token in tokenizer.added_tokens_decoder.items()}
    except Exception:
        # Templates are programs, which raise what they like for a conversation that they do not take.
        return None
    _, found, rest = text.rpartition(answer)
    written = [token for token in tokens if token and rest.lstrip().startswith(token)] if found else []
    return tokens[max(written, key=len)] if written else None

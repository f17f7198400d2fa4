"""BoundChat: a chat model together with arguments of its calls, with which its prompts are counted too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableBinding


class BoundChat(RunnableBinding[Any, Any]):
    """What ``ChatPaged.bind`` and ``bind_tools`` return."""

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """No, as the model."""
        return False

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Any] | None = None, **kwargs: Any
    ) -> int:
        """How many tokens the prompt of these messages has, in a call with what is bound; arguments here win."""
        given = {"tools": tools} if tools is not None else {}
        chat: Any = self.bound
        count: int = chat.get_num_tokens_from_messages(messages, **{**self.kwargs, **given, **kwargs})
        return count

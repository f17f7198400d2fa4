"""LangChain's model classes over the paged engine: ChatPaged for chats and agents, PagedLLM for plain texts."""

from __future__ import annotations

from paged_backend import __version__ as __version__
from paged_backend.integrations.langchain.chat_models import ChatPaged as ChatPaged
from paged_backend.integrations.langchain.llms import PagedLLM as PagedLLM

__all__ = ["ChatPaged", "PagedLLM", "__version__"]

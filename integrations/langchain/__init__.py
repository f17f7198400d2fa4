"""LangChain's model classes over the paged engine: ChatPaged and PagedLLM."""

from __future__ import annotations

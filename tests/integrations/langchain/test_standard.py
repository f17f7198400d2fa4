"""LangChain's own standard tests of chat models, with everything on, over a model whose words are written here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests
from scripted_engine import scripted_service, write_sensibly

from paged_backend.integrations.langchain import ChatPaged, engines

OTHER_MODEL = "scripted/other"


@pytest.fixture(scope="module", autouse=True)
def scripted_models() -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    patch.setattr(engines, "load_service", lambda model, options: scripted_service(write_sensibly, **options))
    # Held through the module, so that it loads once.
    held = [ChatPaged(model=name) for name in ("scripted/model", OTHER_MODEL)]
    yield
    del held
    patch.undo()


class TestChatPagedUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[ChatPaged]:
        return ChatPaged

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "scripted/model"}


class TestChatPagedIntegration(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[ChatPaged]:
        return ChatPaged

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "scripted/model"}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return OTHER_MODEL

    @property
    def supported_usage_metadata_details(self) -> dict[str, Any]:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        chat = ChatPaged(**self.chat_model_params)
        question = "Which of these words is the longest, and which the shortest? " + Path(__file__).stem
        chat.invoke(question)
        if not stream:
            return chat.invoke(question)
        chunks = list(chat.stream(question))
        merged = chunks[0]
        for chunk in chunks[1:]:
            merged += chunk
        assert merged.usage_metadata is not None
        assert merged.usage_metadata["input_token_details"]["cache_read"] > 0
        return merged

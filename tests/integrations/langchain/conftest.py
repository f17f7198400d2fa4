"""A tiny random model behind both classes, and what its engine was seen doing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from langchain_core.globals import set_llm_cache
from scripted_engine import ScriptedService, scripted_service
from service_checks import assert_idle, wait_until

from paged_backend import hookimpl
from paged_backend.integrations.langchain import ChatPaged, PagedLLM, engines

# What differs in plumbing alone runs on the scripted model; real weights take seconds for each.
_PLUMBING = (
    "_async",
    "[model1]",
    "test_bind_runnables_as_tools",
    "test_structured_few_shot_examples",
    "test_structured_output[pydantic]",
    "test_structured_output[typeddict]",
    "test_structured_output_optional_param",
    "test_structured_output_pydantic_2_v1",
    "test_tool_calling_with_no_arguments",
    "test_tool_message_",
    "test_unicode_tool_call",
    "test_usage_metadata_streaming",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out those of LangChain's tests over real weights that repeat others."""
    items[:] = [
        item
        for item in items
        if item.path.name != "test_sample_model.py" or not any(name in item.name for name in _PLUMBING)
    ]


class Seen:
    """A plugin that counts steps and how many requests ran at once."""

    def __init__(self) -> None:
        self.peak = self.steps = self.running = self.waiting = 0

    @hookimpl
    def step_finished(self, stats: object) -> None:
        self.steps += 1
        # A step reports after its requests ended; it ran those too.
        self.peak = max(self.peak, stats.num_running + stats.num_finished)
        self.running, self.waiting = stats.num_running, stats.num_waiting

    def reset(self) -> None:
        self.peak = self.steps = 0


@pytest.fixture(scope="module")
def watcher() -> Seen:
    return Seen()


@pytest.fixture(scope="module")
def service(watcher: Seen) -> Iterator[ScriptedService]:
    """Says what its random weights say, unless a test gives it a ``writer``."""
    service = scripted_service(lambda prompt, params: None, plugins=[watcher])
    yield service
    service.close(graceful=False)
    service.engine.close()


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    engines._idle.clear()
    set_llm_cache(None)
    # What needs no engine is not to wait for one.
    if "service" not in request.fixturenames:
        return
    service: ScriptedService = request.getfixturevalue("service")
    service.writer = lambda prompt, params: None
    service.prompts.clear()
    service.params.clear()
    wait_until(lambda: service.num_unfinished == 0)
    service.pause()
    try:
        # By its answer the paused thread has handed out what had ended before.
        service.stats()
        assert_idle(service.engine)
    finally:
        service.resume()


@pytest.fixture
def seen(watcher: Seen) -> Seen:
    watcher.reset()
    return watcher


@pytest.fixture
def chat(service: ScriptedService) -> ChatPaged:
    return ChatPaged.from_engine(service, model="tiny", max_tokens=12, ignore_eos=True)


@pytest.fixture
def llm(service: ScriptedService) -> PagedLLM:
    return PagedLLM.from_engine(service, model="tiny", max_tokens=12, ignore_eos=True)

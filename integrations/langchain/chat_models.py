"""ChatPaged: LangChain's chat class over the paged engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.language_models.model_profile import ModelProfile
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult, LLMResult
from langchain_core.runnables import Runnable
from langchain_core.runnables.config import ContextThreadPoolExecutor
from langchain_core.tools import BaseTool
from pydantic import Field, model_validator

from paged_backend import __version__
from paged_backend.integrations.chat.chat_request import SETTINGS, ChatRequest, chat_request, tool_choice
from paged_backend.integrations.chat.response_parser import Piece
from paged_backend.integrations.chat.token_counts import num_tokens_of
from paged_backend.integrations.chat.token_usage import token_usage
from paged_backend.integrations.langchain.batches import BatchesTogether
from paged_backend.integrations.langchain.bound_chat import BoundChat
from paged_backend.integrations.langchain.cancel_scope import CancelScope
from paged_backend.integrations.langchain.errors import translated
from paged_backend.integrations.langchain.messages import template_messages
from paged_backend.integrations.langchain.paged_model import SCHEDULING, PagedModel
from paged_backend.integrations.langchain.profiles import profile_of
from paged_backend.integrations.langchain.results import details, usage_metadata
from paged_backend.integrations.langchain.structured_output import structured_output
from paged_backend.integrations.langchain.tools import openai_tools

if TYPE_CHECKING:
    from paged_backend import RequestOutput


class ChatPaged(BatchesTogether, PagedModel, BaseChatModel):
    """Chats on a paged engine; everybody's conversations share its running batch and its prefix cache.

        chat = ChatPaged(model="path/to/model", temperature=0.7)
        chat.invoke([("system", "Answer briefly."), ("user", "Why is the sky blue?")])
        chat.bind_tools([my_tool]).invoke("..."); chat.with_structured_output(MySchema).invoke("...")

    Objects of equal ``model`` and ``engine_kwargs`` share one engine, loaded on first use and closed ``keep_alive``
    seconds after the last of them. Each sampling parameter may be given to the constructor, to a call, to ``bind`` or
    as a configurable field. Forced tool choices and structured output need the extra ``structured``.
    """

    chat_template: str | None = None
    """Instead of the tokenizer's own."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further variables of the template, such as ``enable_thinking``."""
    tool_parser: Any = None
    """How the model writes tool calls: "hermes", "llama3", "mistral", "json", or a callable from the whole text to
    (content, [(name, arguments)]); by default what the chat template shows."""
    reasoning_tags: tuple[str, str] | Literal["auto"] | None = "auto"
    """What stands around reasoning, which becomes ``additional_kwargs["reasoning_content"]`` and a content block; by
    default ``<think>`` and ``</think>``, or ``[THINK]`` and ``[/THINK]``, where the template has them."""
    stream_usage: bool = True

    call_arguments: ClassVar[frozenset[str]] = frozenset(
        {"tools", "tool_choice", "parallel_tool_calls", "response_format", "strict", "stream_usage", *SETTINGS}
    )

    @property
    def _llm_type(self) -> str:
        return "chat-paged"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        return {
            **self._key_params({}),
            "stop_sequences": self.stop,
            "chat_template": self.chat_template,
            "chat_template_kwargs": self.chat_template_kwargs,
            "tool_parser": self.tool_parser,
            "reasoning_tags": self.reasoning_tags,
        }

    @model_validator(mode="after")
    def _set_paged_backend_version(self) -> Self:
        self._add_version("paged-backend", __version__)
        return self

    def _resolve_model_profile(self) -> ModelProfile | None:
        return profile_of(self.model, self.chat_template, self.engine)

    def _follow(self) -> None:
        super()._follow()
        # One of the user's own has another name or none.
        if self.profile is None or self.profile.get("name") not in (None, self.model):
            self.profile = self._resolve_model_profile()

    def _turn_ends(self, engine: Any, kwargs: Mapping[str, Any]) -> Sequence[int]:
        from paged_backend import turn_end_ids

        return turn_end_ids(engine, kwargs.get("chat_template", self.chat_template))

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = "paged"
        params["ls_model_name"] = kwargs.get("model") or self.model
        return params

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        rest = {name: value for name, value in kwargs.items() if name not in SCHEDULING}
        params = {**self._identifying_params, **rest, **self._key_params(kwargs), "stop": self._stops(stop)}
        return repr(sorted(params.items()))

    def _combine_llm_outputs(self, outputs: list[dict[str, Any] | None], /) -> dict[str, Any]:
        found = [output for output in outputs if output]
        usages = [output["token_usage"] for output in found]
        names = ("prompt_tokens", "completion_tokens", "total_tokens")
        if not usages:
            return {}
        total = {name: sum(usage[name] for usage in usages) for name in names}
        return {"token_usage": total, "model_name": found[0]["model_name"]}

    # Generating

    def generate(
        self, messages: list[list[BaseMessage]], stop: list[str] | None = None, *args: Any, **kwargs: Any
    ) -> LLMResult:
        """Run all conversations in one batch; core would run one after the other."""
        if len(messages) < 2:
            return super().generate(messages, stop, *args, **kwargs)
        one = super().generate
        run_id = kwargs.pop("run_id", None)
        limit = min(len(messages), self.engine.max_num_seqs)
        with ContextThreadPoolExecutor(max_workers=limit) as executor, CancelScope() as scope:
            ids = [run_id, *[None] * (len(messages) - 1)]
            futures = [
                executor.submit(one, [conversation], stop, *args, run_id=each, **kwargs)
                for conversation, each in zip(messages, ids, strict=True)
            ]
            try:
                # Once one has failed, nobody waits for the others.
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                results = [future.result() for future in futures if future in done]
            except BaseException:
                executor.shutdown(wait=False, cancel_futures=True)
                scope.cancel()
                raise
        return LLMResult(
            generations=[result.generations[0] for result in results],
            llm_output=self._combine_llm_outputs([result.llm_output for result in results]),
            run=[run for result in results for run in result.run or ()],
        )

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        service = self._handle(kwargs).service()
        request = self._request(service, messages, kwargs)
        handle = self._submit(service, request.prompt, stop, kwargs, **request.sampling)
        return self._result(request, self._wait(handle), service, kwargs)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        service = await self._handle(kwargs).aservice()
        request = self._request(service, messages, kwargs)
        handle = self._submit(service, request.prompt, stop, kwargs, **request.sampling)
        return self._result(request, await self._await(handle), service, kwargs)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        service = self._handle(kwargs).service()
        request = self._request(service, messages, kwargs)
        handle = self._submit(service, request.prompt, stop, kwargs, **request.sampling, n=1)
        builder = _ChunkBuilder(self, request, service, kwargs)
        with closing(self._deltas(handle)) as deltas:
            for delta in deltas:
                for chunk in builder.chunks(delta.text):
                    if run_manager is not None:
                        run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk
        for chunk in builder.last(handle.outputs):
            if run_manager is not None:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        service = await self._handle(kwargs).aservice()
        request = self._request(service, messages, kwargs)
        handle = self._submit(service, request.prompt, stop, kwargs, **request.sampling, n=1)
        builder = _ChunkBuilder(self, request, service, kwargs)
        async with aclosing(self._adeltas(handle)) as deltas:
            async for delta in deltas:
                for chunk in builder.chunks(delta.text):
                    if run_manager is not None:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk
        for chunk in builder.last(handle.outputs):
            if run_manager is not None:
                await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    # Tools and structured output

    def bind(self, **kwargs: Any) -> Any:
        """As every Runnable's; what the result is asked is told of ``model``, and its counts of ``tools`` too."""
        binding = super().bind(**kwargs)
        return BoundChat(bound=binding.bound, kwargs=kwargs, config={})

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: dict[str, Any] | str | bool | None = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        response_format: Any = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Let the model call these tools.

        tool_choice: "auto" (the default), "none", "any", "required" or True, which force a call of any, or a tool's
        name, which forces a call of that one. Forced calls fit the tool's schema, by constrained decoding.
        parallel_tool_calls: False keeps the first call only. response_format: what an answer without a call must be.
        Further arguments are those of a call, such as ``priority``.
        """
        converted = openai_tools(tools, strict)
        _check_choice(tool_choice, converted)
        given = {
            "tool_choice": tool_choice,
            "parallel_tool_calls": parallel_tool_calls,
            "response_format": response_format,
        }
        return self.bind(
            tools=converted, **{name: value for name, value in given.items() if value is not None}, **kwargs
        )

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Answers as objects of a pydantic class, or as dictionaries of a TypedDict or JSON schema.

        method: "json_schema" holds the answer to the schema; "function_calling" forces a tool call, which shows the
        schema to the model too; "json_mode" holds it to being a JSON object, whose keys the prompt has to ask for.
        include_raw: a dictionary of ``raw``, ``parsed`` and ``parsing_error`` instead, which never raises for parsing.
        """
        return structured_output(self, schema, method, include_raw, strict, kwargs)

    # Tokens

    def get_token_ids(self, text: str) -> list[int]:
        """The ids of a text by itself."""
        return self._tokenize(text)

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Any] | None = None, **kwargs: Any
    ) -> int:
        """How many tokens the prompt of these messages and tools has; further arguments are those of a call."""
        if not messages:
            return 0
        service = self._handle(kwargs).service()
        return len(self._request(service, messages, {**kwargs, "tools": tools}).prompt)

    # Inside

    def _request(self, service: Any, messages: Sequence[BaseMessage], kwargs: Mapping[str, Any]) -> ChatRequest:
        tools = openai_tools(kwargs.get("tools"))
        with translated():
            return chat_request(self, self._tokenizer(service), template_messages(messages), {**kwargs, "tools": tools})

    def _result(
        self, request: ChatRequest, outputs: list[RequestOutput], service: Any, kwargs: Mapping[str, Any]
    ) -> ChatResult:
        messages, num_reasoning = [], 0
        for output in outputs:
            parser = request.parser()
            pieces = [*parser.feed(output.text), *parser.finish()]
            message = self._message(pieces)
            num_reasoning += self._count_reasoning(output, pieces, service)
            message.response_metadata = self._details(output, pieces, service, kwargs)
            messages.append(message)
        # Of all samples, told once.
        messages[0].usage_metadata = usage_metadata(outputs, num_reasoning)
        reasons = [{"finish_reason": message.response_metadata["finish_reason"]} for message in messages]
        generations = [
            ChatGeneration(message=message, generation_info=reason)
            for message, reason in zip(messages, reasons, strict=True)
        ]
        llm_output = {"token_usage": token_usage(outputs), "model_name": kwargs.get("model") or self.model}
        return ChatResult(generations=generations, llm_output=llm_output)

    def _message(self, pieces: Sequence[Piece]) -> AIMessage:
        reasoning = "".join(piece.reasoning for piece in pieces)
        return AIMessage(
            content="".join(piece.content for piece in pieces),
            additional_kwargs={"reasoning_content": reasoning} if reasoning else {},
            tool_calls=[tool_call(name=p.call[0], args=p.call[1], id=p.call_id) for p in pieces if p.call is not None],
            invalid_tool_calls=[
                invalid_tool_call(name=None, args=piece.malformed, id=piece.call_id, error=None)
                for piece in pieces
                if piece.malformed
            ],
        )

    def _details(
        self, output: RequestOutput, pieces: Sequence[Piece], service: Any, kwargs: Mapping[str, Any]
    ) -> dict[str, Any]:
        found = details(output, kwargs.get("model") or self.model, service.engine.tokenizer)
        if output.finish_reason == "stop" and any(piece.call is not None for piece in pieces):
            found["finish_reason"] = "tool_calls"
        stop = found.get("stop_reason")
        if isinstance(stop, int) and stop not in self._sampling(kwargs).get("stop_token_ids", ()):
            # The end of a turn, which nobody asked for.
            del found["stop_reason"]
        return found

    def _count_reasoning(self, output: RequestOutput, pieces: Sequence[Piece], service: Any) -> int:
        reasoning = "".join(piece.reasoning for piece in pieces)
        return num_tokens_of(reasoning, output, self._tokenizer(service)) if reasoning else 0


class _ChunkBuilder:
    """Turns text as it comes into chunks that add up to what ``_result`` would make of the whole."""

    def __init__(self, model: ChatPaged, request: ChatRequest, service: Any, kwargs: Mapping[str, Any]) -> None:
        self._model = model
        self._service = service
        self._kwargs = kwargs
        self._parser = request.parser()
        self._pieces: list[Piece] = []

    def chunks(self, text: str) -> Iterator[ChatGenerationChunk]:
        yield from map(self._chunk, self._parser.feed(text))

    def last(self, outputs: list[RequestOutput]) -> Iterator[ChatGenerationChunk]:
        yield from map(self._chunk, self._parser.finish())
        message = AIMessageChunk(
            content="",
            chunk_position="last",
            response_metadata=self._model._details(outputs[0], self._pieces, self._service, self._kwargs),
        )
        if self._kwargs.get("stream_usage", self._model.stream_usage):
            num_reasoning = self._model._count_reasoning(outputs[0], self._pieces, self._service)
            message.usage_metadata = usage_metadata(outputs, num_reasoning)
        yield ChatGenerationChunk(message=message)

    def _chunk(self, piece: Piece) -> ChatGenerationChunk:
        self._pieces.append(piece)
        calls = []
        if piece.call is not None or piece.malformed:
            name, args = (piece.call[0], json.dumps(piece.call[1])) if piece.call else (None, piece.malformed)
            # It is whole: with an index it would be merged with the text of that index, where content comes as blocks.
            calls.append(tool_call_chunk(name=name, args=args, id=piece.call_id, index=None))
        return ChatGenerationChunk(
            message=AIMessageChunk(
                content=piece.content,
                additional_kwargs={"reasoning_content": piece.reasoning} if piece.reasoning else {},
                tool_call_chunks=calls,
            )
        )


def _check_choice(choice: Any, tools: list[dict[str, Any]]) -> None:
    # Within bind_tools the name is its argument's.
    with translated():
        tool_choice(choice, tools)

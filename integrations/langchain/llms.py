"""PagedLLM: LangChain's text completion class over the paged engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from langchain_core.tracers._streaming import _StreamingCallbackHandler
from pydantic import model_validator

from paged_backend import __version__
from paged_backend.integrations.chat.token_usage import sum_usage, token_usage
from paged_backend.integrations.langchain.batches import BatchesTogether
from paged_backend.integrations.langchain.paged_model import SAMPLING, PagedModel
from paged_backend.integrations.langchain.results import details

if TYPE_CHECKING:
    from paged_backend import RequestOutput


class PagedLLM(BatchesTogether, PagedModel, BaseLLM):
    """Completes texts on a paged engine; everybody's prompts share its running batch.

        llm = PagedLLM(model="path/to/model", temperature=0.7, engine_kwargs={"max_num_seqs": 64})
        llm.invoke("Water boils at", stop=["."], max_tokens=20)
        llm.batch(prompts, {"max_concurrency": 32}, return_exceptions=True)

    Objects of equal ``model`` and ``engine_kwargs`` share one engine, loaded on first use and closed ``keep_alive``
    seconds after the last of them. Each sampling parameter may be given to the constructor, to a call, to ``bind`` or
    as a configurable field.
    """

    @property
    def _llm_type(self) -> str:
        return "paged-llm"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        return {**self._key_params({}), "stop_sequences": self.stop}

    @model_validator(mode="after")
    def _set_paged_backend_version(self) -> Self:
        self._add_version("paged-backend", __version__)
        return self

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = "paged"
        params["ls_model_name"] = kwargs.get("model") or self.model
        return params

    # Core's cache looks at the fields of the model and not at the arguments of a call, so these become fields.

    def generate(self, prompts: list[str], stop: list[str] | None = None, *args: Any, **kwargs: Any) -> LLMResult:
        model, kwargs = self._with_fields(kwargs)
        return super(PagedLLM, model).generate(prompts, stop, *args, **kwargs)

    async def agenerate(
        self, prompts: list[str], stop: list[str] | None = None, *args: Any, **kwargs: Any
    ) -> LLMResult:
        model, kwargs = self._with_fields(kwargs)
        return await super(PagedLLM, model).agenerate(prompts, stop, *args, **kwargs)

    def _with_fields(self, kwargs: dict[str, Any]) -> tuple[Self, dict[str, Any]]:
        names = {*SAMPLING, "logprobs", "top_logprobs"} & set(kwargs)
        fields = {name: kwargs[name] for name in names if kwargs[name] is not None}
        if kwargs.get("model") not in (None, self.model):
            fields |= {"model": kwargs["model"], "engine": self._handle(kwargs)}
        rest = {name: value for name, value in kwargs.items() if name not in names and name != "model"}
        return self.model_copy(update=fields), rest

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        if self._streams_tokens(prompts, run_manager, kwargs):
            return _merged(list(self._stream(prompts[0], stop, run_manager, **kwargs)))
        service = self._handle(kwargs).service()
        handles = [self._submit(service, self._tokenize(prompt, service), stop, kwargs) for prompt in prompts]
        try:
            return self._result([self._wait(handle) for handle in handles], service, kwargs)
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        if self._streams_tokens(prompts, run_manager, kwargs):
            return _merged([chunk async for chunk in self._astream(prompts[0], stop, run_manager, **kwargs)])
        service = await self._handle(kwargs).aservice()
        handles = [self._submit(service, self._tokenize(prompt, service), stop, kwargs) for prompt in prompts]
        try:
            return self._result([await self._await(handle) for handle in handles], service, kwargs)
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        service = self._handle(kwargs).service()
        handle = self._submit(service, self._tokenize(prompt, service), stop, kwargs, n=1)
        with closing(self._deltas(handle)) as deltas:
            for delta in deltas:
                chunk = self._chunk(delta.text, handle.outputs if delta.finish_reason else None, service, kwargs)
                if run_manager is not None:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        service = await self._handle(kwargs).aservice()
        handle = self._submit(service, self._tokenize(prompt, service), stop, kwargs, n=1)
        async with aclosing(self._adeltas(handle)) as deltas:
            async for delta in deltas:
                chunk = self._chunk(delta.text, handle.outputs if delta.finish_reason else None, service, kwargs)
                if run_manager is not None:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def get_token_ids(self, text: str) -> list[int]:
        """The ids that a prompt of this text has."""
        return self._tokenize(text)

    def _streams_tokens(self, prompts: list[str], run_manager: Any, kwargs: dict[str, Any]) -> bool:
        """Whether somebody listens to the tokens of the one prompt."""
        stream = kwargs.pop("stream", None)
        if len(prompts) != 1 or run_manager is None or self._sampling(kwargs).get("n", 1) > 1:
            return False
        listens = any(isinstance(handler, _StreamingCallbackHandler) for handler in run_manager.handlers)
        return bool(self.streaming or stream or listens)

    def _chunk(
        self, text: str, ended: list[RequestOutput] | None, service: Any, kwargs: dict[str, Any]
    ) -> GenerationChunk:
        info = self._info(ended[0], ended, service, kwargs) if ended and ended[0].finished else None
        # A timeout and the like raise instead of ending well.
        return GenerationChunk(text=text, generation_info=info)

    def _info(
        self, output: RequestOutput, outputs: list[RequestOutput], service: Any, kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        info = details(output, kwargs.get("model") or self.model, self._tokenizer(service))
        return {**info, "token_usage": token_usage(outputs)}

    def _result(self, ended: list[list[RequestOutput]], service: Any, kwargs: dict[str, Any]) -> LLMResult:
        generations = [
            [
                Generation(text=output.text, generation_info=self._info(output, outputs, service, kwargs))
                for output in outputs
            ]
            for outputs in ended
        ]
        usage = sum_usage([token_usage(outputs) for outputs in ended])
        llm_output = {"token_usage": usage, "model_name": kwargs.get("model") or self.model}
        return LLMResult(generations=generations, llm_output=llm_output)


def _merged(chunks: list[GenerationChunk]) -> LLMResult:
    merged = chunks[0]
    for chunk in chunks[1:]:
        merged += chunk
    info = merged.generation_info or {}
    generation = Generation(text=merged.text, generation_info=info)
    llm_output = {"token_usage": info["token_usage"], "model_name": info["model_name"]}
    return LLMResult(generations=[[generation]], llm_output=llm_output)

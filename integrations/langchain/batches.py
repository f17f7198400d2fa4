"""BatchesTogether: batch methods that put every input into the engine's running batch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import ContextThreadPoolExecutor, get_config_list
from langchain_core.runnables.utils import gather_with_concurrency

from paged_backend.integrations.langchain.cancel_scope import CancelScope


class BatchesTogether:
    """``batch`` and its like for a Runnable with an ``engine`` handle.

    As many inputs run at once as ``max_concurrency`` says, by default as many as the engine runs; the next one starts
    when any of them is done. Each input has its own callbacks and its own error. Left by an exception, or by breaking
    out of ``batch_as_completed``, a batch cancels what is left of it.
    """

    engine: Any

    def batch(
        self,
        inputs: list[Any],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        results = dict(self.batch_as_completed(inputs, config, return_exceptions=return_exceptions, **kwargs))
        return [results[index] for index in range(len(inputs))]

    def batch_as_completed(
        self,
        inputs: Sequence[Any],
        config: RunnableConfig | Sequence[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> Iterator[tuple[int, Any]]:
        if not inputs:
            return
        assert isinstance(self, Runnable)
        configs = get_config_list(config, len(inputs))
        limit = configs[0].get("max_concurrency") or self.engine.max_num_seqs
        scope = CancelScope()
        with ContextThreadPoolExecutor(max_workers=min(limit, len(inputs))) as executor:
            try:
                with scope:
                    futures: dict[Future[Any], int] = {
                        executor.submit(self.invoke, value, each, **kwargs): index
                        for index, (value, each) in enumerate(zip(inputs, configs, strict=True))
                    }
                waiting = set(futures)
                while waiting:
                    done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                    for future in sorted(done, key=futures.__getitem__):
                        error = future.exception()
                        if error is None:
                            yield futures[future], future.result()
                        elif return_exceptions and isinstance(error, Exception):
                            yield futures[future], error
                        else:
                            raise error
            except BaseException:
                executor.shutdown(wait=False, cancel_futures=True)
                scope.cancel()
                raise

    async def abatch(
        self,
        inputs: list[Any],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        if not inputs:
            return []
        configs = get_config_list(config, len(inputs))

        async def one(value: Any, each: RunnableConfig) -> Any:
            assert isinstance(self, Runnable)
            try:
                return await self.ainvoke(value, each, **kwargs)
            except Exception as error:
                if return_exceptions:
                    return error
                raise

        limit = configs[0].get("max_concurrency") or self.engine.max_num_seqs
        with CancelScope():
            return await gather_with_concurrency(limit, *map(one, inputs, configs))

    async def abatch_as_completed(
        self,
        inputs: Sequence[Any],
        config: RunnableConfig | Sequence[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> AsyncIterator[tuple[int, Any]]:
        assert isinstance(self, Runnable)
        configs = get_config_list(config, len(inputs)) if inputs else []
        limit = (configs[0].get("max_concurrency") if configs else None) or self.engine.max_num_seqs
        limited: Any = [{**each, "max_concurrency": limit} for each in configs]
        scope = CancelScope()
        # Not as a with block around the yields: a consumer may run in another context.
        try:
            core: Any = Runnable.abatch_as_completed
            stream = core(self, inputs, limited, return_exceptions=return_exceptions, **kwargs)
            while True:
                with scope:
                    try:
                        item = await anext(stream)
                    except StopAsyncIteration:
                        return
                yield item
        except BaseException:
            scope.cancel()
            raise

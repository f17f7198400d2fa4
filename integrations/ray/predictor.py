"""PagedPredictor: a callable that answers batches of rows, for ``ray.data.Dataset.map_batches``."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from paged_backend.checks import describe
from paged_backend.errors import ConfigError, EngineFailed, NotPicklable, RequestFailed, RequestRefused
from paged_backend.integrations.ray.answer import COLUMNS, Answer, columns
from paged_backend.integrations.ray.cells import is_missing, objects, plain
from paged_backend.integrations.ray.conversation import check_variables, prompt_ids
from paged_backend.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np

    from paged_backend import Handle

    Batch = dict[str, np.ndarray[Any, Any]]

# A row that is lost with the engine's thread is tried once more: it need not be the one that broke the step.
_NUM_TRIES = 2


class PagedPredictor:
    """Answers the prompts or chats of a dataset. Each actor makes one and with it an engine, which serves all batches.

        dataset.map_batches(
            PagedPredictor,
            fn_constructor_kwargs={"model": "path/to/model", "params": {"max_tokens": 64}},
            compute=ray.data.ActorPoolStrategy(size=2),
            num_cpus=1,
            batch_size=256,
        )

    A row's prompt is a text or token ids in ``prompt_column``, or a chat in OpenAI's form in ``messages_column``. Out
    come the row's own columns and those of ``Answer``: ``text``, ``token_ids``, ``finish_reason``,
    ``num_prompt_tokens``, ``num_output_tokens``, ``time_to_first_token_s`` and ``error``. A row that cannot be
    answered has an ``error``, and the others are answered.

    All rows of a batch wait in the engine's queue, so a batch should have several times as many rows as the engine
    runs at once (``max_num_seqs``). Nothing is kept from batch to batch but the engine, and its cache within
    ``kv_cache_memory``. It may be called from several threads, whose rows share the running batch.

    model: a folder or hub id, for ``Engine.from_pretrained``.
    params: SamplingParams or a mapping of its fields, for all rows. Without ``max_tokens`` an answer has as many
        as fit, up to 256. ``n`` above 1 and ``logprobs`` are refused.
    params_column: a column of such mappings, whose fields replace those of ``params``.
    output_prefix: what stands before the names of the result's columns, where they would hide the dataset's own.
    chat_template, chat_template_kwargs: in place of the tokenizer's template, and variables for it.
    model_kwargs: for ``AutoModelForCausalLM.from_pretrained``, such as ``dtype``.
    engine_options: of EngineConfig, such as ``kv_cache_memory``, ``max_num_seqs`` or ``scheduler``.

    Raises what ``Engine.from_pretrained`` raises, and ConfigError or RequestRefused for ``params`` that no row could
    have.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        params: SamplingParams | Mapping[str, Any] | None = None,
        *,
        prompt_column: str = "prompt",
        messages_column: str = "messages",
        params_column: str | None = None,
        output_prefix: str = "",
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        model_kwargs: Mapping[str, Any] | None = None,
        **engine_options: Any,
    ) -> None:
        from paged_backend import AsyncEngine, Engine

        if engine_options.get("max_waiting") is not None:
            raise ConfigError(
                f"max_waiting={engine_options['max_waiting']!r} has nothing to hold off: the rows of a batch are there "
                "already; leave it out, and bound them by batch_size of map_batches"
            )
        self._prompt_column = prompt_column
        self._messages_column = messages_column
        self._params_column = params_column
        self._output_prefix = output_prefix
        self._chat_template = chat_template
        self._variables = dict(chat_template_kwargs or {})
        check_variables(self._variables)
        self._sampling = _fields(params)
        _check_single(self._sampling)
        self._engine = Engine.from_pretrained(model, model_kwargs=model_kwargs, **engine_options)
        self._service = AsyncEngine(self._engine)
        self._starting = threading.Lock()
        try:
            # What no row could have is told before the first one.
            self._engine.prepare(*self._request([0]))
        except BaseException:
            self._engine.close()
            raise

    def __call__(self, batch: Batch) -> Batch:
        """The batch's columns, an array of [B] cells or [B, ...] each, and beside them those of ``Answer``, [B] each.

        Raises ConfigError for columns that do not fit what the predictor was told; a row's own faults are in its
        ``error``. EngineClosed after ``close``.
        """
        num_rows = self._num_rows(batch)
        answers = self._answers(batch, range(num_rows))
        found = {f"{self._output_prefix}{name}": column for name, column in columns(answers).items()}
        return {**batch, **self._own(batch), **found}

    def close(self) -> None:
        """End the engine and free its memory; rows that are not answered end with ``"abort"``."""
        self._service.close(graceful=False)
        self._engine.close()

    def __enter__(self) -> PagedPredictor:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: object) -> str:
        raise NotPicklable(
            "a PagedPredictor holds an engine and cannot go to another process; give map_batches the class, and what "
            "it is made with as fn_constructor_kwargs"
        )

    def _num_rows(self, batch: Batch) -> int:
        if not isinstance(batch, Mapping):
            raise ConfigError(
                f"a batch is a dict of numpy arrays, got a {type(batch).__name__}; call map_batches with "
                'batch_format="numpy"'
            )
        num_rows = len(next(iter(batch.values()), ()))
        names = ", ".join(batch) or "none"
        if num_rows and self._prompt_column not in batch and self._messages_column not in batch:
            raise ConfigError(
                f"the columns are {names}; prompt_column={self._prompt_column!r} and "
                f"messages_column={self._messages_column!r} are none of them; name the one that holds the prompts"
            )
        if num_rows and self._params_column is not None and self._params_column not in batch:
            raise ConfigError(f"the columns are {names}; params_column={self._params_column!r} is none of them")
        if hidden := [name for name in COLUMNS if f"{self._output_prefix}{name}" in batch]:
            raise ConfigError(
                f"the dataset has a column {self._output_prefix + hidden[0]!r}, which the result would replace; "
                'rename or drop it, or set output_prefix, such as "answer_"'
            )
        return num_rows

    def _own(self, batch: Batch) -> Batch:
        """The columns that it reads, as Arrow took them in: Ray pickles arrays of mappings, and writes NaN for nothing.

        Pickled columns could be read by nobody else, and NaN fits no other block's type.
        """
        read = [name for name in (*self._names, self._params_column) if name is not None and name in batch]
        own = {name: objects([None] * len(batch[name])) for name in read if all(map(is_missing, batch[name]))}
        if self._messages_column in batch and self._messages_column not in own:
            own[self._messages_column] = objects([plain(chat) for chat in batch[self._messages_column]])
        return own

    def _answers(self, batch: Batch, rows: Sequence[int]) -> list[Answer]:
        answers: dict[int, Answer] = {}
        waiting = list(rows)
        for _ in range(_NUM_TRIES):
            with self._starting:
                self._service.start()
            handles = [self._submit(batch, row) for row in waiting]
            lost = []
            for row, handle in zip(waiting, handles, strict=True):
                try:
                    if isinstance(handle, Exception):
                        raise handle
                    answers[row] = Answer.from_output(handle.result())
                except RequestFailed as error:
                    answers[row] = Answer.from_output(error.output, error.__cause__)
                except Exception as error:
                    answers[row] = Answer.failed(error)
                    if isinstance(error, EngineFailed):
                        lost.append(row)
            if not lost:
                break
            waiting = lost
        return [answers[row] for row in rows]

    def _submit(self, batch: Batch, row: int) -> Handle | Exception:
        """The row's request on its way, or why there is none."""
        try:
            params = plain(batch[self._params_column][row]) if self._params_column is not None else None
            prompt, stops = self._prompt(batch, row)
            return self._service.submit(*self._request(prompt, stops, _row_fields(params)))
        except Exception as error:
            return error

    def _prompt(self, batch: Batch, row: int) -> tuple[Any, Sequence[int]]:
        """What the row asks, and the token ids that end its answer beside the model's own."""
        from paged_backend import turn_end_ids

        chat, prompt = (batch[name][row] if name in batch else None for name in self._names)
        if is_missing(chat):
            if is_missing(prompt):
                raise RequestRefused(
                    f"the row has nothing in {' or '.join(name for name in self._names if name in batch)}"
                )
            return plain(prompt), ()
        if not is_missing(prompt):
            raise RequestRefused(f"the row has both {' and '.join(self._names)}; leave one of them empty")
        ids = prompt_ids(self._engine.tokenizer, plain(chat), self._chat_template, self._variables)
        return ids, turn_end_ids(self._engine, self._chat_template)

    @property
    def _names(self) -> tuple[str, str]:
        return self._messages_column, self._prompt_column

    def _request(
        self, prompt: Any, stops: Sequence[int] = (), row: Mapping[str, Any] = MappingProxyType({})
    ) -> tuple[Any, dict[str, Any] | None]:
        """A prompt with its parameters, for the engine to check."""
        sampling = {**self._sampling, **row}
        _check_single(sampling)
        if stops and not sampling.get("ignore_eos"):
            sampling["stop_token_ids"] = [*(sampling.get("stop_token_ids") or ()), *stops]
        if not sampling:
            return prompt, None
        if "max_tokens" not in sampling:
            # As many as the engine allows a request that says nothing of them.
            request = self._engine.prepare(prompt)
            prompt = list(request.output.prompt_token_ids)
            sampling["max_tokens"] = max(request.params.max_tokens, sampling.get("min_tokens") or 0)
        return prompt, sampling


def _fields(params: Any) -> dict[str, Any]:
    """The fields of SamplingParams that ``params`` say something of."""
    if params is None:
        return {}
    if isinstance(params, SamplingParams):
        return {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    if isinstance(params, Mapping):
        return dict(params)
    raise ConfigError(f"params are a SamplingParams or a mapping of its fields, got {describe(params)}")


def _row_fields(params: Any) -> dict[str, Any]:
    """The same of a cell, whose whole numbers are floats where other rows have none."""
    if is_missing(params):
        return {}
    if not isinstance(params, Mapping):
        raise RequestRefused(f"a row's sampling parameters are a mapping of their fields, got {describe(params)}")
    return {
        name: int(value) if isinstance(value, float) and value.is_integer() else value for name, value in params.items()
    }


def _check_single(sampling: Mapping[str, Any]) -> None:
    """Raise RequestRefused for what a row's columns have no place for."""
    if sampling.get("n", 1) != 1:
        raise RequestRefused(f"n={describe(sampling['n'])}: a row has one answer; repeat the row instead")
    if sampling.get("logprobs") is not None:
        raise RequestRefused(f"logprobs={describe(sampling['logprobs'])}: there is no column for them; leave it out")

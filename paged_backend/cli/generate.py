"""``paged-backend generate``: a file of prompts in, a file of answers out, resumable."""

from __future__ import annotations

import json
import math
import threading
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from paged_backend.cli.answers import Answers
from paged_backend.cli.lines import Lines, params_from_json
from paged_backend.cli.options import (
    DASH,
    EngineFlags,
    SamplingFlags,
    Terminal,
    errors_in_words,
    open_engine,
    spread,
)
from paged_backend.errors import ConfigError, PagedBackendError, RequestFailed, RequestRefused

if TYPE_CHECKING:
    from paged_backend.outputs import RequestOutput
    from paged_backend.service.async_engine import AsyncEngine
    from paged_backend.service.handle import Handle

# Enough beyond the running requests that the batch stays full, few enough that a long input stays on the disk.
IN_FLIGHT_PER_SEAT = 2


@spread
def generate(
    prompts: Annotated[
        Path,
        typer.Argument(
            dir_okay=False,
            allow_dash=True,
            help="A UTF-8 file with one prompt a line, empty lines aside; - is standard input.",
        ),
    ] = DASH,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", dir_okay=False, allow_dash=True, help="Where answers go; - is standard output."),
    ] = DASH,
    jsonl: Annotated[
        bool | None,
        typer.Option(
            "--jsonl/--text",
            help='Lines are JSON objects with "prompt" (text or token ids) and, if you like, "params" (fields of '
            'SamplingParams), "options" (of the request, such as "priority" or "deadline_s") and an "id"; by default '
            "when the file's name ends with .jsonl.",
        ),
    ] = None,
    sampling: SamplingFlags = SamplingFlags(max_tokens=128, temperature=0.0, top_p=1.0),  # noqa: B008
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends an answer; may be given again.")] = None,
    engine: EngineFlags = EngineFlags(),  # noqa: B008
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests that run at once, at most.")] = 64,
) -> None:
    """Answer prompts through one running batch; one JSON object a line comes out for each, as soon as it is done.

    It has a "text", "finish_reason" and "num_tokens"; with "logprobs" also
    "token_ids", and for each of them "logprobs" by token id; with "n" above 1
    a list "samples" of these. A prompt that failed has an "error".

    Stopped, the same command with the same --output goes on where it was; answers that failed are tried again.
    Exits with 1 if any prompt has no answer.
    """
    console = Terminal(stderr=True)
    params = {**asdict(sampling), "stop": stop or []}
    with errors_in_words(), ExitStack() as stack:
        lines = stack.enter_context(Lines(prompts, jsonl, params))
        total = lines.count()
        answers = stack.enter_context(Answers(output))
        runner = stack.enter_context(open_engine(engine, console, params, max_num_seqs))
        bar = stack.enter_context(_bar(console))
        run = Run(answers, bar, bar.add_task("prompts", total=total, rate=""), IN_FLIGHT_PER_SEAT * max_num_seqs)
        from paged_backend.service.async_engine import AsyncEngine

        try:
            with run, AsyncEngine(runner) as service:
                for index, prompt in lines:
                    run.submit(service, index, prompt)
        except KeyboardInterrupt:
            again = "; the same command goes on from here" if answers.is_file else ""
            console.print(f"stopped after {run.num_answered} answers{again}")
            raise typer.Exit(130) from None
    console.print(f"{run.num_answered} answered, {run.num_failed} failed, {run.num_there} were there already")
    raise typer.Exit(1 if run.num_failed else 0)


class Run:
    """Hands prompts to the service, a bounded number at once, and writes the answers as they come, in a thread."""

    def __init__(self, answers: Answers, bar: Progress, task: TaskID, in_flight: int) -> None:
        self.num_answered = self.num_failed = self.num_there = 0
        self._answers = answers
        self._bar = bar
        self._task = task
        self._room = threading.Semaphore(in_flight)
        self._over: SimpleQueue[tuple[dict[str, Any], Handle | None, Exception | None] | None] = SimpleQueue()
        self._num_tokens = 0
        self._error: Exception | None = None
        self._writer = threading.Thread(target=self._write_all, name="answers")

    def __enter__(self) -> Run:
        self._writer.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.put(None)
        self._writer.join()
        if self._error is not None:
            raise self._error

    def submit(self, service: AsyncEngine, index: int, prompt: dict[str, Any]) -> None:
        """Have a prompt answered, unless its answer is there already; waits while too many are on their way."""
        if self._error is not None:
            raise self._error
        record: dict[str, Any] = {"index": index}
        record.update((name, prompt[name]) for name in ("id", "prompt") if name in prompt)
        if (there := self._answers.there.get(index)) is not None:
            if there != json.dumps(prompt["prompt"]):
                raise ConfigError(
                    f"the output holds the answer to another prompt {index}, {there:.80}; name another --output, or "
                    "delete it"
                )
            self.num_there += 1
            self._bar.advance(self._task)
            return
        self._room.acquire()
        try:
            params = params_from_json(prompt["params"])
            handle = service.submit(prompt["prompt"], params, **prompt.get("options", {}))
        except (RequestRefused, ConfigError) as error:
            self._over.put((record, None, error))
        else:
            handle.add_done_callback(lambda handle: self._over.put((record, handle, None)))

    def _write_all(self) -> None:
        while (item := self._over.get()) is not None:
            record, handle, error = item
            try:
                if self._error is None:
                    self._write(record, handle, error)
            except Exception as failure:
                # Whoever submits hears of it; until then there must be room, or they would wait for ever.
                self._error = failure
            self._room.release()

    def _write(self, record: dict[str, Any], handle: Handle | None, error: Exception | None) -> None:
        try:
            outputs = _outcome(handle) if handle is not None else []
        except PagedBackendError as failure:
            outputs, error = [], failure
        if error is not None:
            self.num_failed += 1
            record["error"] = f"{error}"
        elif any(output.finish_reason == "abort" for output in outputs):
            return
        else:
            self.num_answered += 1
            self._num_tokens += sum(len(output.token_ids) for output in outputs)
            samples = [_sample(output) for output in outputs]
            record |= samples[0] if len(samples) == 1 else {"samples": samples}
        self._answers.write(record)
        seconds = self._bar.tasks[0].elapsed or 0
        self._bar.update(self._task, advance=1, rate=f"{self._num_tokens / seconds:.0f} tokens/s" if seconds else "")


def _outcome(handle: Handle) -> list[RequestOutput]:
    """All samples of a request; raises what went wrong with any."""
    handle.result()
    for output in handle.outputs:
        if output.finish_reason == "error":
            raise RequestFailed(f"sample {output.index} of request {output.request_id} failed: {output.error!r}")
        if output.finish_reason == "timeout":
            raise RequestFailed(f"it was not done in time: it had {len(output.token_ids)} tokens")
    return handle.outputs


def _sample(output: RequestOutput) -> dict[str, Any]:
    sample: dict[str, Any] = {
        "text": output.text,
        "finish_reason": output.finish_reason,
        "num_tokens": len(output.token_ids),
    }
    if output.logprobs is not None:
        # JSON has no infinity, which a token has that could not be drawn.
        logprobs = [{token: p if math.isfinite(p) else None for token, p in entry.items()} for entry in output.logprobs]
        sample |= {"token_ids": output.token_ids, "logprobs": logprobs}
    return sample


def _bar(console: Console) -> Progress:
    columns = (SpinnerColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)

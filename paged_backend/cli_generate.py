"""``paged-backend generate``: a file of prompts in, a file of answers out, resumable."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from paged_backend import cli_engine
from paged_backend.errors import ConfigError, PagedBackendError, RequestRefused

if TYPE_CHECKING:
    from paged_backend.handle import Handle
    from paged_backend.service import AsyncEngine

# Standard input or output.
DASH = Path("-")
# Enough beyond the running requests that the batch stays full, few enough that a long input stays on the disk.
IN_FLIGHT_PER_SEAT = 2
# How every answer begins.
_BEGINNING = '{"index": '


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
    model: cli_engine.Model = None,
    jsonl: Annotated[
        bool | None,
        typer.Option(
            "--jsonl/--text",
            help='Lines are JSON objects with "prompt" (text or token ids) and, if you like, "params" and an "id"; by '
            "default when the file's name ends with .jsonl.",
        ),
    ] = None,
    max_tokens: cli_engine.MaxTokens = 128,
    temperature: cli_engine.Temperature = 0.0,
    top_p: cli_engine.TopP = 1.0,
    seed: cli_engine.Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends an answer; may be given again.")] = None,
    scheduler: cli_engine.Scheduler = "fifo",
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests that run at once, at most.")] = 64,
    kv_cache_memory: cli_engine.KVCacheMemory = None,
    threads: cli_engine.Threads = None,
) -> None:
    """Answer prompts through one running batch; one JSON object a line comes out for each, as soon as it is done.

    Stopped, the same command with the same --output goes on where it was; answers that failed are tried again.
    Exits with 1 if any prompt has no answer.
    """
    console = Console(stderr=True)
    params = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed, "stop": stop or []}
    with cli_engine.errors_in_words(), ExitStack() as stack:
        source, total = sys.stdin, None
        if prompts != DASH:
            source = stack.enter_context(prompts.open(encoding="utf-8"))
        lines = Lines(source, prompts.suffix == ".jsonl" if jsonl is None else jsonl, params)
        if source.seekable() and prompts != DASH:
            # A line that cannot be used is told now, rather than after hours of answering.
            total = sum(1 for _ in lines)
            source.seek(0)
        target, done = sys.stdout, {}
        if output != DASH:
            done = answered(output)
            target = stack.enter_context(output.open("a", encoding="utf-8"))
        options = {"scheduler": scheduler, "max_num_seqs": max_num_seqs, "kv_cache_memory": kv_cache_memory}
        engine = stack.enter_context(cli_engine.open_engine(model, threads, console, params, **options))
        from paged_backend.service import AsyncEngine

        bar = stack.enter_context(_bar(console))
        run = Run(target, bar, bar.add_task("prompts", total=total, rate=""), IN_FLIGHT_PER_SEAT * max_num_seqs)
        try:
            with run, AsyncEngine(engine) as service:
                for index, prompt in lines:
                    run.submit(service, index, prompt, done.get(index))
        except KeyboardInterrupt:
            again = "" if target is sys.stdout else "; the same command goes on from here"
            console.print(f"stopped after {run.num_answered} answers{again}")
            raise typer.Exit(130) from None
    console.print(f"{run.num_answered} answered, {run.num_failed} failed, {run.num_there} were there already")
    raise typer.Exit(1 if run.num_failed else 0)


class Lines:
    """The prompts of a file, each with its index: an object with "prompt" and the params to run it with.

    Raises ConfigError at the first line that cannot be used.
    """

    def __init__(self, source: TextIO, jsonl: bool, params: dict[str, Any]) -> None:
        self._source = source
        self._jsonl = jsonl
        self._params = params

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        index, ids = 0, dict[str | int, int]()
        try:
            for line in self._source:
                if not line.strip():
                    continue
                prompt: dict[str, Any] = self._read(index, line) if self._jsonl else {"prompt": line.rstrip("\r\n")}
                if (name := prompt.get("id")) is not None and ids.setdefault(name, index) != index:
                    raise ConfigError(f"prompts {ids[name]} and {index} have the same id {name!r:.80}")
                yield index, {**prompt, "params": {**self._params, **prompt.get("params", {})}}
                index += 1
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self._source.name} is no UTF-8 text, at or after prompt {index}: {error}") from error

    def _read(self, index: int, line: str) -> dict[str, Any]:
        try:
            prompt = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"prompt {index} is not JSON ({error}): {line.strip():.80}") from error
        if not isinstance(prompt, dict) or not isinstance(prompt.get("prompt"), (str, list)):
            raise ConfigError(
                f'prompt {index} is no JSON object with "prompt", a text or token ids: {line.strip():.80}'
            )
        if not isinstance(prompt.get("params", {}), dict):
            raise ConfigError(f'"params" of prompt {index} must be a JSON object, got {prompt["params"]!r:.80}')
        if not isinstance(prompt.get("id"), (str, int, type(None))):
            raise ConfigError(f'"id" of prompt {index} must be a text or a whole number, got {prompt["id"]!r:.80}')
        return prompt


class Run:
    """Hands prompts to the service, a bounded number at once, and writes the answers as they come, in a thread."""

    def __init__(self, target: TextIO, bar: Progress, task: TaskID, in_flight: int) -> None:
        self.num_answered = self.num_failed = self.num_there = 0
        self._target = target
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

    def submit(self, service: AsyncEngine, index: int, prompt: dict[str, Any], there: str | None) -> None:
        """Have a prompt answered, unless its answer is ``there`` already; waits while too many are on their way."""
        if self._error is not None:
            raise self._error
        record: dict[str, Any] = {"index": index}
        record.update((name, prompt[name]) for name in ("id", "prompt") if name in prompt)
        if there is not None:
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
            handle = service.submit(prompt["prompt"], prompt["params"])
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
            output = handle.result() if handle is not None else None
        except PagedBackendError as failure:
            output, error = None, failure
        if output is None:
            self.num_failed += 1
            record["error"] = f"{error}"
        elif output.finish_reason == "abort":
            return
        else:
            self.num_answered += 1
            self._num_tokens += len(output.token_ids)
            record |= {"text": output.text, "finish_reason": output.finish_reason, "num_tokens": len(output.token_ids)}
        self._target.write(self._as_line(record))
        self._target.flush()
        seconds = self._bar.tasks[0].elapsed or 0
        self._bar.update(self._task, advance=1, rate=f"{self._num_tokens / seconds:.0f} tokens/s" if seconds else "")

    def _as_line(self, record: dict[str, Any]) -> str:
        line = json.dumps(record, ensure_ascii=False) + "\n"
        try:
            line.encode(self._target.encoding)
        except UnicodeEncodeError:
            # Half a surrogate pair, or an output in another encoding than UTF-8.
            return json.dumps(record) + "\n"
        return line


def answered(output: Path) -> dict[int, str]:
    """Index and prompt (as JSON) of the answers in a file, out of which those are taken that failed or are cut off.

    Raises ConfigError, and leaves the file alone, if it holds anything else. What is no file, such as a pipe, has none.
    """
    if not output.is_file():
        return {}
    # A link stays one.
    output = output.resolve()
    done: dict[int, str] = {}
    keep = output.with_name(output.name + ".resuming")
    try:
        with output.open(encoding="utf-8", errors="replace") as lines, keep.open("w", encoding="utf-8") as kept:
            for line in lines:
                # The last line of a run that was killed may be cut off.
                if not line.endswith("\n") and line.startswith(_BEGINNING):
                    continue
                try:
                    record = json.loads(line)
                    index, prompt, is_answer = record["index"], json.dumps(record["prompt"]), "text" in record
                except (ValueError, KeyError, TypeError) as error:
                    raise ConfigError(
                        f"{output} holds something else than answers ({line.strip():.80}); name another --output"
                    ) from error
                if is_answer:
                    done[index] = prompt
                    kept.write(line)
        os.replace(keep, output)
    finally:
        keep.unlink(missing_ok=True)
    return done


def _bar(console: Console) -> Progress:
    columns = (SpinnerColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)

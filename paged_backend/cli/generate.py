"""``paged-backend generate``: a file of prompts in, a file of answers out, resumable."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import IO, TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from paged_backend.cli import options as cli_engine
from paged_backend.errors import ConfigError, PagedBackendError, RequestRefused

if TYPE_CHECKING:
    from paged_backend.service.async_engine import AsyncEngine
    from paged_backend.service.handle import Handle

# Standard input or output.
DASH = Path("-")
# Enough beyond the running requests that the batch stays full, few enough that a long input stays on the disk.
IN_FLIGHT_PER_SEAT = 2
# What a line of prompts may hold.
KEYS = ("prompt", "params", "id")
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
    console = cli_engine.Terminal(stderr=True)
    params = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed, "stop": stop or []}
    with cli_engine.errors_in_words(), ExitStack() as stack:
        for stream, path, name in ((sys.stdin, prompts, "prompts"), (sys.stdout, output, "an --output")):
            # So python calls one that was closed before it started.
            if path == DASH and stream is None:
                raise ConfigError(f"the standard stream is closed; name a file for {name}")
        total = None
        with _named(f"the prompts {prompts} cannot be read"):
            source: IO[bytes] = sys.stdin.buffer if prompts == DASH else stack.enter_context(prompts.open("rb"))
        lines = Lines(source, prompts.suffix == ".jsonl" if jsonl is None else jsonl, params)
        if source.seekable() and prompts != DASH:
            # A line that cannot be used is told now, rather than after hours of answering.
            total = sum(1 for _ in lines)
            source.seek(0)
        target, done = sys.stdout, dict[int, str]()
        if output != DASH:
            with _named(f"the output {output} cannot be written"):
                target, done = open_output(output)
            stack.enter_context(target)
        options = {"scheduler": scheduler, "max_num_seqs": max_num_seqs, "kv_cache_memory": kv_cache_memory}
        engine = stack.enter_context(cli_engine.open_engine(model, threads, console, params, **options))
        from paged_backend.service.async_engine import AsyncEngine

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

    Raises ConfigError at the first line that cannot be used; it names the line's number in the file, from 1.
    """

    def __init__(self, source: IO[bytes], jsonl: bool, params: dict[str, Any]) -> None:
        self._source = source
        self._jsonl = jsonl
        self._params = params

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        index, ids = 0, dict[str | int, int]()
        for number, line in enumerate(self._source, 1):
            text = self._decode(number, line)
            if not text.strip():
                continue
            prompt: dict[str, Any] = self._read(number, text) if self._jsonl else {"prompt": text.rstrip("\r\n")}
            if (name := prompt.get("id")) is not None and ids.setdefault(name, number) != number:
                raise ConfigError(f"lines {ids[name]} and {number} have the same id {name!r:.80}")
            yield index, {**prompt, "params": {**self._params, **prompt.get("params", {})}}
            index += 1

    def _decode(self, number: int, line: bytes) -> str:
        try:
            return line.decode("utf-8")
        except UnicodeDecodeError as error:
            name = getattr(self._source, "name", "<stdin>")
            raise ConfigError(f"line {number} of {name} is not UTF-8: {line[:40]!r}") from error

    def _read(self, number: int, line: str) -> dict[str, Any]:
        try:
            prompt = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"line {number} is not JSON ({error}): {line.strip():.80}") from error
        if not isinstance(prompt, dict) or not isinstance(prompt.get("prompt"), (str, list)):
            raise ConfigError(f'line {number} is no JSON object with "prompt", a text or token ids: {line.strip():.80}')
        if unknown := sorted(prompt.keys() - set(KEYS)):
            raise ConfigError(f"line {number} has the unknown key {unknown[0]!r:.80}; it may have {', '.join(KEYS)}")
        if not isinstance(prompt.get("params", {}), dict):
            raise ConfigError(f'"params" of line {number} must be a JSON object, got {prompt["params"]!r:.80}')
        if isinstance(name := prompt.get("id"), bool) or not isinstance(name, (str, int, type(None))):
            raise ConfigError(f'"id" of line {number} must be a text or a whole number, got {name!r:.80}')
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


def open_output(output: Path) -> tuple[TextIO, dict[int, str]]:
    """The file to append answers to, and index and prompt (as JSON) of those it holds.

    Answers that failed or are cut off are taken out. The file is locked until it is closed or the process ends, so that
    no two runs write to it. Raises ConfigError, and leaves the file alone, if it is locked or holds anything else. What
    is no file, such as a pipe, has no answers and is not locked.
    """
    # A link stays one.
    output = output.resolve()
    target = _open_locked(output)
    if not output.is_file():
        return target, {}
    keep = output.with_name(output.name + ".resuming")
    try:
        # What a killed run left.
        keep.unlink(missing_ok=True)
        kept = keep.open("a", encoding="utf-8")
        try:
            # Before it takes the other's place, so that nobody finds it unlocked.
            _lock(kept, output)
            done = _copy_answers(output, kept)
            kept.flush()
            os.replace(keep, output)
        except BaseException:
            kept.close()
            raise
    finally:
        # The lock goes last: once it is gone, the next run may have such a file.
        keep.unlink(missing_ok=True)
        target.close()
    return kept, done


def _open_locked(output: Path) -> TextIO:
    while True:
        target = output.open("a", encoding="utf-8")
        try:
            if not output.is_file():
                return target
            _lock(target, output)
            # A run that has just let go of the lock may have put another file in its place.
            if os.path.samestat(os.fstat(target.fileno()), output.stat()):
                return target
        except BaseException:
            target.close()
            raise
        target.close()


def _lock(target: TextIO, output: Path) -> None:
    try:
        fcntl.flock(target, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            f"another run is writing to the output {output}; wait until it is done, or name another --output"
        ) from error
    except OSError:
        # A file system without locks cannot tell who else writes.
        return


def _copy_answers(output: Path, kept: TextIO) -> dict[int, str]:
    done: dict[int, str] = {}
    with output.open(encoding="utf-8", errors="replace") as lines:
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
    return done


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Errors of the system say which file they are about."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{what}: {error.strerror or error}") from error


def _bar(console: Console) -> Progress:
    columns = (SpinnerColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)

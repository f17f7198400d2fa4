"""``paged-backend chat``: a conversation in the terminal, streamed."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from io import TextIOWrapper
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from paged_backend.cli.options import (
    EngineFlags,
    SamplingFlags,
    Terminal,
    check_stream,
    errors_in_words,
    open_engine,
    spread,
)
from paged_backend.errors import ConfigError, ContextOverflow, PagedBackendError
from paged_backend.sampling.turn_end import turn_end_ids

if TYPE_CHECKING:
    from paged_backend.service.async_engine import AsyncEngine
    from paged_backend.stats import EngineStats

HELP = "/stats shows numbers, /reset begins anew, /quit or Ctrl-D leaves, /help says so; Ctrl-C cancels an answer"


@spread
def chat(
    system: Annotated[str | None, typer.Option(help="What the model is told before the conversation.")] = None,
    sampling: SamplingFlags = SamplingFlags(max_tokens=512, temperature=0.7, top_p=0.95),  # noqa: B008
    engine: EngineFlags = EngineFlags(),  # noqa: B008
) -> None:
    """Talk to a model. Its answers stream, and Ctrl-C cancels one and keeps the chat.

    /stats shows numbers, /reset begins anew, /help names the commands, /quit or Ctrl-D leaves.
    """
    console = Terminal(highlight=False)
    params = asdict(sampling)
    with errors_in_words():
        check_stream(sys.stdin, "a chat reads from it")
        if isinstance(sys.stdin, TextIOWrapper):
            # Whatever the terminal is said to write, see `_read`.
            sys.stdin.reconfigure(errors="surrogateescape")
        with open_engine(engine, console, params, max_num_seqs=1) as runner:
            from paged_backend.service.async_engine import AsyncEngine

            with AsyncEngine(runner) as service:
                Conversation(service, console, params, system).run()


class Conversation:
    """What was said so far, and how it goes on. Raises ConfigError for a model without a chat template."""

    def __init__(self, service: AsyncEngine, console: Console, params: dict[str, Any], system: str | None) -> None:
        self._service = service
        self._console = console
        self._tokenizer = service.engine.tokenizer
        if not self._tokenizer.chat_template:
            raise ConfigError("the model's tokenizer has no chat template; name an instruct or chat model")
        self._params = {**params, "stop_token_ids": turn_end_ids(service.engine)}
        self._beginning = [{"role": "system", "content": system}] if system is not None else []
        self._messages = list(self._beginning)
        self._last: dict[str, float] = {}

    def run(self) -> None:
        """Read and answer until the input ends."""
        self._console.print(HELP, style="dim")
        while (said := self._read()) is not None:
            match said:
                case "/quit":
                    return
                case "/stats":
                    self._console.print(stats_table(self._service.stats(), self._last))
                case "/reset":
                    self._messages = list(self._beginning)
                case "/help":
                    self._console.print(HELP, style="dim")
                case "":
                    pass
                case _:
                    self.ask(said)

    def _read(self) -> str | None:
        while True:
            try:
                # What is no character in the encoding that the terminal is said to have may be one in UTF-8.
                line = input("> ").encode(errors="surrogateescape").decode(errors="replace")
                return line.removeprefix("\ufeff").strip()
            except KeyboardInterrupt:
                self._console.print()
            except EOFError:
                self._console.print()
                return None

    def ask(self, said: str) -> None:
        """Print the answer as it comes; cancelled, what there is of it stays part of the conversation."""
        self._messages.append({"role": "user", "content": said})
        try:
            answer = self._answer()
        except PagedBackendError as error:
            self._messages.pop()
            self._console.print(f"error: {error}", style="red", markup=False)
            return
        self._messages.append({"role": "assistant", "content": answer})

    def _answer(self) -> str:
        started, first, num_tokens, answer = time.perf_counter(), None, 0, ""
        try:
            # Nothing else refers to the handle, so that whatever ends the loop early cancels the request.
            for delta in self._submit():
                first = first or time.perf_counter()
                num_tokens += len(delta.token_ids)
                answer += delta.text
                self._console.out(delta.text, end="", highlight=False)
            self._console.print()
        except KeyboardInterrupt:
            self._console.print("\ncancelled", style="dim")
        except PagedBackendError:
            self._console.print()
            raise
        ended = time.perf_counter()
        if first is not None:
            rate = (num_tokens - 1) / (ended - first) if num_tokens > 1 else 0.0
            self._last = {"first token, s": first - started, "tokens": num_tokens, "tokens/s": rate}
        return answer

    def _submit(self) -> Any:
        """Submit the conversation, without its oldest exchanges when it became too long for the model."""
        while True:
            try:
                text = self._tokenizer.apply_chat_template(self._messages, add_generation_prompt=True, tokenize=False)
            except Exception as error:
                # A template is a program of the model's own, and may raise anything.
                raise ConfigError(f"the model's chat template refuses the conversation: {error}") from error
            token_ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
            try:
                return self._service.submit(token_ids, self._params)
            except ContextOverflow:
                oldest = len(self._beginning)
                if len(self._messages) == oldest + 1:
                    raise
                del self._messages[oldest : oldest + 2]
                self._console.print("(the beginning of the conversation is forgotten)", style="dim")


def stats_table(stats: EngineStats, last: dict[str, float]) -> Table:
    """The last answer's numbers, and the engine's since it started."""
    table = Table("", "last answer", "all")
    since = {
        "answers": stats.num_finished,
        "tokens": stats.num_generated_tokens,
        "prompt tokens": stats.num_prompt_tokens,
        "prompt tokens reused": stats.num_cached_tokens,
        "steps": stats.num_steps,
    }
    for name in dict.fromkeys([*last, *since]):
        cells = [f"{numbers[name]:.4g}" if name in numbers else "" for numbers in (last, since)]
        table.add_row(name, *cells)
    return table

"""The demo: real prompts through ``generate(cache_impl="paged")``, and the same prompts through stock ``generate``."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from transformers import AutoModelForCausalLM, AutoTokenizer

import paged_backend
from paged_backend.engine.engine import Engine
from paged_backend.hookspecs import hookimpl
from paged_backend.outputs import RequestOutput
from paged_backend.request.request import Request
from paged_backend.stats import StepStats

Inputs = dict[str, torch.Tensor]

WARM_UP_PROMPTS = ["One, two, three,", "The first month of the year is January, and the second month of it is"]
WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Run:
    """One way of answering all prompts.

    tokens: [num_prompts, num_new_tokens] int64, as ``generate`` returned them: rows that ended early are padded.
    num_tokens: those of them that are no padding. finish_times: seconds from the call to each request's last token.
    reserved_bytes: the KV cache. filled_bytes: the most of it that tokens of requests took.
    """

    tokens: torch.Tensor
    num_tokens: int
    seconds: float
    finish_times: Sequence[float]
    reserved_bytes: int
    filled_bytes: int


@dataclass(frozen=True)
class Difference:
    """Where a prompt's tokens part, counted from 0, and by how much stock's best logit leads there."""

    prompt: int
    token: int
    margin: float


@dataclass(frozen=True)
class Comparison:
    """Both ways of answering; ``differences`` has the prompts whose tokens are not the same."""

    stock: Run
    paged: Run
    differences: Sequence[Difference]

    def to_json(self) -> str:
        """One JSON object with the numbers of both, in seconds and bytes, and the differences."""
        record = {
            "num_prompts": len(self.stock.tokens),
            "agree": not self.differences,
            "stock": numbers(self.stock),
            "paged": numbers(self.paged),
            "differences": [asdict(difference) for difference in self.differences],
        }
        return json.dumps(record, indent=1)


class Watcher:
    """A plugin that moves a bar, notes when each request finishes, and how much of the cache they fill."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self.expect(0)

    def expect(self, num_requests: int) -> None:
        """Start anew, showing a bar if there are requests to come."""
        self.finished_at: list[float] = []
        self.filled_bytes = 0
        self._num_tokens = 0
        self._task = self._bar.add_task("paged generate", total=num_requests, visible=num_requests > 0, tokens=0)

    @hookimpl
    def engine_started(self, engine: Engine) -> None:
        self.engine = engine

    @hookimpl
    def step_finished(self, stats: StepStats) -> None:
        groups = self.engine.stats().groups
        self.filled_bytes = max(self.filled_bytes, sum(g.num_filled_slots * g.bytes_per_token for g in groups))
        self._num_tokens += stats.num_new_tokens
        self._bar.update(self._task, advance=stats.num_finished, tokens=self._num_tokens)

    @hookimpl
    def request_finished(self, request: Request, output: RequestOutput) -> None:
        self.finished_at.append(time.perf_counter())


def run_demo(model_path: str, prompts: Sequence[str], max_new_tokens: int, console: Console) -> Comparison:
    """Answer the prompts both ways and print what came of it."""
    with console.status(f"loading {model_path}"):
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval().to(device)
        tokenizer: Any = AutoTokenizer.from_pretrained(model_path, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    inputs = _tokenize(tokenizer, _as_chats(tokenizer, prompts), device)
    # Without a chat's opening, so that it leaves nothing in the prefix cache for the prompts that are timed.
    warm_up = _tokenize(tokenizer, WARM_UP_PROMPTS, device)
    greedy = {"do_sample": False, "pad_token_id": tokenizer.pad_token_id, "max_new_tokens": max_new_tokens}
    brief = {**greedy, "max_new_tokens": WARM_UP_TOKENS}

    lengths = inputs["attention_mask"].sum(dim=1).tolist()
    console.print(
        f"{len(prompts)} prompts of {min(lengths)} to {max(lengths)} tokens, up to {max_new_tokens} new tokens each, "
        f"greedy, float32, on {_place(device)}",
        soft_wrap=True,
    )
    with _progress_bar(console) as bar:
        watcher = Watcher(bar)
        run_paged(model, warm_up, brief, watcher)
        watcher.expect(len(prompts))
        paged = run_paged(model, inputs, greedy, watcher)
    for index in sorted({0, len(prompts) // 2, 3 * len(prompts) // 4}):
        answer = tokenizer.decode(paged.tokens[index], skip_special_tokens=True).strip()
        console.print(Panel(Text(answer), title=Text(_title(prompts[index])), title_align="left"))
    with console.status("the same prompts through one padded stock generate"):
        run_stock(model, warm_up, brief)
        stock = run_stock(model, inputs, greedy)

    console.print(_table(stock, paged))
    comparison = Comparison(
        stock,
        paged,
        [
            Difference(row, position, top_two_margin(model, inputs, stock.tokens, row, position))
            for row, position in differences(stock.tokens, paged.tokens).items()
        ],
    )
    for difference in comparison.differences:
        console.print(
            f"Prompt {difference.prompt} differs from new token {difference.token} on, where stock's best logit leads "
            f"by {difference.margin:.1e}.",
            style="red",
            soft_wrap=True,
        )
    if not comparison.differences:
        console.print(f"Every greedy token agrees: {paged.num_tokens} tokens of {len(prompts)} prompts.", style="green")
    return comparison


def run_paged(model: Any, inputs: Inputs, options: dict[str, Any], watcher: Watcher) -> Run:
    """All prompts through the paged engine behind the model, which ``watcher`` sees."""
    paged_backend.install()
    start = time.perf_counter()
    sequences = model.generate(**inputs, **options, cache_impl="paged", paged_config={"plugins": [watcher]}).cpu()
    seconds = time.perf_counter() - start
    tokens = sequences[:, inputs["input_ids"].shape[1] :]
    return Run(
        tokens=tokens,
        num_tokens=sum(_output_lengths(model, tokens)),
        seconds=seconds,
        finish_times=[moment - start for moment in watcher.finished_at],
        reserved_bytes=watcher.engine.stats().reserved_bytes,
        filled_bytes=watcher.filled_bytes,
    )


def run_stock(model: Any, inputs: Inputs, options: dict[str, Any]) -> Run:
    """All prompts through stock ``generate`` as one batch, padded on the left."""
    start = time.perf_counter()
    output = model.generate(**inputs, **options, return_dict_in_generate=True)
    sequences = output.sequences.cpu()
    seconds = time.perf_counter() - start
    tokens = sequences[:, inputs["input_ids"].shape[1] :]
    output_lengths = _output_lengths(model, tokens)
    # The last token of a row is never fed back, so the cache does not hold it.
    held = [n + m - 1 for n, m in zip(inputs["attention_mask"].sum(dim=1).tolist(), output_lengths, strict=True)]
    # transformers renamed past_key_values to cache.
    cache = output.cache if hasattr(output, "cache") else output.past_key_values
    reserved = filled = 0
    for layer in cache.layers:
        num_bytes, num_slots = layer.keys.nbytes + layer.values.nbytes, layer.keys.shape[-2]
        reserved += num_bytes
        filled += num_bytes * sum(min(n, num_slots) for n in held) // (len(held) * num_slots)
    return Run(tokens, sum(output_lengths), seconds, [seconds] * len(tokens), reserved, filled)


def differences(stock: torch.Tensor, paged: torch.Tensor) -> dict[int, int]:
    """The rows that are not equal, each with the first position at which it differs."""
    width = max(stock.shape[1], paged.shape[1])
    stock, paged = (F.pad(tokens, (0, width - tokens.shape[1]), value=-1) for tokens in (stock, paged))
    different = stock != paged
    return {row: int(different[row].int().argmax()) for row in different.any(dim=1).nonzero().flatten().tolist()}


def top_two_margin(model: Any, inputs: Inputs, stock: torch.Tensor, row: int, position: int) -> float:
    """By how much the model prefers its best token to the next, where new token ``position`` of a row is chosen."""
    prompt = inputs["input_ids"][row][inputs["attention_mask"][row].bool()]
    with torch.no_grad():
        logits = model(torch.cat([prompt, stock[row, :position].to(prompt)])[None]).logits[0, -1]
    best, second = logits.topk(2).values.tolist()
    return best - second


def _output_lengths(model: Any, tokens: torch.Tensor) -> list[int]:
    """How many tokens of each row are no padding: up to its first end-of-sequence token, which counts."""
    eos = model.generation_config.eos_token_id
    eos = torch.as_tensor([] if eos is None else eos).to(tokens)
    ended = torch.isin(tokens, eos).cumsum(dim=1) > 0
    return (~ended).sum(dim=1).add(ended.any(dim=1)).tolist()


def _as_chats(tokenizer: Any, prompts: Sequence[str]) -> Sequence[str]:
    """The prompts as a user's messages, where the tokenizer knows how to write one."""
    if tokenizer.chat_template is None:
        return prompts
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)


def _tokenize(tokenizer: Any, texts: Sequence[str], device: torch.device) -> Inputs:
    # A chat template writes the special tokens itself.
    encoded = tokenizer(
        list(texts), return_tensors="pt", padding=True, add_special_tokens=tokenizer.chat_template is None
    )
    return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}


def _progress_bar(console: Console) -> Progress:
    counts = TextColumn("requests, {task.fields[tokens]} tokens")
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        counts,
        TimeElapsedColumn(),
        console=console,
    )


def _place(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"the CPU with {torch.get_num_threads()} threads"


def _title(prompt: str, width: int = 60) -> str:
    line, *rest = prompt.splitlines()
    return line if len(line) <= width and not rest else f"{line[:width].rstrip()} ..."


def _table(stock: Run, paged: Run) -> Table:
    table = Table(
        caption="Each was warmed up on two short prompts, then timed once. A padded batch hands out all its answers "
        "when its longest is done; a paged request is done at its own last token.",
        caption_justify="left",
    )
    table.add_column("")
    for heading in ("stock, padded", "paged", "paged / stock"):
        table.add_column(heading, justify="right")

    theirs, ours = numbers(stock), numbers(paged)
    for name, key, scale, unit in _ROWS:
        table.add_row(
            name,
            f"{theirs[key] * scale:.1f} {unit}",
            f"{ours[key] * scale:.1f} {unit}",
            f"{ours[key] / theirs[key]:.2f}",
        )
    return table


# A row's name, the number in it, and its unit, with how many there are of that.
_ROWS = (
    ("tokens a second", "tokens_per_s", 1, "/s"),
    ("mean time to finish", "finish_mean_s", 1, "s"),
    ("P99 time to finish", "finish_p99_s", 1, "s"),
    ("KV memory reserved", "reserved_bytes", 1e-6, "MB"),
    ("of it used at the peak", "filled_bytes", 1e-6, "MB"),
    ("share of it used", "filled_share", 100, "%"),
)


def numbers(run: Run) -> dict[str, float]:
    """What is compared of a run, in seconds, bytes and shares of 1."""
    return {
        "num_tokens": run.num_tokens,
        "seconds": run.seconds,
        "tokens_per_s": run.num_tokens / run.seconds,
        "finish_mean_s": float(np.mean(run.finish_times)),
        "finish_p99_s": float(np.percentile(run.finish_times, 99)),
        "reserved_bytes": run.reserved_bytes,
        "filled_bytes": run.filled_bytes,
        "filled_share": run.filled_bytes / run.reserved_bytes,
    }

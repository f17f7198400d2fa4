"""Walk every causal language model of the installed transformers, tiny and random, and say what becomes of each.

``python tests/support/walk_models.py`` walks them all and writes the table into integrations/README.md; with names of
classes it walks those and prints them.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from oracle import assert_greedy, left_pad, stock_greedy
from paged_forward import stepped_logits
from stock_equality import assert_same_tokens
from tiny_configs import tiny_config
from tiny_models import draw_weights
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import paged_backend
from paged_backend import Engine, EngineConfig, SamplingParams
from paged_backend.errors import UnsupportedCall, UnsupportedModel
from paged_backend.integrations.huggingface.engines import engine_for
from paged_backend.model.twin import Twin

README = Path(__file__).parents[2] / "integrations" / "README.md"
BEGIN, END = "<!-- model walk: written by tests/support/walk_models.py -->", "<!-- end of the model walk -->"
EQUAL, REFUSED, NOT_BUILT = "equal", "refused", "not built"
# Below this a model is built in moments and its logits take milliseconds.
_MAX_PARAMETERS = 5_000_000
_MAX_SECONDS = 120
_PROMPT_LENGTHS = (13, 21, 4)
_NUM_TOKENS = 8
# Chunks of prompts, and steps that hold more than one request.
_CONFIG = {"block_size": 5, "max_num_batched_tokens": 8, "max_num_seqs": 4}
# The engine that ``generate`` asks for with that, so that a class is probed, proven and swapped once.
_ENGINE = EngineConfig(**_CONFIG, seed=None)


@dataclass(frozen=True)
class Row:
    """What became of one class.

    ``reason`` is empty where its tokens and logits are stock's in every call and it keeps no recurrent state.
    """

    name: str
    model_types: tuple[str, ...]
    result: str
    reason: str = ""

    def line(self) -> str:
        """The row in Markdown."""
        return f"| {self.name} | {', '.join(self.model_types)} | {self.result} | {self.reason} |"


def causal_classes() -> dict[str, tuple[str, ...]]:
    """Each class that AutoModelForCausalLM may build, with the model types that lead to it."""
    classes: dict[str, list[str]] = {}
    for model_type, names in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()):
        for name in [names] if isinstance(names, str) else names:
            classes.setdefault(name, []).append(model_type)
    return {name: tuple(classes[name]) for name in sorted(classes)}


def walk_class(name: str) -> Row:
    """Build the class tiny, and compare it on blocks with itself in stock transformers.

    Raises AssertionError when it is served and differs.
    """
    row = partial(Row, name, causal_classes()[name])
    with warnings.catch_warnings(), _time_limit(_MAX_SECONDS):
        warnings.simplefilter("ignore")
        try:
            model = build(name)
        except Exception as error:
            return row(NOT_BUILT, _short(f"{type(error).__name__}: {error}"))
        try:
            with engine_for(model, _ENGINE, ()) as shared:
                twin = shared.engine.twin
            prompts = [twin.sample_token_ids(length, seed) for seed, length in enumerate(_PROMPT_LENGTHS)]
            refused = compare_generate(model, prompts)
            if refused:
                compare_engine(model, prompts)
        except UnsupportedModel as error:
            return row(REFUSED, _short(str(error)))
        finally:
            paged_backend.release(model)
        compare_logits(model, twin, prompts)
        return row(EQUAL, ", ".join(filter(None, [twin.state_mode and f"state {twin.state_mode}", refused])))


def build(name: str) -> PreTrainedModel:
    """A tiny model of the class with large random weights, in float32 and eval mode, that has run once."""
    model_class = getattr(transformers, name)
    config = tiny_config(model_class)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in model_class(config).parameters())
    if size > _MAX_PARAMETERS:
        raise ValueError(f"{size / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    model = model_class(config).eval()
    draw_weights(model)
    with torch.no_grad():
        model(input_ids=torch.arange(3, 12)[None], use_cache=False)
    return model


@torch.no_grad()
def compare_logits(model: PreTrainedModel, twin: Twin, prompts: list[list[int]]) -> None:
    """Logits packed, in chunks and decoded against lone stock forwards."""
    expected = [model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0] for prompt in prompts]
    for cuts in ([], [6, 3], [5, 1, 1, 1]):
        for prompt, got, want in zip(prompts, stepped_logits(twin, prompts, cuts), expected, strict=True):
            assert_close_logits(got, want, f"{len(prompt)} tokens after chunks of {cuts}", routed=_is_routed(model))


def compare_generate(model: PreTrainedModel, prompts: list[list[int]]) -> str:
    """Padded rows through ``generate`` with and without the engine; returns what of it is refused, if anything."""
    inputs = left_pad(prompts)
    options = {"max_new_tokens": _NUM_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    paged_backend.install()
    try:
        paged = model.generate(**inputs, **options, cache_impl="paged", paged_config=_CONFIG)
    except UnsupportedCall as error:
        what, _, _ = str(error).partition(" is not served by")
        return _short(f"generate refuses {what.rstrip(',')}")
    finally:
        paged_backend.uninstall()
    stock = model.generate(**inputs, **options, return_dict_in_generate=True, output_scores=True)
    assert_same_tokens(paged, stock.sequences, stock.scores)
    return ""


def compare_engine(model: PreTrainedModel, prompts: list[list[int]]) -> None:
    """Greedy tokens of an engine against those of stock ``generate``, one prompt at a time."""
    with Engine(model, **_CONFIG) as engine:
        outputs = engine.generate(prompts, SamplingParams(max_tokens=_NUM_TOKENS, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_greedy(model, prompt, output.token_ids, stock_greedy(model, prompt, _NUM_TOKENS))


def assert_close_logits(got: torch.Tensor, want: torch.Tensor, what: str, routed: bool) -> None:
    """Each token's logits agree to a thousandth of their spread, but where rounding may send it to another expert."""
    usual = want.abs() < 1e30
    errors = (got - want).where(usual, 0).norm(dim=-1) / want.where(usual, 0).std(-1).mul(usual.sum(-1).sqrt())
    assert errors.median() < 1e-4, f"{what}: relative error {errors.median():.1e} in the median token"
    assert routed or errors.max() < 1e-3, f"{what}: relative error {errors.max():.1e} in the worst token"


def _is_routed(model: PreTrainedModel) -> bool:
    config = vars(model.config.get_text_config(decoder=True))
    return any("expert" in name and isinstance(value, int) and value > 1 for name, value in config.items())


def _short(reason: str) -> str:
    """The reason in one line without what differs from run to run: layer names and measured numbers."""
    reason = re.sub(r"^\w+ cannot be served with paged attention: ", "", " ".join(reason.split()))
    reason = re.sub(r" requires the \w+ library.*", " requires a library that is missing", reason)
    reason = re.sub(r"(: relative error|, too few| \(shapes|; its forward takes).*", "", reason)
    reason = re.sub(r"\b[a-zA-Z_]+(\.\w+)+( \((\w+)\))?", "a layer", reason)
    return reason.replace("|", "/")[:160]


@contextmanager
def _time_limit(seconds: int) -> Iterator[None]:
    def give_up(*_: Any) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def table(rows: Iterable[Row]) -> str:
    """The section of the README between its two marks, those included."""
    rows = list(rows)
    counts = Counter(row.result for row in rows)
    return "\n".join(
        [
            BEGIN,
            f"transformers {transformers.__version__}: of {len(rows)} classes {counts[EQUAL]} are equal, "
            f"{counts[REFUSED]} are refused, {counts[NOT_BUILT]} were not built.",
            "",
            "| class | model type | result | reason |",
            "| --- | --- | --- | --- |",
            *(row.line() for row in rows),
            END,
        ]
    )


def read_table() -> tuple[str, dict[str, Row]]:
    """The version of transformers and the rows that the README states."""
    text = README.read_text()
    section = text[text.index(BEGIN) : text.index(END)]
    version = re.search(r"transformers ([\w.]+):", section)
    assert version
    rows = {}
    for line in section.splitlines():
        if line.startswith("| ") and not line.startswith(("| class", "| ---")):
            name, types, result, reason = (cell.strip() for cell in line.strip("|").split("|"))
            rows[name] = Row(name, tuple(types.split(", ")), result, reason)
    return version[1], rows


def walk(names: Iterable[str], processes: int) -> Iterator[Row]:
    """Walk classes in processes of one thread each."""
    with ProcessPoolExecutor(processes, initializer=partial(torch.set_num_threads, 1)) as pool:
        yield from pool.map(walk_class, names)


def main() -> None:
    """Walk, print each row, and write the table when everything was walked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("classes", nargs="*", help="names of classes; all of them when left out")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    transformers.logging.set_verbosity(60)
    rows = []
    for row in walk(arguments.classes or causal_classes(), arguments.processes):
        print(row.line(), file=sys.stderr, flush=True)
        rows.append(row)
    if arguments.classes:
        return
    before, _, rest = README.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(before + table(rows) + after)


if __name__ == "__main__":
    main()

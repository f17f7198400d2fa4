"""Run the generation tests of a transformers checkout with every call of ``generate`` on the paged engine.

A call that is refused by name runs stock code and is counted with its reason. Tests that compare two calls compare the
engine with itself; ``--compare`` holds every greedy call to stock besides. The tests are those of the folder, the
transformers they test is the installed one, so that both should be of the same version. Exits with 1 when a test fails
that passes with stock, with 2 when nothing ran.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from stock_equality import assert_same_tokens
from transformers import GenerationMixin

import paged_backend
from paged_backend.errors import UnsupportedCall, UnsupportedModel

PASSED, REFUSED, FAILED, STOCK_FAILS = "passed", "refused", "failed", "stock fails"
MODELS = ("llama", "gpt2", "gemma2", "mistral", "qwen2", "qwen3", "opt")


@dataclass
class Test:
    """What became of one test, and how its calls of ``generate`` were answered."""

    node: str
    num_served: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    failure: str = ""
    skipped: bool = False
    stock_fails: bool = False

    @property
    def result(self) -> str:
        if self.failure:
            return STOCK_FAILS if self.stock_fails else FAILED
        return REFUSED if self.refusals else PASSED

    @property
    def counts(self) -> bool:
        """Whether it says anything about ``generate``."""
        return bool(self.failure or (not self.skipped and (self.num_served or self.refusals)))

    def line(self) -> str:
        reasons = [f"{count} refused: {reason}" for reason, count in sorted(self.refusals.items())]
        served = [f"{self.num_served} served"] if self.num_served else []
        failure = [self.failure] if self.failure else []
        return f"{self.result:11}  {self.node}  {'; '.join(failure + served + reasons)}"


class Recorder:
    """A pytest plugin that notes how each test ends, and has it draw the same weights and inputs every time."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.tests: dict[str, Test] = {}
        self.broken: list[str] = []
        self.current = Test("")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self.current = self.tests[item.nodeid] = Test(item.nodeid)
        torch.manual_seed(self._seed)
        # Theirs for token ids.
        drawer = getattr(sys.modules.get("tests.test_modeling_common"), "global_rng", random)
        drawer.seed(self._seed)
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self.tests[report.nodeid]
        test.skipped = test.skipped or report.skipped
        if report.failed and not test.failure:
            test.failure = _summary(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.broken.append(f"{report.nodeid}: {report.longreprtext.splitlines()[-1]}")


class OrdinaryInputs:
    """A pytest plugin that makes the inputs that model testers draw those of a tokenizer that pads on the left.

    They draw masks that hide the end of each prompt, any tokens of it or all of them, and inputs such as
    ``token_type_ids`` for some models.
    """

    _KEPT = ("input_ids", "attention_mask")

    def __init__(self) -> None:
        self._done: set[type] = set()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            case = getattr(item, "cls", None)
            if hasattr(case, "setUp") and case not in self._done:
                self._done.add(case)
                case.setUp = self._wrap_setup(case.setUp)

    def _wrap_setup(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        @functools.wraps(original)
        def setup(case: Any) -> None:
            original(case)
            tester = getattr(case, "model_tester", None)
            # A class and its base may both have been wrapped.
            if tester is not None and "prepare_config_and_inputs_for_common" not in vars(tester):
                draw = tester.prepare_config_and_inputs_for_common
                tester.prepare_config_and_inputs_for_common = lambda: self._ordinary(*draw())

        return setup

    def _ordinary(self, config: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        inputs = {name: value for name, value in inputs.items() if name in self._KEPT}
        mask = inputs.get("attention_mask")
        if mask is not None and mask.dim() == 2:
            # As many tokens are hidden as were, on the left; of a prompt that was hidden as a whole, none.
            mask = torch.where(mask.any(dim=-1, keepdim=True), mask, torch.ones_like(mask))
            inputs["attention_mask"] = mask.sort(dim=-1).values
        return config, inputs


class PagedGenerate:
    """In place of ``generate``: the paged engine, and stock where it refuses. A context manager."""

    def __init__(self, recorder: Recorder, compare: bool) -> None:
        self._recorder = recorder
        self._compare = compare
        # Stock's assisted generation calls generate of a second model.
        self._in_call = threading.local()

    def __enter__(self) -> None:
        paged_backend.install()
        self._original = vars(GenerationMixin)["generate"]

        @functools.wraps(self._original)
        def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(self._in_call, "yes", False):
                return self._original(model, *args, **kwargs)
            self._in_call.yes = True
            try:
                return self._generate(model, args, kwargs)
            finally:
                self._in_call.yes = False

        GenerationMixin.generate = generate  # type: ignore[method-assign]

    def __exit__(self, *exc_info: object) -> None:
        GenerationMixin.generate = self._original  # type: ignore[method-assign]
        paged_backend.uninstall()

    def _generate(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        test = self._recorder.current
        try:
            output = self._original(model, *args, **kwargs, cache_impl="paged")
        except (UnsupportedCall, UnsupportedModel) as error:
            test.refusals[_reason(error)] += 1
            return self._original(model, *args, **kwargs)
        test.num_served += 1
        if self._compare and not self._samples(model, kwargs) and kwargs.get("streamer") is None:
            asked = {"return_dict_in_generate": True, "output_scores": True}
            stock = self._original(model, *args, **{**kwargs, **asked})
            assert_same_tokens(getattr(output, "sequences", output), stock.sequences, stock.scores)
        return output

    @staticmethod
    def _samples(model: Any, kwargs: dict[str, Any]) -> bool:
        sources = (kwargs.get("generation_config"), model.generation_config)
        answers = [kwargs.get("do_sample"), *(getattr(source, "do_sample", None) for source in sources)]
        return bool(next((answer for answer in answers if answer is not None), False))


def _reason(error: Exception) -> str:
    """What was refused, without the way out and without this call's numbers."""
    text = str(error).partition(" is not served by")[0].splitlines()[0]
    return re.sub(r" \(row \d+\)", "", text)


def _summary(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else report.longreprtext.strip()
    return (text.splitlines() or ["failed"])[0]


def run(folder: Path, files: Iterable[str], options: argparse.Namespace) -> tuple[list[Test], list[str]]:
    """The tests of these files, and the files that cannot be read with the reason."""
    recorder = Recorder(options.seed)
    with PagedGenerate(recorder, options.compare):
        _pytest(folder, ["-k", options.keyword, *files], recorder, options)
    tests = list(recorder.tests.values())
    failed = [test for test in tests if test.failure]
    if failed:
        stock = Recorder(options.seed)
        _pytest(folder, [test.node for test in failed], stock, options)
        for test in failed:
            test.stock_fails = bool(stock.tests[test.node].failure)
    return tests, recorder.broken


def _pytest(folder: Path, arguments: list[str], recorder: Recorder, options: argparse.Namespace) -> None:
    always = [f"--rootdir={folder}", "-p", "no:cacheprovider", "-q", "-rN", f"--tb={options.tb}"]
    pytest.main([*always, *arguments], plugins=[recorder, *([OrdinaryInputs()] if options.ordinary_inputs else [])])


def totals(tests: Iterable[Test]) -> str:
    counts = Counter(test.result if test.counts else "without a call of generate" for test in tests)
    order = (PASSED, REFUSED, FAILED, STOCK_FAILS, "without a call of generate")
    return ", ".join(f"{counts[name]} {name}" for name in order)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print a line for each test and the totals of each file, and tell whether anything of ours fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a checkout of huggingface/transformers")
    parser.add_argument("--models", nargs="*", default=MODELS, help=f"whose tests (default: {' '.join(MODELS)})")
    parser.add_argument("--files", nargs="*", default=(), help="further test files, relative to the folder")
    parser.add_argument(
        "-k", dest="keyword", default="generate or decoding", help="pytest's -k (default: %(default)r; '' for all)"
    )
    parser.add_argument("--tb", default="no", help="pytest's --tb, to see why tests fail (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="draws the weights and prompts (default: %(default)s)")
    parser.add_argument("--compare", action="store_true", help="hold the tokens of every greedy call to stock's")
    parser.add_argument(
        "--ordinary-inputs",
        action="store_true",
        help="pad on the left and feed token ids alone, where the tests draw prompts that the engine refuses",
    )
    options = parser.parse_args(arguments)
    folder = options.folder.resolve()
    paths = [f"tests/models/{model}/test_modeling_{model}.py" for model in options.models] + list(options.files)
    files = [path for path in paths if (folder / path).is_file()]
    for path in sorted(set(paths) - set(files)):
        print(f"not there: {folder / path}", file=sys.stderr)
    if not files:
        return 2
    print(f"tests of {folder} on the installed transformers {transformers.__version__}")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    # Their modules import each other as the package `tests`.
    os.chdir(folder)
    tests, broken = run(folder, files, options)
    print()
    for path in files:
        own = [test for test in tests if test.node.startswith(f"{path}::")]
        for test in own:
            if test.counts:
                print(test.line())
        print(f"{path}: {totals(own)}\n")
    print(f"all: {totals(tests)}")
    calls = sum((test.refusals for test in tests), Counter({"served": sum(test.num_served for test in tests)}))
    for what, count in calls.most_common():
        print(f"{count:5} calls  {what if what == 'served' else f'refused: {what}'}")
    for text in broken:
        print(f"not collected: {text}")
    if any(test.counts and test.result == FAILED for test in tests):
        return 1
    return 0 if any(test.counts for test in tests) else 2


if __name__ == "__main__":
    sys.exit(main())

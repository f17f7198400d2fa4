"""The program that runs the tests of a transformers checkout tells what the engine served, refused and failed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import run_transformers_tests

LLAMA = "tests/models/llama/test_modeling_llama.py"
FILES = {
    "tests/__init__.py": "",
    "tests/generation/__init__.py": "",
    "tests/generation/test_utils.py": """
        import functools

        LENGTH = {"max_new_tokens": 4, "do_sample": False}


        class Mixin:
            def inputs(self):
                return self.model_tester.prepare_config_and_inputs_for_common()[1]

            def test_generate_same_twice(self):
                model = self.build()
                first, second = (model.generate(**self.inputs(), **LENGTH) for _ in range(2))
                self.assertEqual(first.tolist(), second.tolist())

            def test_generate_beams(self):
                found = self.build().generate(**self.inputs(), **LENGTH, num_beams=2)
                self.assertEqual(found.shape, (2, 9))

            def test_generate_prepares_inputs_for_each_token(self):
                model, counted = self.build(), []
                original = model.prepare_inputs_for_generation

                @functools.wraps(original)
                def prepare(*args, **kwargs):
                    counted.append(1)
                    return original(*args, **kwargs)

                model.prepare_inputs_for_generation = prepare
                model.generate(**self.inputs(), **LENGTH)
                self.assertEqual(len(counted), 4)

            def test_generate_of_one_that_is_wrong(self):
                self.assertEqual(self.build().generate(**self.inputs(), **LENGTH).shape, (0, 0))

            def test_generate_that_calls_nothing(self):
                pass

            def test_generate_that_is_skipped(self):
                self.skipTest("for a reason")

            def test_of_something_else(self):
                self.fail()
        """,
    "tests/models/__init__.py": "",
    "tests/models/llama/__init__.py": "",
    LLAMA: """
        import unittest

        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        from ...generation.test_utils import Mixin


        class Tester:
            def prepare_config_and_inputs_for_common(self):
                shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
                config = LlamaConfig(vocab_size=32, num_attention_heads=2, eos_token_id=None, pad_token_id=0, **shape)
                ids = torch.randint(1, 32, (2, 5))
                mask = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0]])
                return config, {"input_ids": ids, "attention_mask": mask, "token_type_ids": ids}


        class LlamaModelTest(Mixin, unittest.TestCase):
            def setUp(self):
                self.model_tester = Tester()
                self.model = LlamaForCausalLM(self.model_tester.prepare_config_and_inputs_for_common()[0]).eval()

            def build(self):
                return self.model

            def inputs(self):
                self.kept = getattr(self, "kept", None) or super().inputs()
                return {name: value for name, value in self.kept.items() if name != "token_type_ids"}
        """,
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("checkout")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))
    return folder


# Every run of the program, one after the other in one process: its exit status ends what each prints.
_RUN_EACH = """
import json, sys
from run_transformers_tests import main
for arguments in json.loads(sys.argv[1]):
    status = main(arguments)
    print(f"exit status {status}", flush=True)
"""


def line(output: str, test: str) -> str:
    (found,) = re.findall(rf"^.*LlamaModelTest::{test}\b.*$", output, re.MULTILINE)
    return str(found)


@pytest.fixture(scope="module")
def runs(checkout: Path) -> list[tuple[int, str]]:
    """Exit status and output on inputs as they are drawn, where no test is found, and on ordinary inputs."""
    folder = [str(checkout), "--models", "llama"]
    # Ordinary inputs last, since the classes of the tests go on drawing them.
    each = [[*folder, "-k", "same_twice"], [*folder, "-k", "nosuch"], [*folder, "--ordinary-inputs", "--compare"]]
    command = [sys.executable, "-c", _RUN_EACH, json.dumps(each)]
    environment = {**os.environ, "PYTHONPATH": str(Path(run_transformers_tests.__file__).parent)}
    output = subprocess.run(command, capture_output=True, text=True, env=environment).stdout
    parts = re.split(r"^exit status (\d)\n", output, flags=re.MULTILINE)
    return [(int(status), text) for text, status in zip(parts[::2], parts[1::2], strict=False)]


@pytest.fixture
def ordinary(runs: list[tuple[int, str]]) -> tuple[int, str]:
    return runs[2]


def test_a_test_whose_calls_are_all_served_passes(ordinary: tuple[int, str]) -> None:
    assert re.fullmatch(r"passed +\S+ +2 served", line(ordinary[1], "test_generate_same_twice"))


def test_a_refused_call_goes_to_stock_and_is_counted_with_its_reason(ordinary: tuple[int, str]) -> None:
    assert re.fullmatch(
        r"refused +\S+ +1 refused: num_beams=2 \(beam search\)", line(ordinary[1], "test_generate_beams")
    )


def test_a_failure_that_stock_passes_is_ours_and_the_exit_status(ordinary: tuple[int, str]) -> None:
    # Once for the engine, and four times for the comparison.
    found = line(ordinary[1], "test_generate_prepares_inputs_for_each_token")
    assert re.fullmatch(r"failed +\S+ +AssertionError: 5 != 4; 1 served", found)
    assert ordinary[0] == 1


def test_a_failure_of_stock_too_is_told_apart(ordinary: tuple[int, str]) -> None:
    assert line(ordinary[1], "test_generate_of_one_that_is_wrong").startswith("stock fails ")


def test_the_totals_count_each_kind_and_leave_out_what_calls_nothing(ordinary: tuple[int, str]) -> None:
    expected = "1 passed, 1 refused, 1 failed, 1 stock fails, 2 without a call of generate"
    assert f"{LLAMA}: {expected}" in ordinary[1]
    assert f"all: {expected}" in ordinary[1]
    assert "test_of_something_else" not in ordinary[1]


def test_inputs_as_they_are_drawn_are_refused_where_the_engine_refuses_them(runs: list[tuple[int, str]]) -> None:
    status, output = runs[0]
    assert re.fullmatch(r"refused +\S+ +2 refused: padding on the right", line(output, "test_generate_same_twice"))
    assert status == 0


def test_a_run_that_finds_no_test_is_no_success(runs: list[tuple[int, str]]) -> None:
    assert runs[1][0] == 2


def test_a_file_that_is_not_there_is_named(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_transformers_tests.main([str(checkout), "--models", "nosuch"]) == 2
    assert re.search(r"not there: \S+/test_modeling_nosuch.py", capsys.readouterr().err)

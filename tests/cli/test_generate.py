"""paged-backend generate: prompts in, answers out, and on from where it stopped."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from generate_command import PROMPTS, generate, records, texts
from tiny_models import save_tiny
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from paged_backend import Engine, SamplingParams
from paged_backend.cli.answers import open_output
from paged_backend.cli.app import app
from paged_backend.errors import ConfigError
from paged_backend.service.async_engine import AsyncEngine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), max_positions=128))


@pytest.fixture(scope="module")
def expected(folder: str) -> list[str]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False)
        texts.append(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return texts


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS) + "\n")
    return path


def test_a_file_of_prompts_is_answered_as_stock_generate_answers_it(folder, expected, prompts, tmp_path):
    output = tmp_path / "answers.jsonl"
    result = generate(folder, prompts, "--output", output)
    assert result.exit_code == 0, result.output
    rows = records(output.read_text())
    assert texts(rows) == expected
    assert [rows[index]["prompt"] for index in range(5)] == PROMPTS
    assert "5 answered, 0 failed, 0 were there already" in result.stderr


def test_prompts_come_from_standard_input_and_answers_go_to_standard_output(folder, expected):
    result = generate(folder, stdin="\n\n".join(PROMPTS))
    assert result.exit_code == 0
    assert texts(records(result.stdout)) == expected


def test_json_lines_may_bring_token_ids_params_and_an_id(folder, expected, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": tokenizer(PROMPTS[0])["input_ids"], "id": "mine"},
        {"prompt": PROMPTS[1], "params": {"max_tokens": 3}},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = records(generate(folder, path).stdout)
    assert rows[0]["id"] == "mine"
    assert rows[0]["text"] == expected[0]
    assert rows[1]["num_tokens"] == 3
    assert rows[1]["finish_reason"] == "length"


def test_a_prompt_that_is_refused_is_told_in_its_line_and_the_others_are_answered(folder, expected):
    result = generate(folder, stdin="\n".join([PROMPTS[0], "y" * 500, PROMPTS[2]]))
    assert result.exit_code == 1
    rows = records(result.stdout)
    assert rows[0]["text"] == expected[0]
    assert "beyond the 128 positions" in rows[1]["error"]
    assert rows[2]["text"] == expected[2]
    assert "2 answered, 1 failed" in result.stderr


def test_the_same_command_goes_on_where_a_killed_one_stopped(folder, expected, prompts, tmp_path, monkeypatch):
    output = tmp_path / "answers.jsonl"
    generate(folder, prompts, "--output", output)
    lines = sorted(output.read_text().splitlines())
    failed = json.dumps({"index": 3, "prompt": PROMPTS[3], "error": "no memory"})
    # Two answers, one that failed, and one that was being written.
    output.write_text("\n".join([*lines[:2], failed, lines[4][:-9]]))
    asked = []
    submit = AsyncEngine.submit
    monkeypatch.setattr(AsyncEngine, "submit", lambda self, *args: asked.append(args[0]) or submit(self, *args))
    result = generate(folder, prompts, "--output", output)
    assert result.exit_code == 0, result.output
    assert texts(records(output.read_text())) == expected
    assert asked == PROMPTS[2:]
    assert "3 answered, 0 failed, 2 were there already" in result.stderr
    assert list(tmp_path.iterdir()) == sorted([output, prompts])


def test_ctrl_c_keeps_the_answers_that_are_there(folder, expected, prompts, tmp_path, monkeypatch):
    output = tmp_path / "answers.jsonl"
    submit = AsyncEngine.submit

    def interrupted(self, prompt, params):
        if prompt == PROMPTS[3]:
            for handle in handles:
                handle.result(60)
            raise KeyboardInterrupt
        handles.append(submit(self, prompt, params))
        return handles[-1]

    handles: list = []
    monkeypatch.setattr(AsyncEngine, "submit", interrupted)
    result = generate(folder, prompts, "--output", output)
    assert result.exit_code == 130
    assert "stopped after 3 answers; the same command goes on from here" in result.stderr
    assert texts(records(output.read_text())) == expected[:3]
    monkeypatch.undo()
    assert generate(folder, prompts, "--output", output).exit_code == 0
    assert texts(records(output.read_text())) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("my notes\nof today\n", "holds something else than answers"),
        ("my notes, unfinished", "holds something else than answers"),
        ('{"index": 0, "prompt": "another", "text": "answer"}\n', "the answer to another prompt 0"),
    ],
)
def test_a_file_that_holds_something_else_is_left_alone(folder, prompts, tmp_path, content, message):
    output = tmp_path / "answers.jsonl"
    output.write_text(content)
    result = generate(folder, prompts, "--output", output)
    assert result.exit_code == 2
    assert message in result.stderr
    assert output.read_text() == content
    assert list(tmp_path.iterdir()) == sorted([output, prompts])


def test_no_more_prompts_are_read_than_are_needed_to_keep_the_batch_full(folder, monkeypatch):
    most = []
    submit = AsyncEngine.submit
    monkeypatch.setattr(
        AsyncEngine, "submit", lambda self, *args: most.append(self.num_unfinished) or submit(self, *args)
    )
    result = generate(folder, "--max-num-seqs", "2", stdin="\n".join(f"prompt {n}" for n in range(30)))
    assert result.exit_code == 0
    assert len(records(result.stdout)) == 30
    assert max(most) <= 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--top-p", "0"], "top_p must be above 0"),
        (["--top-p", "nan"], "top_p must be a number from 0 to 1, got nan"),
        (["--temperature", "nan"], "temperature must be a number from 0 to 100000, got nan"),
        (["--threads", "100000"], "1024"),
        (["--scheduler-options", "{batch: 4}"], "{batch: 4} is not JSON"),
        (["--eviction-options", "4"], '4 is no JSON object; give one such as {"batch": 4}'),
        (["--scheduler-options", '{"speed": 3}'], "Fifo has no option 'speed'"),
        (["--eviction", "nobody"], "unknown eviction 'nobody'"),
        (["--attention-backend", "nobody"], "unknown attention_backend 'nobody'"),
        (["--scheduler", "nobody"], "unknown scheduler 'nobody'"),
        (["--kv-cache-memory", "0.5"], "share of a GPU's free memory"),
        (["--output", "/dev/full"], "error: the output /dev/full cannot be written: No space left on device"),
        (["--output", "no such folder/answers.jsonl"], "the output no such folder/answers.jsonl cannot be written"),
    ],
)
def test_what_cannot_be_done_is_told_in_words(folder, prompts, arguments, message):
    # After the options that the helper gives, whose last one counts.
    options = ["--model", folder, "--threads", "1", "--max-tokens", "4", "--kv-cache-memory", "4MiB"]
    runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"})
    result = runner.invoke(app, ["generate", str(prompts), *options, *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_all_samples_and_their_logprobs_are_written_and_count_as_an_answer(folder, tmp_path):
    path, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    params = {"n": 3, "temperature": 1.0, "seed": 5, "logprobs": 2, "max_tokens": 4, "ignore_eos": True}
    path.write_text(json.dumps({"prompt": PROMPTS[0], "params": params}) + "\n")
    assert generate(folder, path, "--output", output).exit_code == 0
    row = records(output.read_text())[0]
    with Engine.from_pretrained(folder, kv_cache_memory="4MiB", model_kwargs={"dtype": "auto"}) as engine:
        outputs = engine.generate(PROMPTS[0], SamplingParams(**params))
    assert [sample["text"] for sample in row["samples"]] == [output.text for output in outputs]
    for sample, expected in zip(row["samples"], outputs, strict=True):
        assert sample["token_ids"] == expected.token_ids
        assert sample["num_tokens"] == len(sample["logprobs"]) == 4
        for written, there in zip(sample["logprobs"], expected.logprobs, strict=True):
            assert {int(token): p for token, p in written.items()} == pytest.approx(there)
    assert "text" not in row
    assert "1 were there already" in generate(folder, path, "--output", output).stderr


def test_a_logprob_of_what_could_not_be_drawn_is_null_for_json_has_no_infinity(folder):
    params = {"logprobs": 256, "logprobs_mode": "processed", "temperature": 1.0, "top_k": 2, "max_tokens": 1}
    result = generate(folder, "--jsonl", stdin=json.dumps({"prompt": "hello", "params": params}))
    assert "Infinity" not in result.stdout
    (entry,) = records(result.stdout)[0]["logprobs"]
    assert sum(p is not None for p in entry.values()) == 2


def test_logit_bias_from_json_has_token_ids_for_keys(folder):
    line = {"prompt": "hello", "params": {"logit_bias": {"70": 100.0}, "max_tokens": 2}}
    rows = records(generate(folder, "--jsonl", stdin=json.dumps(line)).stdout)
    assert rows[0]["text"] == AutoTokenizer.from_pretrained(folder).decode([70, 70])


def test_a_byte_order_mark_is_no_part_of_the_first_prompt(folder, expected, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS), encoding="utf-8-sig")
    rows = records(generate(folder, path).stdout)
    assert [rows[index]["prompt"] for index in range(5)] == PROMPTS
    assert texts(rows) == expected
    stdin = json.dumps({"prompt": PROMPTS[0]}).encode("utf-8-sig")
    assert records(generate(folder, "--jsonl", stdin=stdin).stdout)[0]["text"] == expected[0]


def test_options_of_a_request_reach_the_engine_and_one_that_cannot_be_used_fails_its_prompt_alone(folder, monkeypatch):
    seen, submit = [], AsyncEngine.submit
    monkeypatch.setattr(
        AsyncEngine, "submit", lambda self, *args, **options: seen.append(options) or submit(self, *args, **options)
    )
    options = {"priority": -1, "deadline_s": 60.0, "client_id": "ann"}
    lines = [{"prompt": "a", "options": options}, {"prompt": "b", "options": {"priority": "high"}}, {"prompt": "c"}]
    rows = records(generate(folder, "--jsonl", stdin="\n".join(map(json.dumps, lines))).stdout)
    assert seen == [options, {"priority": "high"}, {}]
    assert "text" in rows[0]
    assert "priority must be an int" in rows[1]["error"]
    assert "text" in rows[2]


def test_an_answer_that_the_policy_gave_up_is_a_failure_that_is_tried_again(folder, tmp_path):
    path, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    path.write_text(json.dumps({"prompt": "a", "options": {"timeout_s": 1e-9}}) + "\n")
    result = generate(folder, path, "--output", output)
    assert result.exit_code == 1
    assert "it was not done in time" in records(output.read_text())[0]["error"]
    assert "0 were there already" in generate(folder, path, "--output", output).stderr


def test_a_folder_that_is_no_model_is_told_in_words(prompts, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "nothing of the kind"}')
    result = generate(str(tmp_path / "model"), prompts)
    assert result.exit_code == 2
    assert "error: the model" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [("/nope", "error: there is no folder '/nope'; give a folder"), ("/", "error: the folder '/' holds no model")],
)
def test_a_model_that_is_not_there_is_told_with_what_may_be_given(name, message):
    result = generate(name, stdin="hello")
    assert result.exit_code == 2
    assert message in result.stderr
    assert "or a hub id such as 'owner/name'" in result.stderr


def test_a_prompt_that_is_no_text_fails_alone(folder, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "\\ud800"}\n{"prompt": "x"}\n')
    output = tmp_path / "answers.jsonl"
    assert generate(folder, path, "--output", output).exit_code == 1
    rows = records(output.read_text())
    assert "half of a surrogate pair" in rows[0]["error"]
    assert rows[0]["prompt"] == "\ud800"
    assert "text" in rows[1]


def test_a_device_stays_a_device_and_a_link_a_link(folder, prompts, tmp_path):
    output = tmp_path / "answers.jsonl"
    link = tmp_path / "link.jsonl"
    link.symlink_to(output)
    device = tmp_path / "device"
    os.mkfifo(device)
    reader = threading.Thread(target=device.read_text)
    reader.start()
    for target in (link, link, device):
        assert generate(folder, prompts, "--output", target).exit_code == 0
    reader.join()
    assert link.is_symlink()
    assert device.is_fifo()
    assert len(records(output.read_text())) == 5


def test_prompts_that_are_not_there_are_told_from_an_output_that_cannot_be(folder):
    result = generate(folder, "/nope/x")
    assert result.exit_code == 2
    assert result.stderr == "error: the prompts /nope/x cannot be read: No such file or directory\n"


@pytest.mark.parametrize("content", ["", '{"index": 0, "prompt": "hello", "text": "mine"}\n{"index": 1, "pro'])
def test_a_second_run_with_the_same_output_is_refused_and_nothing_is_lost(folder, prompts, tmp_path, content):
    output = tmp_path / "answers.jsonl"
    output.write_text(content)
    target, _ = open_output(output)
    with target:
        target.write('{"index": 2, "prompt": "x", "text": "first"}\n')
        target.flush()
        before = output.read_text()
        result = generate(folder, prompts, "--output", output)
        assert result.exit_code == 2
        assert f"another run is writing to the output {output}" in result.stderr
        assert output.read_text() == before
        assert list(tmp_path.iterdir()) == sorted([output, prompts])
    assert generate(folder, prompts, "--output", output).exit_code == 0
    assert len(records(output.read_text())) == 5
    assert "first" in output.read_text()


def test_a_lock_goes_with_the_process_that_held_it(tmp_path):
    output = tmp_path / "answers.jsonl"
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from paged_backend.cli.answers import open_output\n"
        "target, _ = open_output(Path(sys.argv[1]))\n"
        "print('locked', flush=True)\n"
        "time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(output)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(ConfigError, match="another run is writing"):
            open_output(output)
        holder.kill()
    open_output(output)[0].close()


def test_a_file_that_took_the_others_place_before_the_lock_was_had_is_the_one_that_counts(tmp_path, monkeypatch):
    output = tmp_path / "answers.jsonl"
    output.write_text("")
    answer = '{"index": 0, "prompt": "x", "text": "of the other run"}\n'
    flock, replaced = fcntl.flock, []

    def replaced_meanwhile(file, operation):
        if not replaced:
            replaced.append(file)
            (tmp_path / "new").write_text(answer)
            os.replace(tmp_path / "new", output)
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", replaced_meanwhile)
    target, done = open_output(output)
    target.close()
    assert done == {0: '"x"'}
    assert output.read_text() == answer


def test_a_reader_that_goes_away_ends_the_run_in_silence(folder):
    code = "from paged_backend.cli.app import run\nrun()"
    options = ["--model", folder, "--kv-cache-memory", "4MiB", "--max-tokens", "1", "--threads", "1"]
    run = subprocess.Popen(
        [sys.executable, "-c", code, "generate", "-", "--max-num-seqs", "2", *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.stdout is not None
    run.stdout.close()
    run.stdout = None
    _, told = run.communicate(b"hello\n" * 30)
    assert run.returncode == 141
    # The libraries may have said something of their own.
    assert not any(word in told for word in (b"error: ", b"Error: ", b"Traceback", b"Broken pipe", b"answered"))

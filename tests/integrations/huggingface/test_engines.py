"""The engines that are kept behind a model: few, shared by calls that mean the same, and right in a forked process."""

from __future__ import annotations

import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
import torch
from stock_equality import engine_of, engines_of, left_padded, paged

from paged_backend.integrations.huggingface.engines import MAX_ENGINES
from paged_backend.plugins.batches import Static, Window
from paged_backend.plugins.fair import Fair
from paged_backend.plugins.fifo import Fifo
from paged_backend.plugins.victims import least_computed
from paged_backend.policies import ModelShape

SUPPORT = Path(__file__).parents[2] / "support"
PATIENCE_S = 60
INPUTS = left_padded([5, 9])


def test_a_model_keeps_the_engines_that_were_used_last(fresh):
    expected = paged(fresh, INPUTS)
    first = weakref.ref(engine_of(fresh))
    for size in range(1, 8):
        assert torch.equal(paged(fresh, INPUTS, paged_config={"block_size": size}), expected)
        # It is used again and again.
        paged(fresh, INPUTS)
    assert [engine.config.block_size for engine in engines_of(fresh)] == [5, 6, 7, 16]
    assert len(engines_of(fresh)) == MAX_ENGINES
    assert first() is engines_of(fresh)[-1]


def test_an_engine_in_use_is_not_closed_however_many_others_come(fresh):
    reached, opened = Event(), Event()

    def wait(input_ids, scores):
        reached.set()
        assert opened.wait(PATIENCE_S)
        return False

    expected = paged(fresh, INPUTS)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(paged, fresh, INPUTS, stopping_criteria=[wait], paged_config={"block_size": 3})
        assert reached.wait(PATIENCE_S)
        for size in range(4, 10):
            paged(fresh, INPUTS, paged_config={"block_size": size})
        opened.set()
        assert torch.equal(future.result(PATIENCE_S), expected)
    assert [engine.config.block_size for engine in engines_of(fresh)] == [3, 7, 8, 9]


def test_a_rule_or_a_seed_that_is_new_in_each_call_makes_no_pile_of_engines(fresh):
    def rule():
        return lambda shape, device: 8 if isinstance(shape, ModelShape) else 4

    for seed in range(6):
        paged(fresh, INPUTS, do_sample=True, paged_config={"seed": seed})
    assert len(engines_of(fresh)) == 1
    for _ in range(6):
        paged(fresh, INPUTS, paged_config={"block_size": rule()})
    assert len(engines_of(fresh)) == MAX_ENGINES


@pytest.mark.parametrize(
    ("make", "other"),
    [
        (lambda: Static(4), lambda: Static(3)),
        (lambda: Window(4, victim=least_computed), lambda: Window(4)),
        (Fair, Fifo),
    ],
    ids=["static", "window", "fair"],
)
def test_fresh_policies_of_equal_settings_share_an_engine(fresh, make, other):
    expected = paged(fresh)
    fresh_engines = []
    for policy in (make(), make(), other(), make()):
        assert torch.equal(paged(fresh, paged_config={"scheduler": policy}), expected)
        fresh_engines.append(engines_of(fresh)[-1])
    assert fresh_engines[0] is fresh_engines[1] is fresh_engines[3]
    assert fresh_engines[2] is not fresh_engines[0]


def test_a_policy_of_the_callers_own_gets_an_engine_of_its_own(fresh):
    class Counts(Fifo):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def candidates(self, now):
            self.calls += 1
            return super().candidates(now)

    policies = [Counts(), Counts()]
    for policy in [*policies, policies[0]]:
        paged(fresh, INPUTS, paged_config={"scheduler": policy})
    assert all(policy.calls > 0 for policy in policies)
    assert len(engines_of(fresh)) == 2


# The process forks while a thread is inside of generate, between calls, and from inside of a step.
PROGRAM = f"""
import os, sys, threading
sys.path.insert(0, {str(SUPPORT)!r})
import torch
torch.set_num_threads(1)
import paged_backend
from stock_equality import LENGTH, engines_of, left_padded, paged
from tiny_models import make_tiny

paged_backend.install()
model, inputs = make_tiny("llama"), left_padded([5, 9])
expected = model.generate(**inputs, **LENGTH)

def child(name, **options):
    pid = os.fork()
    if pid == 0:
        kept = engines_of(model)
        right = torch.equal(paged(model, inputs, **options), expected)
        print(name, right, engines_of(model) == kept, flush=True)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0

paged(model, inputs)
child("between calls")
reached, opened = threading.Event(), threading.Event()

def wait(input_ids, scores):
    reached.set()
    opened.wait()
    return False

thread = threading.Thread(target=paged, args=(model, inputs), kwargs={{"stopping_criteria": [wait]}})
thread.start()
reached.wait()
child("beside a call")
child("beside a call, in step", stopping_criteria=[lambda input_ids, scores: False])
opened.set()
thread.join()

def fork(input_ids, scores):
    if input_ids.shape[1] == 12:
        global pid
        pid = os.fork()
    return False

out = paged(model, inputs, stopping_criteria=[fork])
if pid == 0:
    print("from a step", torch.equal(out, expected), torch.equal(paged(model, inputs), expected), flush=True)
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
print("parent", torch.equal(out, expected), torch.equal(paged(model, inputs), expected), flush=True)
"""


def test_a_forked_process_gets_stocks_tokens_whatever_other_threads_were_doing():
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    program = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert program.returncode == 0, program.stderr
    assert program.stdout.splitlines() == [
        "between calls True True",
        "beside a call True False",
        "beside a call, in step True False",
        "from a step True True",
        "parent True True",
    ]

"""C++ work is cut over torch's threads without changing what comes out, and never takes more of them than torch has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_cases import assert_attention_close, make_case, oracle
from state_cases import make_gated_delta, make_selective

from paged_backend.kernels import (
    cpu,
    decode_attention,
    gated_delta_update,
    prefill_attention,
    selective_state_update,
)


@pytest.fixture(params=[1, 2, 3, 7])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("rule", [{}, {"window": 300}, {"sinks": True, "softcap": 5.0}], ids=str)
@pytest.mark.parametrize("contexts", [[1000], [1, 700, 0, 64, 65, 258, 128], [40] * 9], ids=str)
def test_contexts_cut_anywhere_attend_as_whole_ones(threads, contexts, rule):
    case = make_case(contexts, group=3, num_kv_heads=2, key_dim=32, **rule)
    output = decode_attention(*case.decode_arguments, backend="cpu")
    assert_attention_close(output, oracle(case))


def test_prompts_cut_into_tiles_attend_as_whole_ones(threads):
    case = make_case([300, 1, 90, 150], [260, 1, 90, 3], group=2, num_kv_heads=2, key_dim=32)
    output = prefill_attention(*case.prefill_arguments, backend="cpu")
    assert_attention_close(output, oracle(case))


def test_products_are_the_same_for_any_number_of_threads(threads):
    weight = torch.randn(300, 256, generator=torch.Generator().manual_seed(0))
    packed = cpu.pack(weight)
    for rows in (1, 9, 700):
        x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows))
        torch.testing.assert_close(packed(x), x @ weight.T, atol=1e-4, rtol=1e-4)


def test_states_are_the_same_to_the_bit_for_any_number_of_threads(threads):
    for run, make, options in (
        (gated_delta_update, make_gated_delta, {"normalises": True}),
        (selective_state_update, make_selective, {"softplus": True}),
    ):
        case, alone = make(5, dims=(32, 96)), make(5, dims=(32, 96))
        result = run(*case, **options, backend="cpu")
        torch.set_num_threads(1)
        expected = run(*alone, **options, backend="cpu")
        torch.set_num_threads(threads)
        torch.testing.assert_close((result, case.state), (expected, alone.state), atol=0, rtol=0, equal_nan=True)


_COUNT_THREADS = """
import os, sys, threading
import torch
sys.path.insert(0, sys.argv[1])
from tiny_models import make_tiny
from paged_backend import Engine, SamplingParams

count = lambda: len(os.listdir("/proc/self/task"))
engine = Engine(make_tiny("llama", hidden_size=256, intermediate_size=512))
assert engine.stats().swaps_made["layer"] == 3
params = SamplingParams(max_tokens=3, ignore_eos=True)

def run():
    before = count()
    for _ in range(6):
        engine.add_request(list(range(5, 105)), params)
    while engine.has_unfinished_requests():
        engine.step()
    print(count() - before)

for number in (1, 4):
    torch.set_num_threads(number)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads as Linux lists them")
def test_an_engine_on_a_second_thread_starts_no_more_threads_than_torch_was_told():
    support = Path(__file__).parents[1] / "support"
    # What OpenMP would start by itself, were it asked past torch.
    environment = {**os.environ, "OMP_NUM_THREADS": "5", "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [sys.executable, "-c", _COUNT_THREADS, str(support)], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    alone, four = map(int, run.stdout.split())
    assert alone == 0
    # Some of three: libgomp may still be winding up the threads of another master when counting begins.
    assert 1 <= four <= 3

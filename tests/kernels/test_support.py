"""What Triton kernels share: where they run, what their device is called, and how they become custom ops."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from kernel_cases import make_case
from state_cases import make_gated_delta, make_selective
from torch.utils._python_dispatch import TorchDispatchMode

from paged_backend.kernels import (
    LayerCache,
    add_rms_norm,
    decode_attention,
    gated_delta_update,
    prefill_attention,
    rms_norm,
    rotary_store_kv,
    selective_state_update,
    silu_mul,
    store_kv,
)
from paged_backend.kernels.triton import support as triton_support
from paged_backend.kernels.triton.support import (
    architecture,
    converts_float8,
    jit,
    next_power_of_2,
    num_processors,
    unavailable,
)

interpreted = pytest.mark.skipif(
    not triton_support.interpreted, reason="runs where TRITON_INTERPRET=1 is set, see test_interpreter.py"
)
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A GPU that need not be present, whose properties a test may set."""
    found = SimpleNamespace(capability=(9, 0), gcnArchName="gfx942:sramecc+:xnack-", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found.capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    for function in (architecture, num_processors):
        function.cache_clear()
    yield found
    for function in (architecture, num_processors):
        function.cache_clear()


# Devices


@pytest.mark.parametrize(("capability", "name"), [((8, 0), "sm_80"), ((9, 0), "sm_90"), ((12, 1), "sm_121")])
def test_a_gpu_of_nvidia_goes_by_its_capability(gpu, monkeypatch, capability, name):
    monkeypatch.setattr(torch.version, "hip", None)
    gpu.capability = capability
    assert architecture(GPU) == name
    assert num_processors(GPU) == 132


def test_a_gpu_of_amd_goes_by_its_name_without_its_features(gpu, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert architecture(GPU) == "gfx942"


def test_what_is_no_gpu_is_the_interpreter_of_a_few_processors():
    assert architecture(CPU) == "interpreter"
    assert 1 < num_processors(CPU) < 16


@pytest.mark.parametrize(
    ("name", "converts"),
    [
        *(("sm_80", False), ("sm_86", False), ("sm_89", True), ("sm_90", True), ("sm_120", True)),
        *(("gfx90a", False), ("gfx942", False), ("gfx950", True), ("gfx1100", False), ("gfx1201", True)),
        ("interpreter", False),
    ],
)
def test_float8_is_converted_where_triton_converts_this_kind(name, converts):
    assert converts_float8(name) is converts


def test_without_triton_nothing_runs_and_kernels_stay_plain_functions(monkeypatch):
    monkeypatch.setattr(triton_support, "available", False)
    assert unavailable(GPU) == "Triton is not installed"
    assert jit(next_power_of_2) is next_power_of_2


def test_kernels_run_on_a_gpu_and_on_the_cpu_only_interpreted(monkeypatch):
    monkeypatch.setattr(triton_support, "available", True)
    monkeypatch.setattr(triton_support, "interpreted", False)
    assert unavailable(GPU) is None
    assert "TRITON_INTERPRET=1, set before Python starts" in unavailable(CPU)
    monkeypatch.setattr(triton_support, "interpreted", True)
    assert unavailable(CPU) is None


def test_powers_of_two_are_the_next_ones_up():
    assert [next_power_of_2(number) for number in (1, 2, 3, 4, 5, 64, 65)] == [1, 2, 4, 4, 8, 64, 128]


# Custom ops


@pytest.mark.skipif(triton_support.interpreted, reason="here the kernels do run on the CPU")
def test_tensors_on_the_cpu_are_refused_without_the_interpreter():
    case = make_case([5])
    with pytest.raises(
        ValueError, match=r"cannot run in Triton on cpu: it runs on CUDA and ROCm devices; .* use backend='auto'"
    ):
        decode_attention(*case.decode_arguments, backend="triton")


def make_operations() -> dict[str, tuple]:
    """Every operation of the backend, with arguments it takes."""
    decode = make_case([37, 9], group=2, softcap=4.0, sinks=True, window=20)
    prefill = make_case([20, 9], [7, 9], group=2)
    tokens = torch.randn(3, 5, 2, 64)
    angles = torch.randn(2, 5, 64)
    cache = LayerCache(*torch.zeros(2, 3, 2, 4, 64))
    slots = torch.tensor([3, 0, -1, 11, 7])
    hidden, weight = torch.randn(3, 40), torch.randn(40)
    return {
        "decode": (decode_attention, decode.decode_arguments, {}),
        "prefill": (prefill_attention, prefill.prefill_arguments, {}),
        "store": (store_kv, (tokens[1], tokens[2], cache, slots), {}),
        "rotary": (rotary_store_kv, (*tokens, *angles, cache, slots), {}),
        "rms_norm": (rms_norm, (hidden, weight), {"eps": 1e-6}),
        "add_rms_norm": (add_rms_norm, (hidden, hidden, weight), {"eps": 1e-6}),
        "silu_mul": (silu_mul, (hidden, hidden), {}),
        "gated_delta": (gated_delta_update, tuple(make_gated_delta()), {"normalises": True}),
        "selective": (selective_state_update, tuple(make_selective()), {"softplus": True}),
    }


@interpreted
@pytest.mark.parametrize("name", make_operations())
def test_torch_compile_keeps_an_operation_whole_and_gives_the_same_answer(name):
    operation, arguments, options = make_operations()[name]
    run = functools.partial(operation, **options, backend="triton")
    # What was compiled for other operations counts towards a limit.
    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    copies = copy.deepcopy(arguments), copy.deepcopy(arguments)
    expected, actual = run(*copies[0]), compiled(*copies[1])
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    # What was written in place is the same too.
    for left, right in zip(*(list(tensors_in(copied)) for copied in copies), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)


def tensors_in(arguments: tuple) -> Iterator[torch.Tensor]:
    for argument in arguments:
        if isinstance(argument, LayerCache):
            yield from argument.tensors()
        elif isinstance(argument, torch.Tensor):
            yield argument


class Launches(TorchDispatchMode):
    """The custom ops of ours that run inside of it, and what they get."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "paged_backend":
            self.calls.append((function, args, kwargs or {}))
        return function(*args, **(kwargs or {}))


@interpreted
@pytest.mark.parametrize("name", make_operations())
def test_fakes_and_schemas_tell_the_truth(name):
    operation, arguments, options = make_operations()[name]
    with Launches() as launches:
        operation(*arguments, **options, backend="triton")
    ((op, given, named),) = launches.calls
    torch.library.opcheck(op, given, named, test_utils=("test_schema", "test_faketensor"))

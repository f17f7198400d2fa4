"""selective_state_update against transformers' own function, on states in the slots of a pool."""

from __future__ import annotations

import pytest
import torch
from pairwise import pairwise
from state_cases import POOLS, check_update, expect_selective, make_selective

from paged_backend.kernels import selective_state_update
from paged_backend.kernels.triton import support as triton_support

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# The interpreter takes a while for each of many programs.
BATCHES, GROUPS, DIMS = (
    ((1, 2), (1, 2), ((64, 16), (48, 128)))
    if triton_support.interpreted
    else ((1, 3, 32), (1, 2, 8), ((64, 16), (48, 16), (64, 128), (48, 128), (20, 24), (7, 33)))
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Those whose states are large come in few cases.
LARGE = (
    ()
    if triton_support.interpreted
    else (((64, 256), 1, 1, torch.float32, False, True), ((64, 256), 3, 2, torch.bfloat16, True, False))
)


def check(case, backend, softplus=True):
    expected = expect_selective(case, softplus)
    check_update(
        lambda: selective_state_update(*case, softplus=softplus, backend=backend), case, expected, case.x.dtype
    )


@pytest.mark.parametrize(
    ("dims", "batch", "groups", "dtype", "gated", "softplus"),
    pairwise(DIMS, BATCHES, GROUPS, DTYPES, (True, False), (True, False)) + list(LARGE),
    ids=str,
)
def test_a_token_of_each_sequence_equals_transformers(backend, dims, batch, groups, dtype, gated, softplus):
    case = make_selective(batch, groups, dims, dtype, gated)
    # Without softplus a step may be negative, and a state grow without end.
    check(case if softplus else case._replace(dt=case.dt.abs(), dt_bias=case.dt_bias.abs()), backend, softplus)


@pytest.mark.parametrize("lies", POOLS)
def test_a_pool_may_lie_anyhow(backend, lies):
    check(make_selective(dims=(16, 32), lies=lies), backend)


def test_sequences_may_read_one_slot(backend):
    case = make_selective()
    check(case._replace(slots_in=case.slots_in[:1].expand(2)), backend)


def test_dims_of_a_head_need_not_be_consecutive(backend):
    case = make_selective()
    apart = {name: getattr(case, name).transpose(1, 2).contiguous().transpose(1, 2) for name in ("x", "B", "C", "z")}
    check(case._replace(**apart), backend)


@pytest.mark.parametrize("step", [-60.0, -9.0, -1.0, 0.0, 15.0, 60.0])
def test_steps_of_every_size_are_exact(backend, step):
    case = make_selective(batch=1, num_groups=1)
    case = case._replace(dt=torch.full_like(case.dt, step), dt_bias=torch.zeros(2), D=torch.zeros(2))
    # Of a state that was zero everything comes from the step, so that the smallest is seen as well.
    case.state[case.slots_in] = 0
    _, states = expect_selective(case, True)
    selective_state_update(*case, softplus=True, backend=backend)
    torch.testing.assert_close(case.state[case.slots_out], states, atol=0, rtol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_states_of_other_dtypes_are_rounded_when_they_are_written(backend, dtype):
    case = make_selective()
    case = case._replace(state=case.state.to(dtype))
    result, states = expect_selective(case, True)
    actual = selective_state_update(*case, softplus=True, backend=backend)
    torch.testing.assert_close(actual, result, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(case.state[case.slots_out], states.to(dtype), atol=1e-5, rtol=2**-8)


def test_no_sequences_change_nothing(backend):
    case = make_selective(batch=0)
    assert selective_state_update(*case, softplus=True, backend=backend).shape == (0, 4, 20)
    assert case.state.isnan().all()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("B", lambda x: x[:, :1], r"B and C must be alike.*got \[2, 1, 24\] and \[2, 2, 24\]"),
        ("x", lambda x: x[:, :3], "num_groups a divisor of 3"),
        ("dt", lambda x: x[:, :3], r"dt must be \[2, 4\], got \[2, 3\]"),
        ("z", lambda x: x[..., :9], r"z must be \[2, 4, 20\], got \[2, 4, 9\]"),
        ("D", lambda x: x[:, None], r"D must be \[4\], got \[4, 1\]"),
        ("state", lambda x: x[..., :9], r"state must be \[num_slots, 4, 20, 24\], got \[7, 4, 20, 9\]"),
        ("slots_in", lambda x: x[:1], r"slots_in must be torch.int64 \[2\], got torch.int64 \[1\]"),
        ("slots_out", lambda x: x.int(), r"slots_out must be torch.int64 \[2\], got torch.int32 \[2\]"),
    ],
)
def test_what_does_not_fit_is_refused(name, change, message):
    case = make_selective()
    with pytest.raises(ValueError, match=message):
        selective_state_update(*case._replace(**{name: change(getattr(case, name))}), softplus=True)

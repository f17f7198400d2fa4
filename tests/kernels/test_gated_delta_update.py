"""gated_delta_update against transformers' own function, on states in the slots of a pool."""

from __future__ import annotations

import pytest
import torch
from pairwise import pairwise
from state_cases import POOLS, check_update, expect_gated_delta, make_gated_delta

from paged_backend.kernels import gated_delta_update
from paged_backend.kernels.triton import support as triton_support

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# The interpreter takes a while for each of many programs.
BATCHES, GROUPS, DIMS = (
    ((1, 2), (1, 2), ((16, 16), (48, 48)))
    if triton_support.interpreted
    else ((1, 3, 32), (1, 2, 4), ((16, 16), (48, 48), (64, 64), (128, 128), (24, 20), (7, 33)))
)
# Those whose states are large come in few cases.
LARGE = (
    ()
    if triton_support.interpreted
    else (((256, 256), 1, 4, torch.float32, True), ((256, 256), 3, 1, torch.bfloat16, False))
)


def check(case, backend, normalises=True):
    expected = expect_gated_delta(case, normalises)
    check_update(
        lambda: gated_delta_update(*case, normalises=normalises, backend=backend), case, expected, case.value.dtype
    )


@pytest.mark.parametrize(
    ("dims", "batch", "group", "dtype", "normalises"),
    pairwise(DIMS, BATCHES, GROUPS, (torch.float32, torch.bfloat16, torch.float16), (True, False)) + list(LARGE),
    ids=str,
)
def test_a_token_of_each_sequence_equals_transformers(backend, dims, batch, group, dtype, normalises):
    check(make_gated_delta(batch, group, dims, dtype), backend, normalises)


@pytest.mark.parametrize("lies", POOLS)
def test_a_pool_may_lie_anyhow(backend, lies):
    check(make_gated_delta(dims=(32, 32), lies=lies), backend)


def test_sequences_may_read_one_slot(backend):
    case = make_gated_delta()
    check(case._replace(slots_in=case.slots_in[:1].expand(2)), backend)


def test_dims_of_a_head_need_not_be_consecutive(backend):
    case = make_gated_delta()
    apart = [heads.transpose(1, 2).contiguous().transpose(1, 2) for heads in case[:3]]
    check(case._replace(query=apart[0], key=apart[1], value=apart[2]), backend)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_states_of_other_dtypes_are_rounded_when_they_are_written(backend, dtype):
    case = make_gated_delta()
    case = case._replace(state=case.state.to(dtype))
    result, states = expect_gated_delta(case, True)
    actual = gated_delta_update(*case, normalises=True, backend=backend)
    torch.testing.assert_close(actual, result, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(case.state[case.slots_out], states.to(dtype), atol=1e-5, rtol=2**-8)


def test_no_sequences_change_nothing(backend):
    case = make_gated_delta(batch=0)
    assert gated_delta_update(*case, normalises=True, backend=backend).shape == (0, 4, 20)
    assert case.state.isnan().all()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("query", lambda x: x[:, :1], r"query and key must be alike.*got \[2, 1, 24\], \[2, 2, 24\] and \[2, 4, 20\]"),
        ("value", lambda x: x[:, :3], "a multiple of their heads"),
        ("beta", lambda x: x[:, :3], r"beta must be \[2, 4\], got \[2, 3\]"),
        ("state", lambda x: x[:, :3], r"state must be \[num_slots, 4, 24, 20\], got \[7, 3, 24, 20\]"),
        ("slots_in", lambda x: x[:1], r"slots_in must be torch.int64 \[2\], got torch.int64 \[1\]"),
        ("slots_out", lambda x: x.int(), r"slots_out must be torch.int64 \[2\], got torch.int32 \[2\]"),
    ],
)
def test_what_does_not_fit_is_refused(name, change, message):
    case = make_gated_delta()
    with pytest.raises(ValueError, match=message):
        gated_delta_update(*case._replace(**{name: change(getattr(case, name))}), normalises=True)

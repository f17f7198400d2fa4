"""The pool of recurrent states: what is no pool for a step is refused, and which pools kernels take."""

from __future__ import annotations

import pytest
import torch

from paged_backend.kernels.recurrent_state import check_pool, has_plain_slots

POOL = torch.zeros(5, 2, 4, 3)
SHAPE = (2, 2, 4, 3)
SLOTS = torch.tensor([3, 0])


def test_a_pool_whose_slots_hold_the_states_is_one():
    check_pool(POOL, SHAPE, SLOTS, SLOTS)
    # As many slots as sequences are not asked for, nor that lists are apart.
    check_pool(POOL[:1], SHAPE, SLOTS, SLOTS)


@pytest.mark.parametrize("state", [POOL[..., :2], POOL[0], POOL.transpose(2, 3), POOL[None]])
def test_slots_of_another_shape_are_refused_with_both(state):
    with pytest.raises(ValueError, match=r"state must be \[num_slots, 2, 4, 3\], got \[") as refusal:
        check_pool(state, SHAPE, SLOTS, SLOTS)
    assert str(list(state.shape)) in str(refusal.value)


@pytest.mark.parametrize(
    ("slots", "found"), [(SLOTS[:1], r"int64 \[1\]"), (SLOTS[None], r"int64 \[1, 2\]"), (SLOTS.int(), r"int32 \[2\]")]
)
def test_a_list_that_names_no_int64_slot_for_each_sequence_is_refused_by_name(slots, found):
    with pytest.raises(ValueError, match=rf"slots_in must be torch.int64 \[2\], got torch\.{found}"):
        check_pool(POOL, SHAPE, slots, SLOTS)
    with pytest.raises(ValueError, match=rf"slots_out must be torch.int64 \[2\], got torch\.{found}"):
        check_pool(POOL, SHAPE, SLOTS, slots)


def test_slots_may_be_any_distance_apart_but_whole():
    assert has_plain_slots(POOL)
    assert has_plain_slots(torch.zeros(5, 3, 2, 4)[:, 1])
    assert not has_plain_slots(POOL.transpose(2, 3))
    assert not has_plain_slots(POOL[..., ::2])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_slots_of_another_precision_are_not_for_kernels(dtype):
    assert not has_plain_slots(POOL.to(dtype))

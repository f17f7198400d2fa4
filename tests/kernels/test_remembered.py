"""Remembered: what was worked out from a tensor is worked out again only when it, or an argument, has changed."""

from __future__ import annotations

import torch

from paged_backend.kernels.remembered import Remembered


class Counted:
    """Adds up a tensor, and counts how often."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, tensor, *arguments):
        self.count += 1
        return tensor.sum().item(), arguments


def test_equal_content_is_worked_out_once_whichever_tensor_holds_it():
    counted = Counted()
    remembered = Remembered(counted)
    results = [remembered(torch.tensor([1, 2]), "a") for _ in range(3)]
    assert results == [(3, ("a",))] * 3
    assert counted.count == 1


def test_a_tensor_filled_anew_is_worked_out_anew():
    remembered, table = Remembered(Counted()), torch.tensor([1, 2])
    assert remembered(table) == (3, ())
    table[0] = 5
    assert remembered(table) == (7, ())


def test_the_latest_content_takes_the_place_of_the_one_before():
    counted = Counted()
    remembered = Remembered(counted)
    for tensor in (torch.tensor([1]), torch.tensor([2]), torch.tensor([1])):
        remembered(tensor)
    assert counted.count == 3


def test_another_shape_of_the_same_elements_is_another_content():
    counted = Counted()
    remembered = Remembered(counted)
    remembered(torch.zeros(4))
    remembered(torch.zeros(2, 2))
    assert counted.count == 2


def test_arguments_and_dtypes_are_kept_apart():
    counted = Counted()
    remembered = Remembered(counted)
    for _ in range(2):
        assert remembered(torch.tensor([1]), 4) == (1, (4,))
        assert remembered(torch.tensor([1]), 5) == (1, (5,))
        assert remembered(torch.tensor([1], dtype=torch.int32), 4) == (1, (4,))
    assert counted.count == 3


def test_beyond_the_capacity_the_oldest_goes():
    counted = Counted()
    remembered = Remembered(counted, capacity=2)
    for argument in ("a", "b", "c", "b", "c"):
        remembered(torch.tensor([1]), argument)
    assert counted.count == 3
    remembered(torch.tensor([1]), "a")
    assert counted.count == 4


def test_what_was_worked_out_anew_is_the_youngest():
    counted = Counted()
    remembered = Remembered(counted, capacity=2)
    for number, argument in ((1, "a"), (1, "b"), (2, "a"), (1, "c"), (2, "a")):
        remembered(torch.tensor([number]), argument)
    assert counted.count == 4


def test_content_that_takes_the_place_of_its_own_drives_nothing_else_out():
    counted = Counted()
    remembered = Remembered(counted, capacity=2)
    for number, argument in ((1, "a"), (1, "b"), (2, "b"), (1, "a")):
        remembered(torch.tensor([number]), argument)
    assert counted.count == 3

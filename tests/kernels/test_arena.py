"""Arena: tensors of their own that lie together, each in memory that is as long-lived as it."""

from __future__ import annotations

import pytest
import torch

from paged_backend.kernels.cpu import Arena
from paged_backend.kernels.cpu import arena as arena_module
from paged_backend.kernels.cpu.arena import reserve

DTYPES = [torch.int8, torch.bfloat16, torch.float32, torch.int64]


@pytest.fixture
def reserved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the pieces that were reserved, the usual one of which is small."""
    sizes: list[int] = []

    def note(num_bytes: int) -> torch.Tensor:
        sizes.append(num_bytes)
        return reserve(num_bytes)

    monkeypatch.setattr(arena_module, "reserve", note)
    monkeypatch.setattr(arena_module, "_PIECE_BYTES", 4096)
    return sizes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_is_contiguous_of_its_shape_and_dtype_on_a_cache_line(reserved, dtype):
    arena = Arena()
    # What was taken before leaves an odd number of bytes behind it.
    arena.empty((3,), torch.int8)
    tensor = arena.empty((2, 3, 5), dtype)
    assert (tensor.shape, tensor.dtype) == ((2, 3, 5), dtype)
    assert tensor.is_contiguous()
    first = tensor.data_ptr() - tensor.untyped_storage().data_ptr()
    assert first % 64 == 0


def test_tensors_of_one_piece_do_not_overlap(reserved):
    arena = Arena()
    tensors = [arena.empty((count,), torch.int8) for count in (1, 63, 64, 65, 200)]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, tensor in enumerate(tensors):
        assert tensor.eq(number).all()
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(reserved) == 1


def test_what_does_not_fit_begins_another_piece(reserved):
    arena = Arena()
    first, second = (arena.empty((3000,), torch.int8) for _ in range(2))
    assert reserved == [4096, 4096]
    first.fill_(1)
    second.fill_(2)
    assert first.eq(1).all()


def test_what_is_larger_than_a_piece_gets_one_of_its_size(reserved):
    large = Arena().empty((3, 2048), torch.float32)
    assert reserved[0] >= large.numel() * 4
    large.fill_(1.0)
    assert large.sum() == 3 * 2048


def test_nothing_takes_no_room_that_is_read():
    assert Arena().empty((0, 4), torch.float32).shape == (0, 4)


def test_a_tensor_outlives_its_arena():
    arena = Arena()
    tensor = arena.empty((1000,), torch.float32).fill_(3.0)
    del arena
    assert tensor.eq(3.0).all()


def test_reserved_memory_can_be_written():
    memory = reserve(10_000)
    assert (memory.shape, memory.dtype) == ((10_000,), torch.int8)
    assert memory.fill_(7).sum() == 70_000


def test_memory_without_large_pages_is_ordinary_memory(monkeypatch):
    monkeypatch.delattr(arena_module.mmap, "MADV_HUGEPAGE", raising=False)
    monkeypatch.setattr(arena_module.mmap, "mmap", None)
    assert reserve(100).fill_(1).sum() == 100


def test_more_than_the_system_has_is_a_memory_error_with_the_number(monkeypatch):
    def refuse(*arguments, **options):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(arena_module.mmap, "MADV_HUGEPAGE", 14, raising=False)
    monkeypatch.setattr(arena_module.mmap, "mmap", refuse)
    with pytest.raises(MemoryError, match=r"the system has no 2,000,000 bytes: .*Cannot allocate memory"):
        reserve(2_000_000)

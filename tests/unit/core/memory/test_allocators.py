"""What only some allocators do, and the free list of an arena. The contract of all:
`tests/contract/test_allocators.py`; against a model: `tests/property/test_allocator_model.py`.
"""

from __future__ import annotations

import gc
import inspect
import logging
import mmap
import weakref

import pytest
import torch
from lmcache_core.errors import CapacityError, ConfigError, IntegrityError
from lmcache_core.memory import (
    ALIGN_BYTES,
    DTYPE_ITEMSIZE,
    ArenaAllocator,
    BufferAllocator,
    BytesBufferMemoryObj,
    FreeBlock,
    FreeList,
    GPUMemoryAllocator,
    HostMemoryAllocator,
    MemoryFormat,
    MemoryObjMetadata,
    MixedMemoryAllocator,
    PinMemoryAllocator,
    TensorMemoryAllocator,
    TensorMemoryObj,
    dtype_name,
    num_bytes,
)

CAPACITY = 8 * ALIGN_BYTES
MORE_THAN_ANY_MACHINE_HAS = 1 << 60
HAS_CUDA = torch.cuda.is_available()


def test_an_anonymous_arena_is_private_and_at_least_a_page():
    arena = ArenaAllocator.anonymous(1 << 20)
    assert arena.capacity_bytes == 1 << 20
    assert ArenaAllocator.anonymous(1).capacity_bytes == mmap.PAGESIZE
    with arena.allocate((1 << 20,), "uint8") as obj:
        assert not any(obj.byte_array[:: 1 << 12])


@pytest.mark.parametrize(
    ("tensor", "named"),
    [(torch.zeros(64, 64)[:, ::2], "contiguous"), (torch.zeros(64, device="meta"), "meta")],
    ids=["strides", "meta"],
)
def test_an_arena_of_scattered_no_or_read_only_memory_is_refused(tensor, named):
    with pytest.raises(ValueError, match=named):
        TensorMemoryAllocator(tensor)
    with pytest.raises(ValueError, match="writable"):
        ArenaAllocator(memoryview(bytes(4096)))


@pytest.mark.parametrize("kind", [HostMemoryAllocator, PinMemoryAllocator])
@pytest.mark.parametrize("size", [0, 3 * mmap.PAGESIZE + ALIGN_BYTES + 1])
def test_host_arenas_have_the_size_asked_for_and_begin_at_a_page(kind, size):
    allocator = kind(size)
    assert allocator.capacity_bytes == size - size % ALIGN_BYTES
    if allocator.capacity_bytes:
        with allocator.allocate((1,), "uint8") as obj:
            assert obj.tensor.data_ptr() % mmap.PAGESIZE == 0


@pytest.mark.parametrize(
    "kind",
    [
        HostMemoryAllocator,
        PinMemoryAllocator,
        ArenaAllocator.anonymous,
        lambda n: GPUMemoryAllocator(n, "cpu"),
    ],
)
def test_impossible_sizes_are_refused(kind):
    with pytest.raises(ValueError, match="-1"):
        kind(-1)
    with pytest.raises(CapacityError, match="GB"):
        kind(MORE_THAN_ANY_MACHINE_HAS)


def test_host_memory_is_pinned_only_when_there_is_cuda(caplog):
    with caplog.at_level(logging.INFO, "lmcache_core"):
        allocator = PinMemoryAllocator(CAPACITY)
    with allocator.allocate((4,), torch.float32) as obj:
        assert obj.tensor.is_pinned() is allocator.is_pinned is HAS_CUDA
    assert len(caplog.records) == (0 if HAS_CUDA else 1)


def test_pinned_memory_lives_as_long_as_what_is_in_it():
    allocator = PinMemoryAllocator(CAPACITY)
    gone = weakref.ref(allocator)
    obj = allocator.allocate((4,), torch.float32)
    tensor = obj.tensor.fill_(3)
    del allocator
    gc.collect()
    assert gone() is not None
    obj.ref_count_down()
    del obj
    gc.collect()
    assert gone() is None
    assert tensor.tolist() == [3.0] * 4


@pytest.mark.parametrize("device", ["cuda:99", *([] if HAS_CUDA else ["cuda"])])
def test_an_absent_device_is_named_with_the_fix(device):
    with pytest.raises(ConfigError, match=f"{device}.*device='cpu'"):
        GPUMemoryAllocator(CAPACITY, device)
    with pytest.raises(ConfigError, match=r"gpu.*'cuda'"):
        GPUMemoryAllocator(CAPACITY, "gpu")
    assert inspect.signature(GPUMemoryAllocator).parameters["device"].default == "cuda"


def test_mixed_memory_keeps_buffers_apart_and_bounded():
    allocator = MixedMemoryAllocator(CAPACITY)
    assert allocator.capacity_bytes == CAPACITY
    blob = allocator.allocate((CAPACITY,), "uint8")
    assert allocator.allocate((1,), None, MemoryFormat.BINARY) is None, (
        "encoded chunks are counted with the rest"
    )
    buffer = allocator.allocate((CAPACITY - 1,), None, MemoryFormat.BINARY_BUFFER)
    assert isinstance(blob, TensorMemoryObj)
    assert isinstance(buffer, BytesBufferMemoryObj)
    assert allocator.used_bytes == CAPACITY
    assert allocator.allocate((2,), None, MemoryFormat.BINARY_BUFFER) is None
    allocator.free(buffer)
    assert allocator.used_bytes == CAPACITY
    whole = allocator.allocate((CAPACITY,), None, MemoryFormat.BINARY_BUFFER)
    assert isinstance(whole, BytesBufferMemoryObj)
    allocator.free(whole)
    blob.ref_count_down()
    allocator.check_integrity()


def test_byte_buffers_live_on_the_cpu_and_are_bounded():
    assert BufferAllocator("cpu").device == "cpu"
    assert BufferAllocator().capacity_bytes == 5 << 30
    with pytest.raises(ValueError, match="cpu"):
        BufferAllocator("cuda")
    with pytest.raises(ValueError, match="-1"):
        BufferAllocator("cpu", -1)
    with BufferAllocator().allocate((4,), "uint8") as obj:
        assert obj.get_memory_format() is MemoryFormat.BINARY_BUFFER
        assert bytes(obj.byte_array) == bytes(4)


@pytest.mark.parametrize("name", DTYPE_ITEMSIZE)
def test_names_and_sizes_of_dtypes_are_those_of_torch(name):
    dtype = getattr(torch, name)
    assert dtype_name(dtype) == dtype_name(name) == dtype_name(f"torch.{name}") == name
    assert DTYPE_ITEMSIZE[name] == dtype.itemsize
    assert num_bytes((2, 3, 4), dtype) == torch.empty(2, 3, 4, dtype=dtype).nbytes


@pytest.mark.parametrize("wrong", ["Float32", "", None, torch.complex64, float])
def test_an_unsupported_dtype_is_refused(wrong):
    with pytest.raises(ValueError, match="not supported"):
        dtype_name(wrong)


def test_memory_elsewhere_has_tensors_but_no_bytes():
    """The meta device stands for one whose memory this process cannot address."""
    obj = TensorMemoryObj(
        torch.empty(64, dtype=torch.uint8, device="meta"),
        MemoryObjMetadata((2, 3), torch.int16, 0, 64, 1),
    )
    assert (obj.tensor.shape, obj.tensor.dtype, obj.tensor.device.type) == (
        (2, 3),
        torch.int16,
        "meta",
    )
    with pytest.raises(ValueError, match="meta"):
        _ = obj.byte_array


def test_a_buffer_that_the_machine_cannot_hold_is_none_and_takes_nothing():
    allocator = BufferAllocator("cpu", 2 * MORE_THAN_ANY_MACHINE_HAS)
    assert allocator.allocate((MORE_THAN_ANY_MACHINE_HAS,), "uint8") is None
    assert allocator.used_bytes == 0
    allocator.check_integrity()


LIST_BYTES = 16 * ALIGN_BYTES


def test_the_smallest_extent_that_fits_is_taken():
    free = FreeList(LIST_BYTES)
    taken = [free.allocate(n * ALIGN_BYTES) for n in (4, 1, 2, 1, 8)]
    free.free(taken[0].start)
    free.free(taken[2].start)
    assert free.allocate(2 * ALIGN_BYTES) == taken[2]
    assert free.allocate(3 * ALIGN_BYTES).start == taken[0].start
    free.check_integrity()


def units(start: int, size: int) -> FreeBlock:
    return FreeBlock(start * ALIGN_BYTES, size * ALIGN_BYTES)


@pytest.mark.parametrize(
    "extents",
    [
        [units(1, 1), units(4, 1)],
        [units(5, 4)],
        [units(15, 2)],
        [units(-1, 1)],
        [units(0, 2), units(1, 1)],
        [units(0, 0)],
        [FreeBlock(1, ALIGN_BYTES)],
        [FreeBlock(0, 1)],
    ],
)
def test_extents_that_are_not_all_free_are_not_taken_and_nothing_is(extents):
    free = FreeList(LIST_BYTES)
    free.take([units(4, 1), units(8, 2)])
    before = free.free_blocks()
    with pytest.raises(ValueError, match="not a free extent"):
        free.take(extents)
    assert free.free_blocks() == before
    free.check_integrity()


@pytest.mark.parametrize("start", [ALIGN_BYTES, 1, -1, LIST_BYTES])
def test_only_the_start_of_a_used_extent_can_be_freed(start):
    free = FreeList(LIST_BYTES)
    assert free.allocate(2 * ALIGN_BYTES).start == 0
    with pytest.raises(IntegrityError):
        free.free(start)
    free.free(0)
    with pytest.raises(IntegrityError):
        free.free(0)
    free.check_integrity()

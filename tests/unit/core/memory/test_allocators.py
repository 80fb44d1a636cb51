"""What every allocator does, and what only some do."""

from __future__ import annotations

import threading

import pytest
import torch
from lmcache_core import memory
from lmcache_core.errors import IntegrityError
from lmcache_core.memory import (
    ALIGN_BYTES,
    ArenaAllocator,
    BufferAllocator,
    BytesBufferMemoryObj,
    HostMemoryAllocator,
    MemoryAllocatorInterface,
    MemoryFormat,
    MemoryObj,
    MemoryObjMetadata,
    TensorMemoryAllocator,
    TensorMemoryObj,
)

CAPACITY = 8 * ALIGN_BYTES
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.uint8,
    torch.bool,
]
ARENAS = {
    "private": lambda: ArenaAllocator(memoryview(bytearray(CAPACITY))),
    "tensor": lambda: TensorMemoryAllocator(torch.zeros(CAPACITY // 4, dtype=torch.float32)),
    "host": lambda: HostMemoryAllocator(CAPACITY),
}


@pytest.fixture(params=ARENAS.values(), ids=ARENAS.keys())
def arena(request):
    allocator = request.param()
    yield allocator
    allocator.check_integrity()


@pytest.fixture(params=[*ARENAS.values(), BufferAllocator], ids=[*ARENAS.keys(), "buffer"])
def allocator(request):
    allocator = request.param()
    yield allocator
    allocator.check_integrity()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensor_and_bytes_share_memory(allocator, dtype):
    shape = (2, 3, 5, 7)
    obj = allocator.allocate(shape, dtype, MemoryFormat.KV_BLOB)
    assert isinstance(obj, MemoryObj)
    assert isinstance(allocator, MemoryAllocatorInterface)
    assert (obj.tensor.shape, obj.tensor.dtype, obj.get_memory_format()) == (torch.Size(shape), dtype, MemoryFormat.KV_BLOB)
    assert obj.tensor.is_contiguous()
    size = 210 * dtype.itemsize
    assert obj.get_size() == obj.metadata.get_size() == len(obj.byte_array) == size
    obj.byte_array[:] = bytes(i % 2 for i in range(size))
    assert bytes(obj.tensor.view(torch.uint8).flatten().tolist()) == bytes(obj.byte_array)
    obj.tensor.view(torch.uint8).fill_(1)
    assert bytes(obj.byte_array) == b"\1" * size
    obj.ref_count_down()


def test_dtypes_may_be_given_by_name_or_not_at_all(allocator):
    with allocator.allocate((3, 4), "bfloat16") as named, allocator.allocate((10,), None) as plain:
        assert named.tensor.dtype == torch.bfloat16
        assert named.get_size() == 24
        assert (plain.tensor.dtype, plain.get_size(), len(plain.byte_array)) == (torch.uint8, 10, 10)


def test_an_unknown_dtype_is_refused_and_takes_nothing(allocator):
    with pytest.raises(ValueError, match="complex64"):
        allocator.allocate((3,), torch.complex64)


def test_an_empty_tensor_is_possible(allocator):
    with allocator.allocate((2, 0, 4), torch.float16) as obj:
        assert obj.tensor.shape == (2, 0, 4)
        assert len(obj.byte_array) == 0


def test_objects_do_not_overlap(arena):
    objects = [arena.allocate((100,), "uint8") for _ in range(5)]
    for i, obj in enumerate(objects):
        obj.byte_array[:] = bytes([i]) * 100
    assert [bytes(obj.byte_array) for obj in objects] == [bytes([i]) * 100 for i in range(5)]
    assert all(obj.metadata.address % ALIGN_BYTES == 0 for obj in objects)
    assert all(obj.metadata.phy_size == ALIGN_BYTES for obj in objects)
    assert arena.used_bytes == 5 * ALIGN_BYTES
    for obj in objects:
        obj.ref_count_down()
    assert arena.used_bytes == 0


def test_full_is_none_and_heals(arena):
    assert arena.capacity_bytes == CAPACITY
    assert arena.allocate((CAPACITY + 1,), "uint8") is None
    whole = arena.allocate((CAPACITY,), "uint8")
    assert arena.allocate((1,), "uint8") is None
    whole.ref_count_down()
    with arena.allocate((CAPACITY,), "uint8") as again:
        assert len(again.byte_array) == CAPACITY


def test_the_last_reference_frees(arena):
    obj = arena.allocate((1,), "uint8")
    assert (obj.get_ref_count(), arena.get_ref_count(obj)) == (1, 1)
    obj.ref_count_up()
    with obj:
        assert obj.get_ref_count() == 2
    assert (obj.get_ref_count(), arena.used_bytes) == (1, ALIGN_BYTES)
    obj.ref_count_down()
    assert (obj.get_ref_count(), arena.used_bytes) == (0, 0)


def test_a_freed_object_cannot_be_used_again(arena):
    obj = arena.allocate((1,), "uint8")
    obj.ref_count_down()
    for use in (obj.ref_count_up, obj.ref_count_down, lambda: arena.free(obj)):
        with pytest.raises(IntegrityError):
            use()
    other = arena.allocate((1,), "uint8")
    with pytest.raises(IntegrityError):
        obj.ref_count_down()
    assert other.get_ref_count() == 1
    other.ref_count_down()


def test_a_freed_object_cannot_free_its_successor(arena):
    obj = arena.allocate((1,), "uint8")
    obj.ref_count_down()
    successor = arena.allocate((1,), "uint8")
    assert successor.metadata.address == obj.metadata.address
    with pytest.raises(IntegrityError):
        arena.free(obj)
    assert arena.used_bytes == ALIGN_BYTES
    successor.ref_count_down()


def test_free_takes_the_memory_whatever_the_references(arena):
    obj = arena.allocate((1,), "uint8")
    obj.ref_count_up()
    arena.free(obj)
    assert (obj.get_ref_count(), arena.used_bytes) == (0, 0)


def test_threads_leak_nothing(arena):
    failures = []

    def work():
        try:
            for i in range(300):
                obj = arena.allocate((1 + i % 700,), "uint8")
                if obj is not None:
                    obj.ref_count_up()
                    obj.ref_count_down()
                    obj.ref_count_down()
        except IntegrityError as exc:
            failures.append(exc)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert arena.used_bytes == 0


def test_an_anonymous_arena_is_private_and_at_least_a_page():
    arena = ArenaAllocator.anonymous(1 << 20)
    assert arena.capacity_bytes == 1 << 20
    assert ArenaAllocator.anonymous(1).capacity_bytes == 4096
    with arena.allocate((1 << 20,), "uint8") as obj:
        assert not any(obj.byte_array[:: 1 << 12])


def test_an_arena_needs_to_be_writable():
    with pytest.raises(ValueError, match="writable"):
        ArenaAllocator(memoryview(bytes(4096)))


def test_an_arena_cuts_the_tensors_own_memory():
    tensor = torch.zeros(CAPACITY, dtype=torch.uint8)
    allocator = TensorMemoryAllocator(tensor)
    assert TensorMemoryAllocator.ALIGN_BYTES == 512
    with allocator.allocate((3,), "uint8"), allocator.allocate((2,), torch.int16) as second:
        second.tensor.fill_(0x0101)
    assert tensor.nonzero().flatten().tolist() == [512, 513, 514, 515]


def test_an_arena_of_scattered_memory_is_refused():
    with pytest.raises(ValueError, match="contiguous"):
        TensorMemoryAllocator(torch.zeros(64, 64)[:, ::2])


def test_an_arena_elsewhere_is_refused():
    with pytest.raises(ValueError, match="meta"):
        TensorMemoryAllocator(torch.zeros(64, device="meta"))


def test_a_tensor_object_without_an_allocator_belongs_to_python():
    raw = torch.arange(64, dtype=torch.uint8)
    obj = TensorMemoryObj(raw, MemoryObjMetadata((2, 3), torch.int16, 0, 64, 1, MemoryFormat.KV_BLOB))
    obj.ref_count_up()
    obj.ref_count_down()
    obj.ref_count_down()
    assert (obj.get_ref_count(), obj.get_size(), bytes(obj.byte_array)) == (1, 12, bytes(range(12)))
    obj.tensor.zero_()
    assert raw[:12].sum() == 0
    assert raw[12] == 12


@pytest.mark.parametrize("raw", [b"abcdef", bytearray(b"abcdef"), memoryview(b"abcdef")])
def test_bytes_are_shared_not_copied_and_never_freed(raw):
    obj = BytesBufferMemoryObj(raw)
    assert (obj.get_memory_format(), obj.get_size(), bytes(obj.byte_array)) == (MemoryFormat.BINARY_BUFFER, 6, b"abcdef")
    obj.ref_count_down()
    obj.ref_count_up()
    assert obj.get_ref_count() == 1
    assert obj.tensor.tolist() == list(b"abcdef")
    if isinstance(raw, bytearray):
        raw[0] = ord("x")
        assert obj.byte_array[0] == ord("x")


def test_byte_buffers_live_on_the_cpu():
    assert BufferAllocator("cpu").device == "cpu"
    with pytest.raises(ValueError, match="cpu"):
        BufferAllocator("cuda")
    obj = BufferAllocator().allocate((4,), "uint8")
    BufferAllocator().free(obj)
    assert BufferAllocator().get_ref_count(obj) == 1
    assert obj.get_memory_format() is MemoryFormat.BINARY_BUFFER


def test_formats_keep_their_documented_numbers():
    assert {f.name: f.value for f in MemoryFormat} == {"UNDEFINED": 0, "KV_BLOB": 1, "BINARY": 2, "BINARY_BUFFER": 3}
    assert [f.token_dim() for f in MemoryFormat] == [0, 2, 0, 0]


def test_every_name_of_the_package_exists():
    assert all(getattr(memory, name) is not None for name in memory.__all__)
    with pytest.raises(AttributeError, match="NoSuchThing"):
        _ = memory.NoSuchThing

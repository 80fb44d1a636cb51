"""What every allocator must do. A test module subclasses `AllocatorSuite`, or `ArenaSuite`, and
gives it a `make_allocator` method.
"""

from __future__ import annotations

import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Protocol

import pytest
import torch
from lmcache_core.errors import IntegrityError
from lmcache_core.memory import ALIGN_BYTES, MemoryFormat, MemoryObj

from tests.suites.threads import interleave

CAPACITY_BYTES = 16 * ALIGN_BYTES
DTYPES = (
    *(
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ),
    *(torch.int64, torch.uint8, torch.bool),
)
NUM_TURNS = 200


class BoundedAllocator(Protocol):
    """A `MemoryAllocatorInterface` that says how much it has and how much is out."""

    @property
    def capacity_bytes(self) -> int:
        """Bytes that can be handed out."""

    @property
    def used_bytes(self) -> int:
        """Bytes handed out."""

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype | str | None, fmt: MemoryFormat
    ) -> MemoryObj | None:
        """See `MemoryAllocatorInterface.allocate`."""

    def free(self, memory_obj: MemoryObj) -> None:
        """See `MemoryAllocatorInterface.free`."""

    def get_ref_count(self, memory_obj: MemoryObj) -> int:
        """See `MemoryAllocatorInterface.get_ref_count`."""

    def check_integrity(self) -> None:
        """See `MemoryAllocatorInterface.check_integrity`."""


def write_pattern(memory_obj: MemoryObj, seed: int) -> None:
    """Fill an object with bytes that depend on the seed; through its tensor, since not all
    memory has addressable bytes.
    """
    flat = memory_obj.tensor.flatten().view(torch.uint8)
    flat.copy_(torch.tensor(list(_pattern(flat.numel(), seed)), dtype=torch.uint8))


def has_pattern(memory_obj: MemoryObj, seed: int) -> bool:
    """Whether the object still holds what `write_pattern` wrote."""
    flat = memory_obj.tensor.flatten().view(torch.uint8).cpu()
    return bytes(flat.tolist()) == _pattern(flat.numel(), seed)


def _pattern(num_bytes: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(num_bytes)


class AllocatorSuite(ABC):
    """The contract of `MemoryAllocatorInterface`, for allocators that can be full.

    Attributes:
        fmt: The format that memory is asked for in.
    """

    fmt = MemoryFormat.KV_BLOB

    @abstractmethod
    def make_allocator(self) -> BoundedAllocator:
        """The allocator under test: empty, of `CAPACITY_BYTES`."""

    @pytest.fixture
    def allocator(self) -> Iterator[BoundedAllocator]:
        """Its books must balance at the end of each test, and nothing may be out."""
        made = self.make_allocator()
        yield made
        made.check_integrity()
        assert made.used_bytes == 0, "a reference was not given back"

    def take(self, allocator: BoundedAllocator, size: int) -> MemoryObj:
        """`size` bytes, which must be there."""
        memory_obj = allocator.allocate((size,), torch.uint8, self.fmt)
        assert memory_obj is not None, f"no room for {size} bytes, {allocator.used_bytes} are used"
        return memory_obj

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_the_tensor_is_as_asked_for(
        self, allocator: BoundedAllocator, dtype: torch.dtype
    ) -> None:
        shape = torch.Size((2, 3, 5, 7))
        memory_obj = allocator.allocate(shape, dtype, self.fmt)
        assert memory_obj is not None
        with memory_obj:
            tensor = memory_obj.tensor
            assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)
            assert memory_obj.get_memory_format() is memory_obj.metadata.fmt is self.fmt
            assert (tuple(memory_obj.metadata.shape), memory_obj.metadata.dtype) == (
                tuple(shape),
                dtype,
            )
            assert (
                memory_obj.get_size()
                == memory_obj.metadata.get_size()
                == tensor.nbytes
                <= memory_obj.metadata.phy_size
            )
            memory_obj.tensor.view(torch.uint8).fill_(1)
            assert bool((tensor.view(torch.uint8) == 1).all()), (
                "two looks at one object are at different memory"
            )

    @pytest.mark.parametrize("dtype", ["bfloat16", "torch.bfloat16", torch.bfloat16])
    def test_a_dtype_may_be_named(
        self, allocator: BoundedAllocator, dtype: torch.dtype | str
    ) -> None:
        memory_obj = allocator.allocate((3, 4), dtype, self.fmt)
        assert memory_obj is not None
        with memory_obj:
            assert (memory_obj.tensor.dtype, memory_obj.get_size()) == (torch.bfloat16, 24)

    def test_without_a_dtype_it_is_bytes(self, allocator: BoundedAllocator) -> None:
        memory_obj = allocator.allocate((10,), None, self.fmt)
        assert memory_obj is not None
        with memory_obj:
            assert (memory_obj.tensor.dtype, memory_obj.get_size()) == (torch.uint8, 10)

    @pytest.mark.parametrize("shape", [(2, 0, 4), (0,)])
    def test_an_empty_tensor_is_possible_and_not_for_nothing(
        self, allocator: BoundedAllocator, shape: tuple[int, ...]
    ) -> None:
        memory_obj = allocator.allocate(shape, torch.float16, self.fmt)
        assert memory_obj is not None
        with memory_obj:
            assert (tuple(memory_obj.tensor.shape), memory_obj.get_size()) == (shape, 0)
            assert allocator.used_bytes > 0, "empty objects without end"

    def test_a_scalar_is_possible(self, allocator: BoundedAllocator) -> None:
        memory_obj = allocator.allocate((), torch.float32, self.fmt)
        assert memory_obj is not None
        with memory_obj:
            assert (memory_obj.tensor.shape, memory_obj.get_size()) == ((), 4)

    @pytest.mark.parametrize(
        ("shape", "dtype", "named"),
        [((3,), torch.complex64, "complex64"), ((2, -1, -1), torch.uint8, "-1")],
    )
    def test_what_makes_no_sense_is_refused_and_takes_nothing(
        self, allocator: BoundedAllocator, shape: tuple[int, ...], dtype: torch.dtype, named: str
    ) -> None:
        with pytest.raises(ValueError, match=named):
            allocator.allocate(shape, dtype, self.fmt)
        assert allocator.used_bytes == 0

    def test_objects_do_not_overlap(self, allocator: BoundedAllocator) -> None:
        objects = [self.take(allocator, 300 + i) for i in range(8)]
        for seed, memory_obj in enumerate(objects):
            write_pattern(memory_obj, seed)
        objects.pop(3).ref_count_down()
        objects.insert(3, self.take(allocator, 303))
        write_pattern(objects[3], 3)
        assert all(has_pattern(memory_obj, seed) for seed, memory_obj in enumerate(objects))
        for memory_obj in objects:
            memory_obj.ref_count_down()

    def test_full_is_none_and_heals(self, allocator: BoundedAllocator) -> None:
        assert allocator.capacity_bytes == CAPACITY_BYTES
        assert allocator.allocate((CAPACITY_BYTES + 1,), torch.uint8, self.fmt) is None
        for _ in range(2):
            whole = self.take(allocator, CAPACITY_BYTES)
            assert allocator.used_bytes == CAPACITY_BYTES
            assert allocator.allocate((1,), torch.uint8, self.fmt) is None
            assert allocator.allocate((0,), torch.uint8, self.fmt) is None
            whole.ref_count_down()

    def test_the_last_reference_frees(self, allocator: BoundedAllocator) -> None:
        memory_obj = self.take(allocator, 1)
        used_bytes = allocator.used_bytes
        assert (
            memory_obj.get_ref_count()
            == memory_obj.metadata.ref_count
            == allocator.get_ref_count(memory_obj)
            == 1
        )
        memory_obj.ref_count_up()
        with memory_obj:
            assert allocator.get_ref_count(memory_obj) == 2
        assert (memory_obj.get_ref_count(), allocator.used_bytes) == (1, used_bytes)
        memory_obj.ref_count_down()
        assert (memory_obj.get_ref_count(), allocator.used_bytes) == (0, 0)

    def test_free_takes_the_memory_whatever_the_references(
        self, allocator: BoundedAllocator
    ) -> None:
        memory_obj = self.take(allocator, 1)
        memory_obj.ref_count_up()
        allocator.free(memory_obj)
        assert (memory_obj.get_ref_count(), allocator.used_bytes) == (0, 0)

    def test_a_freed_object_is_of_no_use(self, allocator: BoundedAllocator) -> None:
        gone = self.take(allocator, 1)
        gone.ref_count_down()
        successor = self.take(allocator, 1)
        used_bytes = allocator.used_bytes
        for use in (
            gone.ref_count_up,
            gone.ref_count_down,
            lambda: allocator.free(gone),
            lambda: gone.tensor,
        ):
            with pytest.raises(IntegrityError):
                use()
        assert (successor.get_ref_count(), allocator.used_bytes) == (1, used_bytes), (
            "the successor paid for it"
        )
        assert allocator.get_ref_count(gone) == 0
        successor.ref_count_down()

    def test_what_another_allocator_handed_out_is_refused(
        self, allocator: BoundedAllocator
    ) -> None:
        ours, other = self.take(allocator, 1), self.make_allocator()
        theirs = self.take(other, 1)
        with pytest.raises(IntegrityError):
            allocator.free(theirs)
        assert (ours.get_ref_count(), theirs.get_ref_count()) == (1, 1)
        ours.ref_count_down()
        theirs.ref_count_down()

    def test_threads_leak_nothing_and_write_over_nothing(self, allocator: BoundedAllocator) -> None:
        def work(seed: int) -> None:
            rng = random.Random(seed)
            held: list[MemoryObj] = []
            for turn in range(NUM_TURNS):
                memory_obj = allocator.allocate((rng.randrange(1500),), torch.uint8, self.fmt)
                if memory_obj is None:
                    while held:
                        held.pop().ref_count_down()
                    allocator.check_integrity()
                    continue
                write_pattern(memory_obj, turn)
                assert has_pattern(memory_obj, turn), "another thread has written over it"
                if rng.random() < 0.5:
                    memory_obj.ref_count_down()
                else:
                    held.append(memory_obj)
            for memory_obj in held:
                memory_obj.ref_count_down()

        interleave(work)


class ArenaSuite(AllocatorSuite):
    """Besides, for allocators that cut one arena."""

    def test_objects_are_aligned(self, allocator: BoundedAllocator) -> None:
        objects = [self.take(allocator, size) for size in (1, ALIGN_BYTES, ALIGN_BYTES + 1, 0, 100)]
        places = sorted((obj.metadata.address, obj.metadata.phy_size) for obj in objects)
        assert all(address % ALIGN_BYTES == 0 for address, _ in places)
        assert sorted(size // ALIGN_BYTES for _, size in places) == [1, 1, 1, 1, 2]
        assert all(
            start + size <= after for (start, size), (after, _) in itertools.pairwise(places)
        )
        assert allocator.used_bytes == 6 * ALIGN_BYTES
        for memory_obj in objects:
            memory_obj.ref_count_down()

    @pytest.mark.parametrize("seed", range(5))
    def test_whatever_the_order_it_is_one_piece_again(
        self, allocator: BoundedAllocator, seed: int
    ) -> None:
        objects = [self.take(allocator, ALIGN_BYTES) for _ in range(CAPACITY_BYTES // ALIGN_BYTES)]
        random.Random(seed).shuffle(objects)
        for memory_obj in objects:
            memory_obj.ref_count_down()
            allocator.check_integrity()
        self.take(allocator, CAPACITY_BYTES).ref_count_down()

    def test_room_in_pieces_is_no_room(self, allocator: BoundedAllocator) -> None:
        objects = [self.take(allocator, ALIGN_BYTES) for _ in range(CAPACITY_BYTES // ALIGN_BYTES)]
        for memory_obj in objects[::2]:
            memory_obj.ref_count_down()
        assert allocator.used_bytes == CAPACITY_BYTES // 2
        assert allocator.allocate((ALIGN_BYTES + 1,), torch.uint8, self.fmt) is None
        for memory_obj in objects[1::2]:
            memory_obj.ref_count_down()


class AddressableSuite(AllocatorSuite):
    """Besides, for memory of the host: bytes and tensor are the same memory."""

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_bytes_and_tensor_share_memory(
        self, allocator: BoundedAllocator, dtype: torch.dtype
    ) -> None:
        memory_obj = allocator.allocate((2, 3, 5), dtype, self.fmt)
        assert memory_obj is not None
        with memory_obj:
            size = 30 * dtype.itemsize
            assert len(memory_obj.byte_array) == memory_obj.get_size() == size
            memory_obj.byte_array[:] = bytes(i % 2 for i in range(size))
            assert bytes(memory_obj.tensor.view(torch.uint8).flatten().tolist()) == bytes(
                memory_obj.byte_array
            )
            memory_obj.tensor.view(torch.uint8).fill_(1)
            assert bytes(memory_obj.byte_array) == b"\1" * size

    def test_the_bytes_of_a_freed_object_are_not_shown(self, allocator: BoundedAllocator) -> None:
        memory_obj = self.take(allocator, 1)
        memory_obj.ref_count_down()
        with pytest.raises(IntegrityError):
            _ = memory_obj.byte_array

    def test_an_empty_object_has_no_bytes(self, allocator: BoundedAllocator) -> None:
        with self.take(allocator, 0) as memory_obj:
            assert bytes(memory_obj.byte_array) == b""

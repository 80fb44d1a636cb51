"""The contract of `MemoryAllocatorInterface`, over every allocator."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from lmcache_core.memory import (
    ArenaAllocator,
    BufferAllocator,
    GPUMemoryAllocator,
    HostMemoryAllocator,
    MemoryFormat,
    MixedMemoryAllocator,
    PinMemoryAllocator,
    TensorMemoryAllocator,
)

from tests.fixtures.shared_arena import create_shared_arena
from tests.suites.allocator_suite import CAPACITY_BYTES, AddressableSuite, ArenaSuite

GPU_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class TestArena(ArenaSuite, AddressableSuite):
    def make_allocator(self) -> ArenaAllocator:
        return ArenaAllocator.anonymous(CAPACITY_BYTES)


class TestShared(ArenaSuite, AddressableSuite):
    def make_allocator(self) -> ArenaAllocator:
        with tempfile.TemporaryDirectory() as directory:
            return ArenaAllocator(create_shared_arena(Path(directory), CAPACITY_BYTES).store_view)


class TestTensor(ArenaSuite, AddressableSuite):
    def make_allocator(self) -> TensorMemoryAllocator:
        return TensorMemoryAllocator(torch.zeros(4, CAPACITY_BYTES // 16, dtype=torch.float32))


class TestHost(ArenaSuite, AddressableSuite):
    def make_allocator(self) -> HostMemoryAllocator:
        return HostMemoryAllocator(CAPACITY_BYTES)


class TestPinned(ArenaSuite, AddressableSuite):
    def make_allocator(self) -> PinMemoryAllocator:
        return PinMemoryAllocator(CAPACITY_BYTES)


class TestDevice(ArenaSuite):
    def make_allocator(self) -> GPUMemoryAllocator:
        return GPUMemoryAllocator(CAPACITY_BYTES, GPU_DEVICE)


class TestMixed(ArenaSuite, AddressableSuite):
    def make_allocator(self) -> MixedMemoryAllocator:
        return MixedMemoryAllocator(CAPACITY_BYTES)


class TestMixedEncoded(TestMixed):
    fmt = MemoryFormat.BINARY


class BuffersOfMixed(MixedMemoryAllocator):
    """The other half of its books."""

    @property
    def capacity_bytes(self) -> int:
        return self._buffers.capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self._buffers.used_bytes


class TestMixedBuffers(AddressableSuite):
    fmt = MemoryFormat.BINARY_BUFFER

    def make_allocator(self) -> BuffersOfMixed:
        return BuffersOfMixed(CAPACITY_BYTES)


class TestBuffer(AddressableSuite):
    fmt = MemoryFormat.BINARY_BUFFER

    def make_allocator(self) -> BufferAllocator:
        return BufferAllocator("cpu", CAPACITY_BYTES)

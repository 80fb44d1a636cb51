"""Copies between a device and an arena registered in pieces: none touches two, which CUDA
refuses.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from lmcache_core.gpu_connectors import LogicalMemory, Packing, PagedGPUConnector
from lmcache_core.keys import CacheEngineKey
from lmcache_core.memory import tensor as module
from lmcache_core.memory.tensor import TensorMemoryAllocator, host_arena, pin
from lmcache_core.memory.views import bytes_under
from lmcache_core.record import TensorSpec, raw_header
from lmcache_core.serde import device as decoding
from lmcache_core.serde.device import DeviceDecoder
from msgspec.structs import replace

from tests.fixtures.cuda_runtime import Runtime, install
from tests.suites.connector_suite import SLOTS
from tests.suites.kv_caches import make_kv_caches, one_group

PIECE, NUM_PIECES = 4096, 4
LAYOUT = one_group(packing=Packing.KV_FIRST)
BEGIN, END = 4, 13


class Owner:
    """Its end unpins the arena."""


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    monkeypatch.setattr(module, "COPY_BOUNDARY_BYTES", PIECE)
    return install(monkeypatch, PIECE)


@pytest.fixture
def arena(runtime: Runtime) -> Iterator[TensorMemoryAllocator]:
    memory, owner = host_arena(NUM_PIECES * PIECE), Owner()
    assert pin(memory, owner, piece_bytes=PIECE)
    yield TensorMemoryAllocator(memory)
    del owner
    assert not runtime.registered


def test_chunks_across_two_registrations_are_copied(
    runtime: Runtime, arena: TensorMemoryAllocator
) -> None:
    connector = PagedGPUConnector(LAYOUT, staging_tokens=END - BEGIN)
    memories = []
    while memory := arena.allocate(connector.get_shape(END - BEGIN), "bfloat16"):
        memories.append(memory)
    num_across = sum(
        not runtime.has(memory.tensor.data_ptr(), memory.get_size()) for memory in memories
    )
    assert num_across
    assert num_across < len(memories)
    for seed, memory in enumerate(memories):
        source, target = (
            {"kvcaches": make_kv_caches(LAYOUT, seed), "slot_mapping": torch.tensor(SLOTS)}
            for seed in (100 * seed + 1, 50)
        )
        connector.from_gpu(memory, BEGIN, END, **source)
        connector.to_gpu(memory, BEGIN, END, **target)
        for token in range(BEGIN, END):
            wanted, got = (
                LogicalMemory(LAYOUT, kwargs["kvcaches"]).read(0, 1, SLOTS[token]).view(torch.uint8)
                for kwargs in (source, target)
            )
            assert torch.equal(wanted, got)
        memory.ref_count_down()
    assert len(runtime.copied_bytes) == 2 * (len(memories) + num_across)


def test_an_encoded_chunk_across_two_registrations_is_copied(
    runtime: Runtime, arena: TensorMemoryAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels are not run."""
    on_device: list[torch.Tensor] = []

    def begin_decoding(blob: memoryview, encoded: torch.Tensor, *_: object) -> torch.Tensor:
        on_device.append(encoded)
        return torch.zeros(1, dtype=torch.uint8)

    monkeypatch.setattr(decoding, "device_tables", lambda *_: None)
    monkeypatch.setattr(decoding, "_begin_decoding", begin_decoding)
    memory = arena.allocate((2 * PIECE + PIECE // 2,), "uint8")
    assert memory is not None
    memory.tensor.copy_(torch.arange(memory.get_size()) % 251)
    size = memory.get_size()
    header = replace(
        raw_header(CacheEngineKey("vllm", "m", 1, 0, "00" * 32), (1,), "bfloat16", bytes(16)),
        tensors=(TensorSpec("", "bfloat16", (2, 1, 4, 32), 0, size),),
    )
    out = torch.empty(2 * 4 * 32 * 2, dtype=torch.uint8)
    DeviceDecoder(torch.device("cpu")).begin(header, bytes_under(memory.tensor), out)
    assert runtime.copied_bytes == [PIECE, PIECE, PIECE // 2]
    assert torch.equal(on_device[0], memory.tensor)
    memory.ref_count_down()

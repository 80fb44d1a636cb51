"""Copies between a device and an arena registered in pieces: none touches two, which CUDA
refuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lmcache_core.gpu_connectors import LogicalMemory, Packing, PagedGPUConnector
from lmcache_core.keys import CacheEngineKey
from lmcache_core.memory import tensor as module
from lmcache_core.memory.tensor import TensorMemoryAllocator, host_arena, pin
from lmcache_core.memory.views import bytes_under
from lmcache_core.record import TensorSpec, raw_header
from lmcache_core.serde import device as decoding
from lmcache_core.serde.blob import Head, Mode
from lmcache_core.serde.device import DeviceDecoder
from lmcache_core.serde.quantised_blob import KINDS
from lmcache_kernels.codec_shape import EncodedPlanes
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


@pytest.mark.parametrize("scratch_bytes", [0, 3 * PIECE])
def test_an_encoded_chunk_across_two_registrations_is_copied(
    runtime: Runtime,
    arena: TensorMemoryAllocator,
    monkeypatch: pytest.MonkeyPatch,
    scratch_bytes: int,
) -> None:
    """The kernels are not run."""
    tokens, channels, num_words = 64, 64, 2500
    shape = (2, 1, tokens, channels)
    head = Head(Mode.BY_TOKEN, KINDS["bfloat16"], 2, (2, tokens, channels, 0))
    dice = np.random.default_rng(0)
    shifts, words = (
        dice.integers(-9, 9, size, dtype=np.int16) for size in (2 * channels, 2 * num_words)
    )
    arrays = (
        *(np.full(2, 15, np.uint8), np.full(2 * tokens, 0x3F80, np.uint16), shifts),
        *(np.zeros(2 * channels, np.uint8), np.full(2, num_words, np.uint32), words),
    )
    blob = head.pack() + b"".join(map(bytes, arrays))
    decoded: list[EncodedPlanes] = []

    def decode(planes: EncodedPlanes, *_: object) -> torch.Tensor:
        decoded.append(planes)
        return torch.zeros(1, dtype=torch.uint8)

    monkeypatch.setattr(decoding, "device_tables", lambda *_: SimpleNamespace(levels=(15,)))
    monkeypatch.setattr(decoding, "cachegen_decode", decode)
    memory = arena.allocate((len(blob),), "uint8")
    assert memory is not None
    memory.byte_array[:] = blob
    header = replace(
        raw_header(CacheEngineKey("vllm", "m", 1, 0, "00" * 32), (1,), "bfloat16", bytes(16)),
        tensors=(TensorSpec("", "bfloat16", shape, 0, len(blob)),),
    )
    out = torch.empty(2 * tokens * channels * 2, dtype=torch.uint8)
    scratch = torch.empty(scratch_bytes, dtype=torch.uint8)
    DeviceDecoder(torch.device("cpu")).begin(header, bytes_under(memory.tensor), out, scratch)
    assert sum(runtime.copied_bytes) == len(blob)
    assert len(runtime.copied_bytes) == 4, "the words lie on three pieces"
    (planes,) = decoded
    assert planes.shifts.flatten().tolist() == shifts.tolist()
    assert planes.words.tolist() == words.tolist()
    is_in_scratch = planes.words.data_ptr() == scratch.data_ptr()
    assert is_in_scratch == bool(scratch_bytes)
    memory.ref_count_down()

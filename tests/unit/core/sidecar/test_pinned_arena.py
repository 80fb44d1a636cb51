"""The shared arena registered with CUDA, by a runtime that is a fake: what copies use, and what is
left of it when the sidecar is replaced.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from lmcache_core.keys import DEFAULT_TENANT, CacheEngineKey, ChunkKey
from lmcache_core.memory import tensor
from lmcache_core.memory.base import MemoryObj
from lmcache_core.memory.free_list import ALIGN_BYTES
from lmcache_core.record import Chunk, payload_digest, raw_header
from lmcache_core.sidecar import SidecarChunkStore
from lmcache_core.telemetry import Counters

from tests.fixtures.cuda_runtime import Runtime, install
from tests.fixtures.embedded import until
from tests.fixtures.frames import HELLO
from tests.fixtures.sidecar import running_socket

ARENA_BYTES, PIECE, CHUNK_BYTES = 1 << 20, 1 << 18, 1 << 16
KEY = CacheEngineKey("vllm", "m", 1, 0, "00" * 32)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    monkeypatch.setattr(tensor, "COPY_BOUNDARY_BYTES", PIECE)
    yield install(monkeypatch, PIECE)
    gc.collect()


@contextlib.contextmanager
def store_at(path: Path) -> Iterator[SidecarChunkStore]:
    store = SidecarChunkStore(path, HELLO, 5.0, Counters(), loads_beside=True)
    store.open(lambda salt: None)
    try:
        yield store
    finally:
        store.close()


def address_of(memory: MemoryObj) -> int:
    return int(np.frombuffer(memory.byte_array, np.uint8).ctypes.data)


def put(store: SidecarChunkStore) -> int:
    """Store a chunk; where it was written."""
    (memory,) = store.reserve([KEY], [(CHUNK_BYTES,)], "uint8")
    assert isinstance(memory, MemoryObj)
    memory.byte_array[:] = bytes(range(256)) * (CHUNK_BYTES // 256)
    address, digest = address_of(memory), payload_digest(memory.byte_array)
    header = raw_header(KEY, (CHUNK_BYTES,), "uint8", digest)
    chunk = Chunk.unsealed(ChunkKey(DEFAULT_TENANT, KEY), header, memory, "memory")
    assert store.put([chunk]) == [True]
    store.release([chunk])
    return address


def get(store: SidecarChunkStore) -> int:
    """Load it; where it was read."""
    (chunk,) = store.get([KEY])
    try:
        assert bytes(chunk.memory.byte_array) == bytes(range(256)) * (CHUNK_BYTES // 256)
        return address_of(chunk.memory)
    finally:
        store.release([chunk])


def is_pinned(runtime: Runtime, address: int) -> bool:
    """Whether all of a chunk is registered, possibly in two pieces."""
    return all(runtime.has(address + at, ALIGN_BYTES) for at in range(0, CHUNK_BYTES, ALIGN_BYTES))


def test_copies_use_pinned_memory_both_ways(tmp_path: Path, runtime: Runtime) -> None:
    with running_socket(tmp_path, ARENA_BYTES) as sidecar, store_at(sidecar.path) as store:
        assert not runtime.registered, "a scheduler's side copies nothing"
        store.pin_memory()
        store.pin_memory()
        assert sum(runtime.registered.values()) == 2 * ARENA_BYTES
        assert is_pinned(runtime, put(store))
        assert is_pinned(runtime, get(store))
    del store
    gc.collect()
    assert not runtime.registered, "unused memory is still pinned"


def test_what_is_refused_stays_pageable_and_works(tmp_path: Path, runtime: Runtime) -> None:
    runtime.fails_at = 2
    with running_socket(tmp_path, ARENA_BYTES) as sidecar, store_at(sidecar.path) as store:
        store.pin_memory()
        assert sum(runtime.registered.values()) == ARENA_BYTES, "of one of the two connections"
        assert runtime.pending == 0
        put(store)
        get(store)


def test_the_arena_of_a_new_sidecar_is_pinned_and_the_old_one_let_go(
    tmp_path: Path, runtime: Runtime
) -> None:
    path, places = tmp_path / "s.sock", [tmp_path / "one", tmp_path / "two"]
    for place in places:
        place.mkdir()
    with contextlib.ExitStack() as opened:
        with running_socket(places[0], ARENA_BYTES, path=path):
            store = opened.enter_context(store_at(path))
            store.pin_memory()
            num_calls = runtime.num_calls
        with running_socket(places[1], ARENA_BYTES, path=path):

            def is_pinned_anew() -> bool:
                store.lookup([KEY], None)  # a call notices that the sidecar has gone
                gc.collect()
                pinned_bytes = sum(runtime.registered.values())
                return runtime.num_calls > num_calls and pinned_bytes == 2 * ARENA_BYTES

            until(is_pinned_anew, "the new arena is not pinned, or the old one still is")
            assert is_pinned(runtime, put(store))
            assert is_pinned(runtime, get(store))
            opened.close()

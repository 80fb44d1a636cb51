"""The shared arena registered with CUDA, by a runtime that is a fake: what copies use, and what is
left of it when the sidecar is replaced.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from lmcache_core.keys import DEFAULT_TENANT, CacheEngineKey, ChunkKey
from lmcache_core.memory import tensor
from lmcache_core.memory.base import MemoryObj
from lmcache_core.memory.free_list import ALIGN_BYTES
from lmcache_core.record import Chunk, payload_digest, raw_header
from lmcache_core.sidecar import SidecarChunkStore
from lmcache_core.sidecar.link import SidecarLink
from lmcache_core.sidecar.mapping import ArenaMappings
from lmcache_core.telemetry import Counters

from tests.fixtures.cuda_runtime import Runtime, install
from tests.fixtures.embedded import until
from tests.fixtures.frames import HELLO
from tests.fixtures.sidecar import running_socket

ARENA_BYTES, PIECE, CHUNK_BYTES = 1 << 20, 1 << 18, 1 << 16
DEVICE = torch.device("cuda", 3)
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
    chunk = Chunk.unsealed(ChunkKey.of(DEFAULT_TENANT, KEY), header, memory, "memory")
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


def loads_from_pinned_memory(link: SidecarLink, not_in: int | None = None) -> bool:
    """Whether there is a connection that does, in another generation than the one named."""
    connection = link.connection
    if connection is None or connection.arena_info.generation == not_in:
        return False
    return not connection.mapping.load_view.readonly


def test_copies_use_pinned_memory_both_ways(tmp_path: Path, runtime: Runtime) -> None:
    with running_socket(tmp_path, ARENA_BYTES) as sidecar, store_at(sidecar.path) as store:
        assert not runtime.registered, "a scheduler's side copies nothing"
        store.pin_memory(DEVICE)
        store.pin_memory(DEVICE)
        assert sum(runtime.registered.values()) == ARENA_BYTES, "once for both connections"
        assert len(runtime.registered) <= ARENA_BYTES // PIECE + 1
        assert is_pinned(runtime, put(store))
        assert is_pinned(runtime, get(store))
    del store
    gc.collect()
    assert not runtime.registered, "unused memory is still pinned"


def test_what_is_refused_stays_pageable_and_works(tmp_path: Path, runtime: Runtime) -> None:
    runtime.fails_at = 2
    with running_socket(tmp_path, ARENA_BYTES) as sidecar, store_at(sidecar.path) as store:
        store.pin_memory(DEVICE)
        assert (runtime.registered, runtime.pending) == ({}, 0)
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
            store.pin_memory(DEVICE)
            links = store._link, store._load_link
            old = links[0].connection.arena_info.generation
        with running_socket(places[1], ARENA_BYTES, path=path):

            def is_pinned_anew() -> bool:
                store.lookup([KEY], None)  # a call notices that the sidecar has gone
                gc.collect()
                are_new = all(loads_from_pinned_memory(link, old) for link in links)
                return are_new and sum(runtime.registered.values()) == ARENA_BYTES

            until(is_pinned_anew, "the new arena is not pinned, or the old one still is")
            assert is_pinned(runtime, put(store))
            assert is_pinned(runtime, get(store))
            opened.close()
    gc.collect()
    assert not runtime.registered, "a closed store's arena is still pinned"
    assert runtime.devices == {DEVICE.index}, "another device has got a context"


@pytest.mark.parametrize("lost", ["_link", "_load_link"])
def test_a_connection_that_is_lost_alone_finds_the_arena_pinned(
    tmp_path: Path, runtime: Runtime, lost: str
) -> None:
    with running_socket(tmp_path, ARENA_BYTES) as sidecar, store_at(sidecar.path) as store:
        store.pin_memory(DEVICE)
        num_calls, link = runtime.num_calls, getattr(store, lost)
        link.connection.give_up("a call took too long")
        until(lambda: loads_from_pinned_memory(link), "its arena is not pinned")
        assert is_pinned(runtime, put(store))
        assert is_pinned(runtime, get(store))
        assert runtime.num_calls == num_calls


def test_a_forked_child_maps_the_arena_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the parent has pinned is not pinned for it."""
    mappings = ArenaMappings()
    with running_socket(tmp_path, ARENA_BYTES) as sidecar, store_at(sidecar.path) as store:
        info = store._link.connection.arena_info
        mapping = mappings.of(info)
        assert mappings.of(info) is mapping
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: -1)
            assert mappings.of(info) is not mapping

"""The shared arena registered with CUDA, by a runtime that is a fake: what copies use, and what is
left of it when the sidecar is replaced.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lmcache_core.keys import DEFAULT_TENANT, CacheEngineKey, ChunkKey
from lmcache_core.memory import tensor
from lmcache_core.memory.base import MemoryObj
from lmcache_core.memory.free_list import ALIGN_BYTES
from lmcache_core.memory.populate import BackgroundPopulation
from lmcache_core.record import Chunk, payload_digest, raw_header
from lmcache_core.record.chunk_store import NotLent
from lmcache_core.sidecar import SidecarChunkStore, SidecarConnection, mapping
from lmcache_core.sidecar.mapping import ArenaMappings
from lmcache_core.telemetry import PINNED_BYTES, Counters

from tests.fixtures.cuda_runtime import Runtime, install
from tests.fixtures.frames import HELLO
from tests.fixtures.scripted_sidecar import PATIENCE_S, store_at
from tests.fixtures.sidecar import running_socket
from tests.fixtures.waiting import wait_until

ARENA_BYTES, PIECE, CHUNK_BYTES = 1 << 20, 1 << 18, 1 << 16
DEVICE = torch.device("cuda", 3)
KEY = CacheEngineKey("vllm", "m", 1, 0, "00" * 32)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    monkeypatch.setattr(tensor, "COPY_BOUNDARY_BYTES", PIECE)
    yield install(monkeypatch, PIECE)
    gc.collect()


def address_of(memory: MemoryObj) -> int:
    return int(np.frombuffer(memory.byte_array, np.uint8).ctypes.data)


def put(store: SidecarChunkStore) -> int | None:
    """Store a chunk; the address that it was written to."""
    (memory,) = store.reserve([KEY], [(CHUNK_BYTES,)], "uint8")
    if isinstance(memory, NotLent):
        return None
    memory.byte_array[:] = bytes(range(256)) * (CHUNK_BYTES // 256)
    address, digest = address_of(memory), payload_digest(memory.byte_array)
    header = raw_header(KEY, (CHUNK_BYTES,), "uint8", digest)
    chunk = Chunk.unsealed(ChunkKey.of(DEFAULT_TENANT, KEY), header, memory, "memory")
    assert store.put([chunk]) == [True]
    store.release([chunk])
    return address


def get(store: SidecarChunkStore) -> int | None:
    """Load it; the address that it was read from."""
    chunks = store.get([KEY])
    addresses = [address_of(chunk.memory) for chunk in chunks]
    for chunk in chunks:
        assert bytes(chunk.memory.byte_array) == bytes(range(256)) * (CHUNK_BYTES // 256)
    store.release(chunks)
    return addresses[0] if addresses else None


def is_pinned(runtime: Runtime, address: int | None) -> bool:
    """Whether all of a chunk is registered, possibly in two pieces."""
    return address is not None and all(
        runtime.has(address + at, ALIGN_BYTES) for at in range(0, CHUNK_BYTES, ALIGN_BYTES)
    )


def test_copies_use_pinned_memory_both_ways(tmp_path: Path, runtime: Runtime) -> None:
    with (
        running_socket(tmp_path, ARENA_BYTES) as sidecar,
        store_at(sidecar.path, loads_beside=True) as store,
    ):
        assert not runtime.registered, "a scheduler's side copies nothing"
        store.pin_memory(DEVICE)
        store.pin_memory(DEVICE)
        assert sum(runtime.registered.values()) == ARENA_BYTES
        assert runtime.num_calls == len(runtime.registered) <= ARENA_BYTES // PIECE + 1, (
            "each piece once for both connections"
        )
        assert is_pinned(runtime, put(store))
        assert is_pinned(runtime, get(store))
    del store
    gc.collect()
    assert not runtime.registered, "unused memory is still pinned"


def test_arena_of_a_new_sidecar_is_pinned_and_the_old_one_released(
    tmp_path: Path, runtime: Runtime
) -> None:
    path, places = tmp_path / "s.sock", [tmp_path / "one", tmp_path / "two"]
    for place in places:
        place.mkdir()
    with contextlib.ExitStack() as opened:
        with running_socket(places[0], ARENA_BYTES, path=path):
            store = opened.enter_context(store_at(path, loads_beside=True))
            store.pin_memory(DEVICE)
            num_calls = runtime.num_calls
            pinned_by = set[str]()
            runtime.on_register = lambda: pinned_by.add(threading.current_thread().name)
        with running_socket(places[1], ARENA_BYTES, path=path):

            def is_pinned_alone() -> bool:
                store.lookup([KEY], None)  # a call notices that the sidecar has gone
                get(store)
                gc.collect()
                is_new = runtime.num_calls > num_calls
                return is_new and sum(runtime.registered.values()) == ARENA_BYTES

            wait_until(is_pinned_alone)
            wait_until(lambda: is_pinned(runtime, put(store)))
            wait_until(lambda: is_pinned(runtime, get(store)))
            opened.close()
    gc.collect()
    assert not runtime.registered, "a closed store's arena is still pinned"
    assert runtime.devices == {DEVICE.index}, "another device has got a context"
    assert pinned_by == {"lmcache-pin"}, "neither a call nor the link waits"


@contextlib.contextmanager
def pinned_store(tmp_path: Path, counters: Counters) -> Iterator[SidecarChunkStore]:
    """A store that has been asked to pin; when it ends nothing pins any more."""
    with running_socket(tmp_path, ARENA_BYTES) as sidecar:
        with store_at(sidecar.path, counters=counters, loads_beside=True) as store:
            store.pin_memory(DEVICE)
            yield store
        del store
        gc.collect()
        for thread in threading.enumerate():
            if thread.name == "lmcache-pin":
                thread.join(PATIENCE_S)
                assert not thread.is_alive()


def test_refused_memory_is_pinned_later(
    tmp_path: Path,
    runtime: Runtime,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(mapping, "RETRIES_S", (0.0, 0.0, 3600.0))
    runtime.fails_at, runtime.num_failures = 2, 2
    counters = Counters()
    with pinned_store(tmp_path, counters):
        wait_until(lambda: counters.value(PINNED_BYTES) == ARENA_BYTES)
        assert sum(runtime.registered.values()) == ARENA_BYTES
    assert not runtime.registered
    assert counters.value(PINNED_BYTES) == 0
    refusals = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(refusals) == 2
    assert f"volume={tmp_path / 'arena'}; memory (tmpfs, hugetlbfs) can be pinned" in refusals[0]


def test_what_is_refused_for_good_is_not_asked_for_for_ever(
    tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapping, "RETRIES_S", (0.0, 0.0))
    runtime.fails_at, runtime.num_failures = 1, sys.maxsize
    counters = Counters()
    with pinned_store(tmp_path, counters) as store:
        wait_until(lambda: runtime.num_calls == 1 + 3)
        pinned_bytes = counters.value(PINNED_BYTES)
        assert 0 < pinned_bytes == sum(runtime.registered.values()) <= PIECE, "what was pinned"
        wait_until(lambda: put(store) is not None)
        wait_until(lambda: get(store) is not None)  # from memory that is not pinned
    assert runtime.num_calls == 1 + 3


def test_an_engine_that_serves_can_copy_while_an_arena_is_pinned(
    tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its calls wait for each registration: after one, nothing is registered for as long again."""
    now, rests = 0.0, list[float]()

    def take_a_while() -> None:
        nonlocal now
        now += 3.0

    class Over(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            rests.append(timeout)
            return self.is_set()

    with running_socket(tmp_path, ARENA_BYTES) as sidecar, contextlib.ExitStack() as opened:
        connection = SidecarConnection(sidecar.path, HELLO, PATIENCE_S)
        threads = SimpleNamespace(Event=Over, Lock=threading.Lock, Thread=threading.Thread)
        monkeypatch.setattr(mapping, "threading", threads)
        monkeypatch.setattr(mapping, "time", SimpleNamespace(monotonic=lambda: now))
        connection.open()
        opened.callback(connection.close)
        runtime.on_register = take_a_while
        connection.mapping.pin(DEVICE, is_serving=True)
        wait_until(lambda: sum(runtime.registered.values()) == ARENA_BYTES)
    assert rests == [0.0] + [3.0] * (runtime.num_calls - 1)


def test_only_memory_that_is_read_from_has_page_tables(
    tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the second mapping, that is: copies use the first one if it is pinned."""
    populated = list[bool]()

    class Population(BackgroundPopulation):
        def __init__(self, view: memoryview) -> None:
            populated.append(view.readonly)
            super().__init__(view)

    monkeypatch.setattr(mapping, "BackgroundPopulation", Population)
    (tmp_path / "other").mkdir()
    with pinned_store(tmp_path, Counters()) as store:
        wait_until(lambda: put(store) is not None)
        wait_until(lambda: get(store) is not None)
    assert populated == [False], "once for both connections"
    populated.clear()
    with (
        running_socket(tmp_path / "other", ARENA_BYTES) as sidecar,
        store_at(sidecar.path) as other,
    ):
        wait_until(lambda: put(other) is not None)
        assert populated == [False]
        wait_until(lambda: get(other) is not None)
        wait_until(lambda: get(other) is not None)
    assert populated == [False, True]


def test_connections_of_a_client_share_a_mapping_and_a_forked_child_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the parent has pinned is not pinned for the child."""
    mappings = ArenaMappings()
    with running_socket(tmp_path, ARENA_BYTES) as sidecar, contextlib.ExitStack() as opened:

        def connected() -> SidecarConnection:
            connection = SidecarConnection(sidecar.path, HELLO, PATIENCE_S, mappings)
            connection.open()
            opened.callback(connection.close)
            return connection

        first, second = connected(), connected()
        first.close()
        third = connected()
        assert first.mapping is second.mapping is third.mapping
        monkeypatch.setattr(os, "getpid", lambda: -1)
        assert mappings.of(second.arena_info) is not third.mapping
        monkeypatch.undo()

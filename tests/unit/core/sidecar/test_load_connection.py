"""Loads have their own connection: a store in a step of the engine does not wait for them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lmcache_core.keys import CacheEngineKey
from lmcache_core.record import payload_digest, raw_header
from lmcache_core.record.chunk_store import NotLent
from lmcache_core.record.codec import encode_head
from lmcache_core.sidecar import SidecarChunkStore
from lmcache_core.wire import messages as m

from tests.fixtures.scripted_sidecar import (
    ARENA_BYTES,
    PATIENCE_S,
    Answer,
    scripted_sidecar,
    store_at,
)
from tests.fixtures.waiting import wait_until

KEY = CacheEngineKey("vllm", "m", 1, 0, "00" * 32)
CHUNK_BYTES = 64


def loaded(handle: int) -> m.Extents:
    head = encode_head(
        raw_header(KEY, (CHUNK_BYTES,), "uint8", payload_digest(bytes(CHUNK_BYTES))), CHUNK_BYTES
    )
    return m.Extents((m.Extent(handle, 0, CHUNK_BYTES, "Hot", head),))


def usual(request: m.Message) -> Answer:
    """The answers of a sidecar with room and one chunk."""
    match request:
        case m.LoadExtents():
            return loaded(7)
        case m.ReserveExtents():
            return m.Extents((m.Extent(3, ARENA_BYTES - CHUNK_BYTES, CHUNK_BYTES),))
        case m.DoneWith():
            return m.Ok()
        case m.Lookup():
            return m.ContainsOk([False])
        case m.Ping():
            return m.Pong()
    return None


def can_load(store: SidecarChunkStore) -> bool:
    chunks = store.get([KEY])
    return bool(chunks) and store.release(chunks)


def can_reserve(store: SidecarChunkStore) -> bool:
    (memory,) = store.reserve([KEY], [(CHUNK_BYTES,)], "uint8")
    if isinstance(memory, NotLent):
        return False
    store.abort([memory])
    return True


def test_store_does_not_wait_for_a_long_load(tmp_path: Path) -> None:
    is_lifted, said = threading.Event(), []

    def script(request: m.Message) -> Answer:
        if isinstance(request, m.LoadExtents):
            is_lifted.wait(PATIENCE_S)
        if isinstance(request, m.DoneWith):
            said.append((threading.get_ident(), request))
        return usual(request)

    with (
        scripted_sidecar(tmp_path, script) as sidecar,
        store_at(sidecar.path, loads_beside=True) as store,
    ):
        assert sidecar.num_connections == 2
        with ThreadPoolExecutor(1) as pool:
            load = pool.submit(can_load, store)
            wait_until(lambda: any(isinstance(each, m.LoadExtents) for each in sidecar.requests))
            assert store.lookup([KEY], ["memory"]) == 0
            assert can_reserve(store), "dropped during a load"
            is_lifted.set()
            assert load.result(PATIENCE_S)
        (aborted_by, aborted), (released_by, released) = said
        assert (aborted, released) == (m.DoneWith((3,)), m.DoneWith((7,)))
        assert aborted_by != released_by, "a connection gets back what it has lent"


def test_loss_of_a_sidecar_is_noticed_for_loads_too(tmp_path: Path) -> None:
    """A store finds it out. The next load, maybe much later, finds the sidecar that followed."""
    with (
        scripted_sidecar(tmp_path, usual) as first,
        store_at(first.path, loads_beside=True) as store,
    ):
        assert can_load(store)
        first.close()
        first.path.unlink()
        assert not can_reserve(store)
        (tmp_path / "second").mkdir()
        with scripted_sidecar(tmp_path / "second", usual) as second:
            first.path.symlink_to(second.path)
            wait_until(lambda: second.num_connections == 2)
            wait_until(lambda: can_load(store) and can_reserve(store))


def test_connection_that_is_given_up_takes_no_other_with_it(tmp_path: Path) -> None:
    loaded_by: list[int] = []

    def script(request: m.Message) -> Answer:
        if isinstance(request, m.ReserveExtents):
            return m.Extents((m.Extent(3, ARENA_BYTES, CHUNK_BYTES),))
        if isinstance(request, m.LoadExtents):
            loaded_by.append(threading.get_ident())
        return usual(request)

    with (
        scripted_sidecar(tmp_path, script) as sidecar,
        store_at(sidecar.path, loads_beside=True) as store,
    ):
        assert can_load(store)
        assert not can_reserve(store), "memory outside of the arena"
        wait_until(lambda: sidecar.num_ended == 1)
        assert can_load(store)
        assert loaded_by[0] == loaded_by[1], "by the same connection"

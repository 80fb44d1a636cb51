"""Loads that run beside the engine's steps have a connection of their own: a store in a step
does not wait for them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from lmcache_core.keys import CacheEngineKey
from lmcache_core.record import payload_digest, raw_header
from lmcache_core.record.chunk_store import NotLent
from lmcache_core.record.codec import encode_head
from lmcache_core.sidecar import SidecarChunkStore
from lmcache_core.telemetry import Counters
from lmcache_core.wire import messages as m

from tests.fixtures.embedded import until
from tests.fixtures.frames import HELLO
from tests.fixtures.scripted_sidecar import ARENA_BYTES, Answer, ScriptedSidecar, scripted_sidecar

KEY = CacheEngineKey("vllm", "m", 1, 0, "00" * 32)
CHUNK_BYTES = 64
PATIENCE_S = 60.0


@contextlib.contextmanager
def store_at(sidecar: ScriptedSidecar) -> Iterator[SidecarChunkStore]:
    store = SidecarChunkStore(sidecar.path, HELLO, 5.0, Counters(), loads_beside=True)
    store.open(lambda salt: None)
    try:
        yield store
    finally:
        store.close()


def loaded(handle: int) -> m.Extents:
    head = encode_head(
        raw_header(KEY, (CHUNK_BYTES,), "uint8", payload_digest(bytes(CHUNK_BYTES))), CHUNK_BYTES
    )
    return m.Extents((m.Extent(handle, 0, CHUNK_BYTES, "Hot", head),))


def test_a_load_that_takes_long_keeps_no_store_waiting(tmp_path: Path) -> None:
    is_lifted, said = threading.Event(), []

    def script(request: m.Message) -> Answer:
        match request:
            case m.LoadExtents():
                is_lifted.wait(PATIENCE_S)
                return loaded(7)
            case m.ReserveExtents():
                return m.Extents((m.Extent(3, ARENA_BYTES - CHUNK_BYTES, CHUNK_BYTES),))
            case m.DoneWith():
                said.append((threading.get_ident(), request))
                return m.Ok()
            case m.Lookup():
                return m.ContainsOk([False])
            case m.Ping():
                return m.Pong()
        return None

    with scripted_sidecar(tmp_path, script) as sidecar, store_at(sidecar) as store:
        assert sidecar.num_connections == 2
        were_held: list[bool] = []

        def load() -> None:
            (chunk,) = store.get([KEY])
            were_held.append(store.release([chunk]))

        thread = threading.Thread(target=load)
        thread.start()
        try:
            until(
                lambda: any(isinstance(request, m.LoadExtents) for request in sidecar.requests),
                "nothing is loaded",
            )
            assert store.lookup([KEY], ["memory"]) == 0
            (memory,) = store.reserve([KEY], [(CHUNK_BYTES,)], "uint8")
            assert not isinstance(memory, NotLent), "dropped since a load was underway"
            store.abort([memory])
        finally:
            is_lifted.set()
            thread.join()
        assert were_held == [True]
        (aborted_by, aborted), (released_by, released) = said
        assert (aborted, released) == (m.DoneWith((3,)), m.DoneWith((7,)))
        assert aborted_by != released_by, "what a connection has lent goes back through that one"


def test_a_sidecar_that_has_gone_is_gone_for_loads_too(tmp_path: Path) -> None:
    """A store finds it out; the next load, maybe much later, finds a connection to the sidecar
    that has followed.
    """
    with scripted_sidecar(tmp_path, lambda request: None) as first, store_at(first) as store:
        ended = store._load_link.connection
        assert ended is not None
        first.close()
        first.path.unlink()
        assert store.reserve([KEY], [(CHUNK_BYTES,)], "uint8") == [NotLent.NO_ROOM]
        assert store._load_link.connection is None
        (tmp_path / "second").mkdir()
        with scripted_sidecar(tmp_path / "second", lambda request: None) as second:
            first.path.symlink_to(second.path)
            until(lambda: store._load_link.connection, "loads have no connection")
            until(lambda: store._link.connection, "stores have no connection")


def test_a_connection_that_is_given_up_takes_no_other_with_it(tmp_path: Path) -> None:
    def script(request: m.Message) -> Answer:
        outside = m.Extents((m.Extent(3, ARENA_BYTES, CHUNK_BYTES),))
        return outside if isinstance(request, m.ReserveExtents) else None

    with scripted_sidecar(tmp_path, script) as sidecar, store_at(sidecar) as store:
        before = store._load_link.connection
        refused = store.reserve([KEY], [(CHUNK_BYTES,)], "uint8")
        assert refused == [NotLent.NO_ROOM], "memory outside of the arena"
        assert store._link.connection is None
        assert store._load_link.connection is before is not None

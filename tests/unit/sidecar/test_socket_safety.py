"""The sidecar's socket: what is at its path, memory that a client may still write to, and its
end.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from lmcache_core.errors import ConfigError
from lmcache_core.keys import CacheEngineKey
from lmcache_core.memory import MemoryObj
from lmcache_core.record import Extension, encode_head, payload_digest, raw_header
from lmcache_core.wire import messages as m
from lmcache_sidecar.arena.journal import ArenaJournal
from lmcache_sidecar.socket import session as session_module

from tests.fixtures.embedded import PATIENCE_S, until
from tests.fixtures.frames import HELLO, greeted
from tests.fixtures.kv import CHUNK_SIZE, random_kv, tokens_of
from tests.fixtures.sidecar import TIMEOUT_S, connected, engine_at, running_socket


def test_a_store_that_fails_half_way_leaves_no_reservation(tmp_path: Path) -> None:
    short = random_kv(3 * CHUNK_SIZE)
    with running_socket(tmp_path) as running, engine_at(running.path) as engine:
        for seed in range(4):
            with pytest.raises(ValueError, match="kvcaches"):
                engine.store(tokens_of(4 * CHUNK_SIZE, seed), kvcaches=short)
        (session,) = running.server.sessions
        assert not session.memory.reservations
        assert session.memory.reserved_bytes == 0
        assert running.allocator.used_bytes == 0


@pytest.mark.parametrize("kind", ["file", "link to a file", "directory"])
def test_path_that_is_no_socket_is_not_replaced(tmp_path: Path, kind: str) -> None:
    precious, path = tmp_path / "precious", tmp_path / "s.sock"
    precious.write_text("keep me")
    if kind == "file":
        path = precious
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(precious)
    with (
        pytest.raises(ConfigError, match="something other than a socket"),
        running_socket(tmp_path, path=path),
    ):
        pass
    assert precious.read_text() == "keep me"


def test_socket_of_a_successor_is_not_removed(tmp_path: Path) -> None:
    with running_socket(tmp_path) as running:
        running.path.unlink()
        with socket.socket(socket.AF_UNIX) as successor:
            successor.bind(str(running.path))
            running.loop.run(running.server.close(), TIMEOUT_S)
            assert running.path.exists()


@pytest.mark.parametrize("num_turns", range(6))
def test_connection_during_the_close_is_ended(tmp_path: Path, num_turns: int) -> None:
    """After so many turns of the loop the connection is still in the backlog, accepted, or its
    session about to begin.
    """
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(PATIENCE_S)
        with running_socket(tmp_path) as running:

            async def connect_and_close() -> None:
                client.connect(str(running.path))
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                await running.server.close()

            running.loop.run(connect_and_close(), PATIENCE_S)
        gc.collect()  # reports what was left open
        with contextlib.suppress(ConnectionError):
            assert client.recv(1) == b""


INCOMPLETE = m.Commit(tuple((n, bytes(60_000)) for n in range(10)))


@pytest.mark.parametrize(
    "refused", [HELLO, m.Reject((-1,)), m.Stage("t", ((9, b""),), True, 1, 0), INCOMPLETE]
)
def test_a_refused_client_keeps_its_memory_until_it_has_gone(
    tmp_path: Path, refused: m.Message, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may still be writing to its reservation, so that no other client may get that memory."""
    monkeypatch.setattr(session_module, "LARGE_REQUEST_TIMEOUT_S", 0.1)
    with running_socket(tmp_path) as running:
        with greeted(running.path) as client:
            client.say(m.ReserveExtents((1000,)))
            used = running.allocator.used_bytes
            request = client.frame(refused)
            client.socket.sendall(request[:-1] if refused is INCOMPLETE else request)
            assert isinstance(client.answer(), m.ErrorMessage)
            assert client.socket.recv(1) == b"", "the sidecar has ended the connection"
            with greeted(running.path) as other:
                other.say(m.Stats())
            assert running.allocator.used_bytes == used > 0
        until(lambda: running.allocator.used_bytes == 0)


def test_client_that_does_not_read_does_not_delay_the_end(tmp_path: Path) -> None:
    with running_socket(tmp_path) as running, greeted(running.path) as client:
        client.socket.settimeout(0.2)
        with contextlib.suppress(TimeoutError):
            while True:
                client.socket.sendall(client.frame(m.Stats()))
        running.loop.run(running.server.close(), TIMEOUT_S)


def test_heads_beyond_one_answer_are_misses(tmp_path: Path) -> None:
    """Extensions of later versions may make heads large."""
    names = [CacheEngineKey("vllm", "org/model", 1, 0, f"{number:064x}") for number in range(200)]
    with running_socket(tmp_path) as running, connected(running.path) as client:
        for name in names:
            plain = raw_header(name, (4,), "uint8", payload_digest(b"data"))
            head = encode_head(
                msgspec.structs.replace(plain, extensions=(Extension(7, False, bytes(60_000)),)), 4
            )
            (lent,) = client.call(m.ReserveExtents((4,)), m.Extents).items
            assert isinstance(lent, m.Extent)
            client.arena.store_view[lent.offset : lent.offset + 4] = b"data"
            assert client.call(m.Commit(((lent.id, head),)), m.ContainsOk).present == [True]
        load = m.LoadExtents(client.names(names), 60_000, 0)
        *extents, reason = client.call(load, m.Extents).items
        assert 50 < len(extents) < 200
        assert reason == "no_memory"
        ids = tuple(item.id for item in extents if isinstance(item, m.Extent))
        client.call(m.DoneWith(ids), m.Ok)
        assert running.hot.evict_bytes(1 << 20) == 200 * 512, "no chunk stays pinned"


def test_silent_client_is_disconnected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmcache_sidecar.socket.session.HELLO_TIMEOUT_S", 0.1)
    with running_socket(tmp_path) as running, socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(PATIENCE_S)
        raw.connect(str(running.path))
        assert raw.recv(1) == b""
        until(lambda: not running.server.sessions)


class FakeJournal(ArenaJournal):
    """Of an arena that the next start uses again; remembers what it was asked."""

    def __init__(self, is_writable: bool) -> None:
        self.asked: list[int] = []
        self._is_writable = is_writable

    def reserved(self, memories: Sequence[MemoryObj]) -> bool:
        self.asked.append(len(memories))
        return self._is_writable

    def abandoned(self, memories: Sequence[MemoryObj]) -> None:
        for memory in memories:
            memory.ref_count_down()


def test_memory_that_cannot_be_recorded_is_not_lent(tmp_path: Path) -> None:
    journal = FakeJournal(is_writable=False)
    with running_socket(tmp_path, journal=journal) as running:
        with connected(running.path) as client:
            answer = client.call(m.ReserveExtents((1000, 2 << 20, 1000)), m.Extents)
        assert answer == m.Extents(("no_memory",) * 3)
        assert journal.asked == [2]
        assert running.allocator.used_bytes == 0

"""Tickets, rejects, descriptions and layouts at the sidecar's socket."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from lmcache_core.errors import ProtocolError
from lmcache_core.keys import ChunkChain, Lane
from lmcache_core.memory import MemoryObj
from lmcache_core.record import Staged
from lmcache_core.sidecar import SidecarChunkStore, SidecarConnection
from lmcache_core.storage import expected as expected_module
from lmcache_core.storage import staging as staging_module
from lmcache_core.telemetry import Counters
from lmcache_core.wire import messages as m
from lmcache_core.wire.capabilities import ON_DEVICE
from lmcache_sidecar.socket import server as server_module

from tests.fixtures.chains import (
    TAKEN_BYTES,
    Shelf,
    chain_of,
    chunk_in,
    keys_by_chunk,
    keys_of_rank,
    names_of,
    num_loaded,
    reserved,
    store_chunks,
)
from tests.fixtures.embedded import PATIENCE_S, until
from tests.fixtures.frames import HELLO, greeted
from tests.fixtures.sidecar import RunningSocket, connected, running_socket

ARENA_BYTES = 64 * TAKEN_BYTES
CHAIN = chain_of(range(4))


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[RunningSocket]:
    with running_socket(tmp_path, ARENA_BYTES) as running:
        yield running


@contextlib.contextmanager
def client_of(
    sidecar: RunningSocket,
    hello: m.Hello = HELLO,
    describe: Callable[[str], m.Describe] | None = None,
) -> Iterator[SidecarChunkStore]:
    store = SidecarChunkStore(sidecar.path, hello, PATIENCE_S, Counters(), None, describe)
    store.open(lambda salt: None)
    try:
        yield store
    finally:
        store.close()


def evictable(sidecar: RunningSocket, chain: ChunkChain) -> bool:
    sidecar.hot.evict_bytes(ARENA_BYTES)
    return not any(sidecar.hot.contains_many(names_of(keys_by_chunk(chain))))


def test_end_of_a_connection_ends_its_tickets(sidecar: RunningSocket) -> None:
    with client_of(sidecar) as other:
        with client_of(sidecar) as store:
            store_chunks(store, keys_of_rank(CHAIN, 0))
            assert store.stage("t", [CHAIN]) == Staged(True, (b"\1" * 4,))
            other.unstage(["t"])
            assert not evictable(sidecar, CHAIN), "tickets belong to their client"
            assert sidecar.server.context.staged.used_bytes == 4 * TAKEN_BYTES
            assert sorted(s.staging.num_tickets for s in sidecar.server.sessions) == [0, 1]
        until(lambda: evictable(sidecar, CHAIN), "a client that has gone holds chunks")
        assert sidecar.server.context.staged.used_bytes == 0


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_ticket_waits_for_what_another_client_is_writing(
    sidecar: RunningSocket, is_stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefill engine still stores what the decode engine asks for."""
    monkeypatch.setattr(expected_module, "EXPECTED_S", PATIENCE_S)
    keys = keys_of_rank(CHAIN, 0)
    with client_of(sidecar) as reader, client_of(sidecar) as writer:
        store_chunks(writer, keys[:2])
        memory = [one for one in reserved(writer, keys[2:]) if isinstance(one, MemoryObj)]
        assert reader.stage("t", [CHAIN]) == Staged(False, (b"\1\1\0\0",))
        chunks = [chunk_in(one, key) for one, key in zip(memory, keys[2:], strict=True)]
        if is_stored:
            writer.put(chunks)
        writer.release(chunks)
        until(lambda: reader.stage("t", [CHAIN]).is_ready, "it waits on")
        rest = bytes([is_stored] * 2)
        assert reader.stage("t", [CHAIN]) == Staged(True, (b"\1\1" + rest,))
        assert not sidecar.server.context.stack.expected


def test_a_ticket_waits_for_no_client_that_has_gone(
    sidecar: RunningSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expected_module, "EXPECTED_S", PATIENCE_S)
    with client_of(sidecar) as reader:
        with greeted(sidecar.path) as writer:
            lane = keys_of_rank(CHAIN, 0)[0].lane()
            reserve = m.ReserveExtents((64,) * 4, [(0, CHAIN.hashes)])
            for number, message in ((0, m.DeclareLane(0, lane)), (2, reserve)):
                writer.socket.sendall(m.build_frame(number, message))
            assert isinstance(writer.answer(), m.Extents)
            assert reader.stage("t", [CHAIN]) == Staged(False, (bytes(4),))
        until(lambda: reader.stage("t", [CHAIN]) == Staged(True, (bytes(4),)), "it waits on")
        assert not sidecar.server.context.stack.expected


def test_expired_tickets_give_their_chunks_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging_module, "STAGE_LEASE_S", 0.0)
    monkeypatch.setattr(server_module, "SWEEP_INTERVAL_S", 0.02)
    with running_socket(tmp_path, ARENA_BYTES) as sidecar, client_of(sidecar) as store:
        store_chunks(store, keys_of_rank(CHAIN, 0))
        assert store.stage("t", [CHAIN]) == Staged(True, (b"\1" * 4,))
        until(lambda: evictable(sidecar, CHAIN), "the ticket does not end")


def test_tickets_of_all_clients_hold_half_of_the_arena(sidecar: RunningSocket) -> None:
    chain = chain_of(range(40))
    with client_of(sidecar) as first, client_of(sidecar) as second:
        store_chunks(first, keys_of_rank(chain, 0)[:25])
        store_chunks(second, keys_of_rank(chain, 0)[25:])
        assert first.stage("t", [chain.part(0, 20)]) == Staged(True, (b"\1" * 20,))
        assert second.stage("t", [chain.part(10, 40)]) == Staged(True, (b"\1" * 22 + bytes(8),))


def test_draining_sidecar_stages_hot_chunks(tmp_path: Path) -> None:
    shelf = Shelf()
    with (
        running_socket(tmp_path, ARENA_BYTES, lower=[shelf]) as sidecar,
        client_of(sidecar) as store,
    ):
        store_chunks(store, keys_of_rank(CHAIN, 0)[:2])
        shelf.held.update(names_of(keys_of_rank(CHAIN, 0)))
        sidecar.server.refuse_stores()
        assert store.stage("t", [CHAIN]) == Staged(True, (b"\1\1\0\0",))


@pytest.mark.parametrize(
    "lane", [Lane("\N{SNOWMAN}" * 1000, "m", 1, 0), Lane("vllm", "m", 1, 0, "\N{SNOWMAN}" * 1000)]
)
def test_unspellable_names_end_their_own_connection_only(
    sidecar: RunningSocket, lane: Lane
) -> None:
    with client_of(sidecar) as other, greeted(sidecar.path) as client:
        store_chunks(other, keys_of_rank(CHAIN, 0))
        client.socket.sendall(m.build_frame(0, m.DeclareLane(0, lane)))
        assert isinstance(client.answer(), m.ErrorMessage)
        chain = ChunkChain(lane.fmt, lane.model_name, 1, lane.group, bytes(32))
        assert other.stage("t", [chain]) is None
        assert other.stage("t", [CHAIN]) == Staged(True, (b"\1" * 4,))


@pytest.mark.parametrize("num_ranks", [0, m.MAX_RANKS + 1])
def test_impossible_number_of_ranks_ends_the_connection(
    sidecar: RunningSocket, num_ranks: int
) -> None:
    with greeted(sidecar.path) as client:
        lane = Lane("vllm", "m", num_ranks, 0)
        client.socket.sendall(m.build_frame(0, m.DeclareLane(0, lane)))
        assert isinstance(client.say(m.Stage("t", ((0, bytes(32)),), True, 1, 0)), m.ErrorMessage)


def hello_of(capabilities: Sequence[str] = (), **fields: object) -> m.Hello:
    values = {"name": "test", "pid": 1, "rank": 0, "model": "m", "layout": "a"}
    return m.engine_hello(m.EngineInfo(**(values | fields)), capabilities)  # type: ignore[arg-type]


def test_second_layout_of_an_engine_is_refused(sidecar: RunningSocket) -> None:
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(connected(sidecar.path, hello_of()))
        for fields in (
            {},
            {"name": "other", "layout": "b"},
            {"model": "n", "layout": "b"},
            {"world_size": 2, "layout": "b"},
            {"layout": ""},
        ):
            stack.enter_context(connected(sidecar.path, hello_of(**fields)))
        said = r"layout: client 'test', model 'm': layout 'b', but the client with pid 1"
        with (
            pytest.raises(ProtocolError, match=said),
            connected(sidecar.path, hello_of(rank=1, layout="b")),
        ):
            pass
        assert first.call(m.Stats(), m.StatsOk), "the others are not disturbed"
    until(lambda: not sidecar.server.sessions, "the clients do not go")
    with connected(sidecar.path, hello_of(layout="b")):
        pass


def test_loads_are_verified_by_sample_only_for_gpus(tmp_path: Path) -> None:
    with running_socket(tmp_path, verify_hot="auto") as sidecar:
        for capabilities, expected in (((), "always"), ((ON_DEVICE,), "sampled")):
            with connected(sidecar.path, hello_of(capabilities)) as connection:
                assert connection.arena_info.verify_hot == connection.verifier.mode == expected


def test_each_connection_describes_names_with_the_sidecars_salt(tmp_path: Path) -> None:
    salts: list[str] = []

    def describe(salt: str) -> m.Describe:
        salts.append(salt)
        return m.Describe("vllm", "m", 1, 16, bytes(32), ("",))

    with contextlib.ExitStack() as stack:
        with running_socket(tmp_path, salt="s1") as first:
            store = stack.enter_context(client_of(first, describe=describe))
        (tmp_path / "second").mkdir()
        with running_socket(tmp_path / "second", salt="s2", path=first.path):
            until(lambda: store.stage("t", []) is not None, "the client does not come back")
    assert salts == ["s1", "s2"]


@pytest.mark.parametrize(
    ("description", "text"),
    [
        (m.Describe("vllm", "m", m.MAX_RANKS + 1, 16, bytes(32), ("",)), "<= 1024"),
        (
            m.Describe("vllm", "m", m.MAX_RANKS, 16, bytes(32), tuple(map(str, range(9)))),
            "9216 keys",
        ),
        (m.Describe("vllm", "é" * 1024, 1, 16, bytes(32), ("",)), "model_name"),
    ],
)
def test_impossible_description_is_refused(
    sidecar: RunningSocket, description: m.Describe, text: str
) -> None:
    with connected(sidecar.path) as connection, pytest.raises(ProtocolError, match=text):
        connection.call(description, m.Ok)


def loaded(connection: SidecarConnection) -> list[m.Extent]:
    load = m.LoadExtents(connection.names(keys_of_rank(CHAIN, 0)), 60_000, 0)
    items = connection.call(load, m.Extents).items
    return [item for item in items if isinstance(item, m.Extent)]


def held(sidecar: RunningSocket) -> list[bool]:
    return sidecar.hot.contains_many(names_of(keys_of_rank(CHAIN, 0)))


@pytest.mark.parametrize("when", ["with the copy", "before it"])
def test_client_rejects_a_damaged_chunk(sidecar: RunningSocket, when: str) -> None:
    with client_of(sidecar) as store:
        store_chunks(store, keys_of_rank(CHAIN, 0))
        with connected(sidecar.path) as connection:
            connection.arena.store_view[loaded(connection)[2].offset] ^= 1
        found = store.get(keys_of_rank(CHAIN, 0), check_later=when == "with the copy")
        if when == "with the copy":
            store.reject(found[1])  # nothing is wrong with it
            store.reject(found[2])
        else:
            assert len(found) == 2
        store.release(found)
        assert held(sidecar) == [True, True, False, True]
        assert store_chunks(store, keys_of_rank(CHAIN, 0)[2:3]) == 1
        assert num_loaded(store, keys_of_rank(CHAIN, 0)) == 4

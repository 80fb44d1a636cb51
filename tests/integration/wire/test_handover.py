"""HANDOVER over real sockets: chunks of any tenant, from servers and admins alone."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NoReturn

import pytest
from lmcache_core.errors import AuthenticationError, CapacityError, UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.record import Chunk
from lmcache_core.security import Principal
from lmcache_core.wire.client import LmClient
from lmcache_core.wire.messages import ErrorMessage, HandoverChunk, Held, Ping, Put, PutOk
from lmcache_core.wire.served import HandoverLog, HandoverNote, ServerLimits
from lmcache_core.wire.server import LmServer

from tests.fixtures.wire import MemoryStore, RawConnection, connected, until
from tests.suites.chunks import make_chunk, make_key, make_payload

pytestmark = pytest.mark.virtual_time


class TakingStore(MemoryStore):
    room = True
    is_staying = True

    def stays(self, key: ChunkKey) -> bool:
        return self.is_staying

    def has_room(self, num_bytes: int) -> bool:
        return self.room

    async def take_over(self, chunk: Chunk) -> bool:
        return await self.put(chunk)


def by_token(token: str | None) -> Principal:
    if token not in ("admin", "storage", "client"):
        raise AuthenticationError("a token is required")
    return Principal("home", token, "test")


def no_ticket(ticket: str) -> NoReturn:
    raise AuthenticationError("no ticket is good")


@asynccontextmanager
async def serving(
    store: MemoryStore, limits: ServerLimits | None = None
) -> AsyncIterator[LmServer]:
    server = LmServer(store, by_token, limits=limits, verify_ticket=no_ticket)
    await server.open()
    try:
        yield server
    finally:
        await server.close()
        store.clear()
        store.arena.check_empty()


@asynccontextmanager
async def giver(server: LmServer, token: str = "admin") -> AsyncIterator[LmClient]:
    client = LmClient("127.0.0.1", server.port, token)
    yield client
    await client.close()


def chunk_of(name: object, tenant: str, age_s: float | None = None) -> Chunk:
    chunk = make_chunk(name, tenant=tenant)
    chunk.stored_at = None if age_s is None else time.time() - age_s
    return chunk


@pytest.mark.parametrize("token", ["admin", "storage"])
async def test_chunks_of_all_tenants_arrive_with_their_age(token: str) -> None:
    store = TakingStore()
    async with serving(store) as server, giver(server, token) as client:
        assert await client.hand_over(
            [chunk_of("a", "acme", 3600), chunk_of("b", "rival")], may_evict=True
        ) == [True, True]
        held = store.chunks[make_key("a", "acme")]
        assert bytes(held.memory.byte_array) == make_payload("a")
        assert held.stored_at is not None
        assert 3599 < time.time() - held.stored_at < 3700
        age = store.chunks[make_key("b", "rival")].stored_at
        assert age is not None
        assert abs(time.time() - age) < 100


async def test_without_room_nothing_is_evicted_unless_allowed() -> None:
    store = TakingStore()
    store.room = False
    async with serving(store) as server, giver(server) as client:
        assert (
            await client.hand_over([chunk_of(i, "acme") for i in range(3)], may_evict=False)
            == [False] * 3
        )
        assert not store.chunks
        assert await client.hand_over([chunk_of("a", "acme")], may_evict=True) == [True]


async def test_a_server_is_answered_which_chunks_of_any_tenant_stay() -> None:
    store, keys = TakingStore(), [make_key("a", "acme"), make_key("b", "acme")]
    async with serving(store) as server, giver(server, "storage") as client:
        assert await client.hand_over(
            [chunk_of("a", "acme"), chunk_of("b", "rival")], may_evict=True
        ) == [True, True]
        assert await client.holds("acme", keys) == [True, False]
        assert await client.holds("rival", keys) == [False, True]
        assert await client.contains(keys) == [False, False], "in the caller's own namespace"
        store.is_staying = False
        assert await client.holds("acme", keys) == [False, False]
        assert await client.put([chunk_of("a", "home")]) == [True]
        assert await client.contains([make_key("a", "home")]) == [True], "it can still be read"


@pytest.mark.parametrize(("store", "token"), [(TakingStore, "client"), (MemoryStore, "admin")])
async def test_clients_and_stores_that_take_none_are_refused(
    store: type[MemoryStore], token: str
) -> None:
    async with serving(store()) as server, giver(server, token) as client:
        with pytest.raises(UnavailableError, match="HANDOVER"):
            await client.hand_over([chunk_of("a", "acme")], may_evict=True)
        assert await client.put([chunk_of("a", "home")]) == [True]
        if token == "client":
            with pytest.raises(AuthenticationError, match="HELD"):
                await client.holds("acme", [make_key("a", "acme")])


async def say(raw: RawConnection, number: int, message: Put | HandoverChunk, blob: bytes) -> PutOk:
    await raw.say(number, message, blob)
    _, answer, _ = await raw.read()
    assert isinstance(answer, PutOk)
    return answer


@pytest.mark.parametrize("message", ["handover", "held", "ping"])
async def test_a_caller_that_has_lost_its_role_since_hello_is_refused(
    message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, roles = TakingStore(), ["storage"]
    monkeypatch.setattr(
        sys.modules[__name__], "by_token", lambda token: Principal("home", roles[0], "test")
    )
    async with (
        serving(store, ServerLimits(reauthenticate_s=0.0)) as server,
        connected(server.port) as raw,
    ):
        await raw.hello("any")
        record = make_chunk("a").head + make_payload("a")
        assert await say(raw, 2, HandoverChunk("acme", 0, True), record) == PutOk(True, "")
        roles[0] = "client"
        asked = {
            "handover": HandoverChunk("rival", 0, True),
            "held": Held("acme", []),
            "ping": Ping(),
        }[message]
        await raw.say(3, asked, record if message == "handover" else b"")
        _, answer, _ = await raw.read()
        assert isinstance(answer, ErrorMessage)
        assert answer.code == "authentication"
        assert await raw.is_closed()
        assert set(store.chunks) == {make_key("a", "acme")}


class Bucket:
    """Admits `num_free` more requests."""

    def __init__(self, num_free: int) -> None:
        self.num_free = num_free
        self.asked: set[str] = set()

    def admit(self, tenant: str) -> None:
        self.asked.add(tenant)
        if not self.num_free:
            raise CapacityError("asks too often")
        self.num_free -= 1


async def test_handovers_count_as_requests_of_their_sender() -> None:
    store, bucket = TakingStore(), Bucket(1)
    async with (
        serving(store, ServerLimits(admit=bucket.admit, pace_s=1.0)) as server,
        giver(server) as client,
    ):
        assert await client.hand_over(
            [chunk_of("a", "acme"), chunk_of("b", "acme")], may_evict=True
        ) == [True, False]
        assert bucket.asked == {"home"}
        assert set(store.chunks) == {make_key("a", "acme")}
        waiting = asyncio.create_task(client.hand_over([chunk_of("b", "acme")], may_evict=True))
        await asyncio.sleep(0.1)
        bucket.num_free = 1
        assert await waiting == [True]
        assert client.is_connected


async def test_handovers_and_refusals_are_noted() -> None:
    store, notes = TakingStore(), list[HandoverNote]()
    async with serving(store, ServerLimits(note_handovers=notes.append)) as server:
        async with giver(server) as client:
            for name, tenant in (("a", "acme"), ("b", "rival"), ("c", "acme")):
                assert await client.hand_over([chunk_of(name, tenant)], may_evict=True) == [True]
            assert [note.num_chunks for note in notes] == [1], "the rest in a minute, or at the end"
        size = len(make_payload("a"))
        caller = by_token("admin")
        await until(lambda: len(notes) == 2)
        assert "127.0.0.1" in (address := notes[0].client)
        assert notes[0] == HandoverNote(caller, address, ("acme",), 1, size, 0)
        assert notes[1] == HandoverNote(
            caller,
            address,
            ("acme", "rival"),
            2,
            len(make_payload("b")) + len(make_payload("c")),
            0,
        )
        for token in ("client", None):
            async with connected(server.port) as raw:
                await raw.hello(token)
                await raw.say(
                    2, HandoverChunk("acme", 0, True), make_chunk("d").head + make_payload("d")
                )
                _, message, _ = await raw.read()
                assert isinstance(message, ErrorMessage)
            await until(lambda: notes[-1].num_refused == 1)
            note = notes.pop()
            assert (note.caller, note.tenants) == (
                None if token is None else by_token(token),
                ("acme",),
            )
            assert (note.num_chunks, note.num_bytes, note.num_refused) == (0, 0, 1)
        assert len(notes) == 2


def test_a_long_handover_is_a_note_a_minute() -> None:
    now, notes = 0.0, list[HandoverNote]()
    log = HandoverLog(notes.append, "10.0.0.1", lambda: now)
    for number in range(130):
        log.add(None, f"tenant-{number}", 10, number % 2 == 0)
        now += 1.0
    log.flush()
    log.flush()
    assert [note.num_chunks + note.num_refused for note in notes] == [1, 60, 60, 9]
    assert [len(note.tenants) for note in notes] == [1, 16, 16, 9]
    assert sum(note.num_bytes for note in notes) == 650

"""HANDOVER over real sockets: of any tenant's chunks, from admins alone, with their age, and only where there is room if so told."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from lmcache_core.errors import AuthenticationError, UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.record import Chunk
from lmcache_core.security import Principal
from lmcache_core.testing.chunks import make_chunk, make_key, make_payload
from lmcache_core.wire import ClientOptions, LmClient, LmServer
from lmcache_core.wire.messages import ErrorMessage, Handover, Put, PutOk

from tests.fixtures.wire import MemoryStore, RawConnection, connected


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
    if token not in ("admin", "client"):
        raise AuthenticationError("a token is required")
    return Principal("home", "admin" if token == "admin" else "client", "test")


@asynccontextmanager
async def serving(store: MemoryStore) -> AsyncIterator[LmServer]:
    server = LmServer(store, by_token)
    await server.open()
    try:
        yield server
    finally:
        await server.close()
        store.clear()
        store.arena.check_empty()


@asynccontextmanager
async def giver(server: LmServer, token: str = "admin") -> AsyncIterator[LmClient]:
    client = LmClient("127.0.0.1", server.port, token, ClientOptions(hands_over=True))
    yield client
    await client.close()


def chunk_of(name: object, tenant: str, age_s: float | None = None) -> Chunk:
    chunk = make_chunk(name, tenant=tenant)
    chunk.stored_at = None if age_s is None else time.time() - age_s
    return chunk


async def test_chunks_of_all_tenants_arrive_as_old_as_they_are() -> None:
    store = TakingStore()
    async with serving(store) as server, giver(server) as client:
        await client.ping()
        assert client.takes_handovers
        assert await client.hand_over([chunk_of("a", "acme", 3600), chunk_of("b", "rival")], may_evict=True) == [True, True]
        held = store.chunks[make_key("a", "acme")]
        assert bytes(held.memory.byte_array) == make_payload("a")
        assert held.stored_at is not None
        assert 3599 < time.time() - held.stored_at < 3620
        age = store.chunks[make_key("b", "rival")].stored_at
        assert age is not None
        assert abs(time.time() - age) < 20


async def test_without_room_nothing_is_given_up_unless_so_told() -> None:
    store = TakingStore()
    store.room = False
    async with serving(store) as server, giver(server) as client:
        assert await client.hand_over([chunk_of(i, "acme") for i in range(3)], may_evict=False) == [False] * 3
        assert not store.chunks
        assert await client.hand_over([chunk_of("a", "acme")], may_evict=True) == [True]


async def test_who_ends_too_has_nothing_for_servers_that_end() -> None:
    """Clients still read it; but what two servers that end have of each other would be lost."""
    store, keys = TakingStore(), [make_key("a", "home")]
    async with serving(store) as server, giver(server) as ending, giver(server, "client") as of_one_tenant:
        reader = LmClient("127.0.0.1", server.port, "client")
        assert await ending.put([chunk_of("a", "home")]) == [True]
        assert await ending.contains(keys) == await of_one_tenant.contains(keys) == await reader.contains(keys) == [True]
        store.is_staying = False
        assert await ending.contains(keys) == await of_one_tenant.contains(keys) == [False]
        assert await reader.contains(keys) == [True]
        await reader.close()


@pytest.mark.parametrize(("store", "token"), [(TakingStore, "client"), (MemoryStore, "admin")])
async def test_clients_and_stores_that_take_none_are_not_offered_it(store: type[MemoryStore], token: str) -> None:
    async with serving(store()) as server, giver(server, token) as client:
        await client.ping()
        assert not client.takes_handovers
        with pytest.raises(UnavailableError, match="HANDOVER"):
            await client.hand_over([chunk_of("a", "acme")], may_evict=True)
        assert await client.put([chunk_of("a", "home")]) == [True]


async def test_who_has_not_asked_for_it_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(TakingStore()) as server, connected(server.port) as raw:
        await raw.hello("admin")
        chunk = make_chunk("a")
        await raw.say(2, Handover("acme", 0, True), chunk.head + make_payload("a"))
        _, message, _ = await raw.read()
        assert isinstance(message, ErrorMessage)
        assert await raw.is_closed()


async def say(raw: RawConnection, number: int, message: Put | Handover, blob: bytes) -> PutOk:
    await raw.say(number, message, blob)
    _, answer, _ = await raw.read()
    assert isinstance(answer, PutOk)
    return answer


async def test_a_damaged_one_is_refused_and_the_connection_goes_on() -> None:
    store = TakingStore()
    async with serving(store) as server, connected(server.port) as raw:
        await raw.hello("admin", capabilities=["handover"])
        record = bytearray(make_chunk("a").head + make_payload("a"))
        assert await say(raw, 2, Handover("acme", 0, True), bytes(record)) == PutOk(True, "")
        record[-1] ^= 1
        assert await say(raw, 3, Handover("rival", 0, True), bytes(record)) == PutOk(False, "corrupt")
        assert await say(raw, 4, Put(), bytes(record)) == PutOk(False, "corrupt")
        assert set(store.chunks) == {make_key("a", "acme")}

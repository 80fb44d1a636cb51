"""Which clients an lm:// server lets in, and what it says of the others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

import pytest
from lmcache_core.errors import AuthenticationError, UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.record import Miss, MissReason
from lmcache_core.security import Principal, Ticket
from lmcache_core.wire.client import LmClient
from lmcache_core.wire.messages import HelloOk
from lmcache_core.wire.served import ServerLimits

from tests.fixtures.wire import Arena, MemoryStore, by_token, client_of, connected, keys_of, serving

pytestmark = pytest.mark.virtual_time


def one_ticket(ticket: str) -> Ticket:
    if ticket != "good":
        raise AuthenticationError("no such ticket")
    return Ticket("k1", "server", "me", "acme", 1 << 50)


async def test_refused_clients_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(token: str | None) -> Principal:
        raise AuthenticationError("no")

    caplog.set_level("INFO")
    async with serving(MemoryStore(), authenticate=refuse) as server:
        for _ in range(5):
            async with client_of(server.port) as client:
                with pytest.raises(AuthenticationError):
                    await client.ping()
    async with (
        serving(MemoryStore(), ServerLimits(max_connections=1)) as server,
        client_of(server.port) as first,
    ):
        await first.ping()
        for _ in range(5):
            async with client_of(server.port) as client:
                with pytest.raises(UnavailableError, match="busy"):
                    await client.ping()
    assert [caplog.text.count(words) for words in ("reason=no", "turned away")] == [1, 1]


async def test_silent_connections_take_no_places() -> None:
    """The oldest of them give way to new connections."""
    limits = ServerLimits(max_connections=2, max_strangers=4, hello_timeout_s=60)
    async with serving(MemoryStore(), limits, by_token) as server, AsyncExitStack() as exits:
        first = await exits.enter_async_context(client_of(server.port, "acme"))
        await first.ping()
        silent = [await exits.enter_async_context(connected(server.port)) for _ in range(12)]
        second = await exits.enter_async_context(client_of(server.port, "acme"))
        await second.ping()
        assert [await raw.is_closed(0.2) for raw in silent[-3:]] == [False] * 3
        assert [await raw.is_closed() for raw in silent[:8]] == [True] * 8
        await first.ping()
        async with client_of(server.port, "acme") as third:
            with pytest.raises(UnavailableError, match="busy"):
                await third.ping()


def by_role(token: str | None) -> Principal:
    """An authenticator for which the token is role and tenant."""
    role, _, tenant = (token or "").partition(":")
    assert role in ("client", "storage", "admin")
    return Principal(tenant, role, "test")  # type: ignore[arg-type]


async def test_a_tenant_with_all_places_gives_up_its_oldest() -> None:
    limits = ServerLimits(max_connections=7)
    async with serving(MemoryStore(), limits, by_role) as server, AsyncExitStack() as exits:

        async def connect(token: str) -> LmClient:
            client = await exits.enter_async_context(client_of(server.port, token))
            await client.ping()
            return client

        greedy = [await exits.enter_async_context(connected(server.port)) for _ in range(7)]
        for raw in greedy:
            assert isinstance(await raw.hello("client:greedy"), HelloOk)
        others = [
            await connect(token) for token in ("client:small", "storage:greedy", "admin:greedy")
        ]
        assert [await raw.is_closed() for raw in greedy[:3]] == [True] * 3
        assert server.num_connections == 7
        with pytest.raises(UnavailableError, match="busy"):
            await connect("client:greedy")
        # Storage servers and admins share their places, and each has as many as any tenant.
        others.append(await connect("storage:greedy"))
        with pytest.raises(UnavailableError, match="busy"):
            await connect("storage:greedy")
        for client in others:
            await client.ping()
        assert [await raw.is_closed(0.2) for raw in greedy[4:]] == [False] * 3


async def test_a_request_underway_is_answered_before_its_connection_ends() -> None:
    class Slow(MemoryStore):
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
            self.begun.set()
            await self.go_on.wait()
            return await super().contains(keys)

    store = Slow()
    limits = ServerLimits(max_connections=2)
    async with serving(store, limits, by_token) as server, AsyncExitStack() as exits:
        first = await exits.enter_async_context(client_of(server.port, "greedy"))
        asked = asyncio.create_task(first.contains(keys_of("a")))
        await store.begun.wait()
        second = await exits.enter_async_context(client_of(server.port, "greedy"))
        await second.ping()
        other = await exits.enter_async_context(client_of(server.port, "small"))
        await other.ping()
        store.go_on.set()
        assert await asked == [False]
        await second.ping()


async def test_connections_without_token_or_ticket_take_no_places() -> None:
    """Where peers are served by ticket, HELLO alone proves nothing."""
    limits = ServerLimits(max_connections=1, max_strangers=2)
    async with (
        serving(MemoryStore(), limits, by_token, one_ticket) as server,
        AsyncExitStack() as exits,
    ):
        for _ in range(6):
            raw = await exits.enter_async_context(connected(server.port))
            await raw.hello()
        client = await exits.enter_async_context(client_of(server.port, name="me"))
        [result] = await client.get(keys_of("a"), Arena(), ticket="good")
        assert isinstance(result, Miss)
        assert result.reason is MissReason.NEVER_STORED
        async with client_of(server.port, name="me") as other:
            assert await other.get(keys_of("a"), Arena(), ticket="good") == [
                Miss(MissReason.UNAVAILABLE)
            ]
        await client.ping()

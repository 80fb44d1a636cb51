"""Which clients an lm:// server lets in, and what it says of the others."""

from __future__ import annotations

import pytest
from lmcache_core.errors import AuthenticationError, UnavailableError
from lmcache_core.wire import ServerLimits

from tests.fixtures.wire import MemoryStore, Tenant, client_of, serving


async def test_too_many_connections_are_turned_away() -> None:
    async with serving(MemoryStore(), ServerLimits(max_connections=1)) as server, client_of(server.port) as first:
        await first.ping()
        async with client_of(server.port) as second:
            with pytest.raises(UnavailableError, match="busy"):
                await second.ping()
        await first.ping()


async def test_clients_that_are_not_let_in_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(token: str | None) -> Tenant:
        raise AuthenticationError("no")

    caplog.set_level("INFO")
    async with serving(MemoryStore(), authenticate=refuse) as server:
        for _ in range(5):
            async with client_of(server.port) as client:
                with pytest.raises(AuthenticationError):
                    await client.ping()
    async with serving(MemoryStore(), ServerLimits(max_connections=1)) as server, client_of(server.port) as first:
        await first.ping()
        for _ in range(5):
            async with client_of(server.port) as client:
                with pytest.raises(UnavailableError, match="busy"):
                    await client.ping()
    assert [caplog.text.count(words) for words in ("refused: no", "turned away")] == [1, 1]


async def test_the_authenticator_sees_the_token() -> None:
    seen: list[str | None] = []

    def remember(token: str | None) -> Tenant:
        seen.append(token)
        return Tenant("t")

    async with serving(MemoryStore(), authenticate=remember) as server, client_of(server.port, "secret") as one:
        await one.ping()
        async with client_of(server.port) as other:
            await other.ping()
    assert seen == ["secret", None]

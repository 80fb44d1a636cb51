"""The remote tier over lm://, or encrypted over lm+tls://."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core._typing import override
from lmcache_core.errors import AuthenticationError, ProtocolError
from lmcache_core.keys import ChunkKey
from lmcache_core.names import STORAGE_TIER
from lmcache_core.record import Allocate, Chunk, Result
from lmcache_core.security import ClientTls, client_context
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.remote.base import RemoteBackend, RemoteOptions
from lmcache_core.storage.remote.members import (
    MakeClient,
    Members,
    Resolver,
    ServerAddress,
    hosts_of,
    is_literal,
)
from lmcache_core.storage.remote.replicas import ReplicatedBackend
from lmcache_core.storage.sealing import seal_all
from lmcache_core.wire.client import ClientOptions, LmClient

THIS_MACHINE = "localhost"
ENCRYPTED_SCHEME = "lm+tls"


def create(url: str, options: RemoteOptions) -> StorageBackend:
    """Return the backend for `lm://host[:port]` or `lm+tls://host[:port]`, or for several hosts
    separated by commas.

    A host name stands for all servers that it resolves to, and is resolved periodically.

    Raises:
        ConfigError: The URL is malformed.
    """
    hosts = hosts_of(url)
    if len(hosts) == 1 and (is_literal(hosts[0].host) or hosts[0].host == THIS_MACHINE):
        return LmBackend(client_maker(url, options)(hosts[0]))
    return ReplicatedBackend(members_of(url, options), options.timeout_s, options.locate)


def members_of(url: str, options: RemoteOptions) -> Members:
    """Return the servers of such a URL, not opened.

    Args:
        url: As for `create`.

    Raises:
        ConfigError: The URL is malformed.
    """
    return Members(Resolver(hosts_of(url)), client_maker(url, options), url)


def client_maker(url: str, options: RemoteOptions) -> MakeClient:
    """Return the factory of clients for the servers of such a URL; arguments as for
    `members_of`.
    """
    tls = (
        (options.tls or ClientTls(client_context()))
        if url.partition("://")[0] == ENCRYPTED_SCHEME
        else None
    )

    def client(address: ServerAddress) -> LmClient:
        behaviour = ClientOptions(
            timeout_s=options.timeout_s,
            name=options.client_name,
            tier=STORAGE_TIER,
            accepts=options.accepts,
            tls=None if tls is None else ClientTls(tls.context, tls.name or address.name),
        )
        return LmClient(address.host, address.port, options.token, behaviour)

    return client


class LmBackend(RemoteBackend):
    """Chunks in a server that speaks lm://. The tenant is the one that the server authenticated;
    all keys of one process have the same.

    Args:
        client: Closed with this tier.
    """

    # For its users, a tier that refuses them is unavailable.
    failures = (AuthenticationError, ProtocolError)

    def __init__(self, client: LmClient) -> None:
        super().__init__("lm")
        self._client = client

    async def close(self) -> None:
        """Close the connection."""
        await self._client.close()

    @property
    @override
    def keeps_tails(self) -> bool:
        return True

    @override
    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        async with self._mapped(None):
            return await self._client.contains(keys)

    @override
    async def batched_get(
        self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None
    ) -> list[Result]:
        async with self._mapped(None):
            results = await self._client.get(keys, allocate, timeout_s=timeout_s)
        self._count_got(results)
        return results

    @override
    async def batched_put(self, chunks: Sequence[Chunk]) -> list[bool]:
        await seal_all(chunks)
        async with self._mapped(None):
            stored = await self._client.put(chunks)
        self._stored_chunks += sum(stored)
        return stored

    @override
    async def batched_remove(self, keys: Sequence[ChunkKey]) -> int:
        async with self._mapped(None):
            return await self._client.remove(keys)

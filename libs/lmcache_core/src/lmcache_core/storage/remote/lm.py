"""The remote tier over lm://."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import TypeVar
from urllib.parse import urlsplit

from lmcache_core.errors import AuthenticationError, ConfigError, ProtocolError, UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.record import Allocate, Chunk, Result
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.remote.base import REMOTE_TIER, RemoteFigures, RemoteOptions
from lmcache_core.storage.sealing import seal_all
from lmcache_core.wire.client import DEFAULT_PORT, ClientOptions, LmClient

T = TypeVar("T")


def create(url: str, options: RemoteOptions) -> LmBackend:
    """The backend for an `lm://host[:port]` URL.

    Raises:
        ConfigError: It is not one.
    """
    parts = urlsplit(url)
    try:
        port = parts.port or DEFAULT_PORT
    except ValueError as exc:
        raise ConfigError(f"remote url {url!r}: {exc}") from exc
    if not parts.hostname or parts.path not in ("", "/") or parts.query or parts.username or parts.password:
        raise ConfigError(f"remote url {parts.scheme}://{parts.hostname}: must be lm://host:port, and the token an option of its own")
    client = LmClient(
        parts.hostname,
        port,
        options.token,
        ClientOptions(timeout_s=options.timeout_s, name=options.client_name, tier=REMOTE_TIER, accepts=options.accepts),
    )
    return LmBackend(client)


class LmBackend(StorageBackend):
    """Chunks in a server that speaks lm://. The tenant is the one that the server authenticated; keys of one process have only one.

    Args:
        client: Closed with this tier.
    """

    name = REMOTE_TIER

    def __init__(self, client: LmClient) -> None:
        self._client = client
        self._figures = RemoteFigures()

    async def open(self) -> None:
        """Nothing to do: the client connects when first needed."""

    async def close(self) -> None:
        """End the connection."""
        await self._client.close()

    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """See `StorageBackend.batched_contains`."""
        return await _mapped(self._client.contains(keys))

    async def batched_get(self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None) -> list[Result]:
        """See `StorageBackend.batched_get`."""
        results = await _mapped(self._client.get(keys, allocate, timeout_s=timeout_s))
        self._figures.count_got(results)
        return results

    async def batched_put(self, chunks: Sequence[Chunk]) -> list[bool]:
        """See `StorageBackend.batched_put`."""
        await seal_all(chunks)
        stored = await _mapped(self._client.put(chunks))
        self._figures.stored_chunks += sum(stored)
        return stored

    async def batched_remove(self, keys: Sequence[ChunkKey]) -> int:
        """See `StorageBackend.batched_remove`."""
        return await _mapped(self._client.remove(keys))

    async def clear(self, tenant: str | None = None) -> int:
        """Nothing: a server that many share is cleared by its operators."""
        return 0

    def stats(self) -> dict[str, int]:
        """Figures of this client; how much the server holds is the server's to say."""
        return self._figures.as_stats()


async def _mapped(work: Awaitable[T]) -> T:
    """To its users a tier that refuses us is one that cannot be reached."""
    try:
        return await work
    except (AuthenticationError, ProtocolError) as exc:
        raise UnavailableError(str(exc)) from exc

"""Receivers for the chunks of a sidecar that shuts down: the remote tier, and other sidecars."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from lmcache_core.errors import AuthenticationError, ProtocolError, UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.names import PEER_TIER
from lmcache_core.p2p import BrokerClient
from lmcache_core.p2p.pool import peer_client
from lmcache_core.record import Chunk
from lmcache_core.security import ClientTls, ShownToken
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.peer import PEER_KIND
from lmcache_core.storage.sealing import seal_all
from lmcache_core.wire.client import ClientOptions, LmClient
from typing_extensions import override

from lmcache_sidecar.holders import Holders

MAX_BATCH_CHUNKS = 16
"""Chunks sent to one taker at a time."""
MAX_TAKERS = 4
"""Peers sent to concurrently; those with the lowest load."""
CONNECT_TIMEOUT_S = 0.5
STORAGE_KIND = "storage"

T = TypeVar("T")


class NotWelcomeError(UnavailableError):
    """A taker refuses this sidecar permanently."""


@dataclass(frozen=True)
class Taker:
    """One receiver of chunks. Its calls may be cancelled; they raise `UnavailableError` if it
    cannot be reached.

    Attributes:
        name: A unique name.
        has: Returns which chunks need not be sent: they are there, or exist elsewhere.
        put: Sends chunks (borrowed); returns True for each that the receiver now holds whole.
    """

    name: str
    has: Callable[[Sequence[ChunkKey]], Awaitable[list[bool]]]
    put: Callable[[Sequence[Chunk]], Awaitable[list[bool]]]


class TakerSource(Protocol):
    """Finds takers."""

    async def takers(self) -> Sequence[Taker]:
        """Return the current takers. Raises `UnavailableError` if they are unknown."""

    async def close(self) -> None:
        """Close the connections to them. Idempotent."""


class RemoteSource(TakerSource):
    """The remote tier as the only taker.

    Args:
        tier: Encodes, and has no breaker: a drain must distinguish an unreachable tier from one
            that refuses. It belongs to the stack, which closes it.
    """

    def __init__(self, tier: StorageBackend) -> None:
        self._taker = Taker(tier.name, tier.batched_contains, tier.batched_put)

    @override
    async def takers(self) -> Sequence[Taker]:
        return [self._taker]

    @override
    async def close(self) -> None:
        pass


class PeerSource(TakerSource):
    """The live sidecars, as the broker sees them, that are not about to shut down.

    Args:
        broker: Must stay open as long as this object.
        tls: Trusted authorities and client certificate for encrypted peers.
    """

    def __init__(
        self,
        instance: str,
        broker: BrokerClient,
        holders: Holders,
        token: ShownToken,
        timeout_s: float,
        tls: ClientTls | None = None,
    ) -> None:
        self._instance = instance
        self._broker = broker
        self._holders = holders
        self._token = token
        self._options = ClientOptions(
            timeout_s=timeout_s,
            connect_timeout_s=CONNECT_TIMEOUT_S,
            name=instance,
            tier=PEER_TIER,
            tls=tls,
        )
        self._clients: dict[str, LmClient] = {}
        self._live: frozenset[tuple[str, str]] = frozenset()

    @override
    async def takers(self) -> Sequence[Taker]:
        listed = [peer for peer in await self._broker.peers() if peer.id != self._instance]
        peers = [peer for peer in listed if not peer.draining]
        # A storage server that drains hands its chunks to the others, or keeps them on its disk.
        self._live = frozenset(
            (peer.id, peer.kind)
            for peer in listed
            if peer.kind == STORAGE_KIND or not peer.draining
        )
        able = sorted(
            (peer for peer in peers if peer.kind == PEER_KIND),
            key=lambda peer: (peer.load, peer.num_pulls, peer.id),
        )
        takers = []
        for peer in able[:MAX_TAKERS]:
            url = peer.distributed_url
            client = self._clients.get(url)
            if client is None:
                client = self._clients[url] = self.connect(url)
            takers.append(
                Taker(f"{peer.id} at {url}", partial(self._has, client), partial(_put, client))
            )
        return takers

    @override
    async def close(self) -> None:
        while self._clients:
            _, client = self._clients.popitem()
            await client.close()

    def connect(self, distributed_url: str) -> LmClient:
        """Create the client of a peer; the caller closes it.

        Raises:
            ValueError: Not a distributed URL.
        """
        return peer_client(distributed_url, self._token, self._options)

    async def _has(self, client: LmClient, keys: Sequence[ChunkKey]) -> list[bool]:
        """Return which chunks are held by another instance that the broker lists, of the same kind,
        and that is not about to shut down. Without lookup only this peer is asked.
        """
        try:
            found = await self._holders.of([key.key.chunk_id() for key in keys], MAX_BATCH_CHUNKS)
        except UnavailableError:
            found = [None]
        if None in found:  # unknown to lookup
            return await _mapped(client.contains(keys))
        return [
            any((holder.instance, holder.kind) in self._live for holder in holders or ())
            for holders in found
        ]


async def _put(client: LmClient, chunks: Sequence[Chunk]) -> list[bool]:
    await seal_all(chunks)
    return await _mapped(client.put(chunks))


async def _mapped(work: Awaitable[T]) -> T:
    try:
        return await work
    except (AuthenticationError, ProtocolError) as exc:
        raise NotWelcomeError(str(exc)) from exc

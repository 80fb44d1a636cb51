"""The peer tier: chunks that other pods hold, found through lookup, assigned by the broker, pulled over lm://."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_core.errors import AuthenticationError, ProtocolError, UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.lookup import LookupClient
from lmcache_core.p2p import Assignment, BrokerClient
from lmcache_core.p2p.pool import PeerPool
from lmcache_core.record import Allocate, Chunk, Miss, MissReason, Result
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.time_limit import caller_limit

PEER_TIER = "P2PBackend"
PEER_KIND = "sidecar"


@dataclass(slots=True)
class _Figures:
    pulls: int = 0
    failed_pulls: int = 0
    pulled_chunks: int = 0
    pulled_bytes: int = 0


class P2PBackend(StorageBackend):
    """Reads from peers; keeps nothing itself.

    Args:
        instance: This instance, which is never asked.
        lookup: Says who holds a chunk; opened and closed by its owner.
        broker: Says who of them should serve it; opened and closed by its owner.
        peers: Connections; closed with this tier.
    """

    name = PEER_TIER

    def __init__(self, instance: str, lookup: LookupClient, broker: BrokerClient, peers: PeerPool) -> None:
        self._instance = instance
        self._lookup = lookup
        self._broker = broker
        self._peers = peers
        self._figures = _Figures()

    async def open(self) -> None:
        """Nothing to do: peers are connected to when needed."""

    async def close(self) -> None:
        """End the connections to peers."""
        await self._peers.close()

    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Which chunks some peer holds, as far as lookup knows: the longest prefix of the keys."""
        holders = await self._holders(keys)
        return [bool(names) for names in holders] + [False] * (len(keys) - len(holders))

    async def batched_get(self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None) -> list[Result]:
        """Pull the longest prefix of the keys that peers hold; what a peer does not deliver is a miss."""
        results: list[Result] = [Miss(MissReason.NEVER_STORED)] * len(keys)
        deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        assignments: Sequence[Assignment] = ()
        async with caller_limit(timeout_s) as limit:
            assignments = await self._assignments(keys)
        if limit.expired():
            return [Miss(MissReason.DEADLINE)] * len(keys)
        places = {key.key.chunk_id(): i for i, key in enumerate(keys)}
        try:
            async with asyncio.TaskGroup() as pulls:
                for assignment in assignments:
                    pulls.create_task(self._pull(assignment, keys, places, results, allocate, deadline))
        except BaseException:
            for result in results:
                if isinstance(result, Chunk):
                    result.release()
            raise
        return results

    async def batched_put(self, chunks: Sequence[Chunk]) -> list[bool]:
        """Peers pull; nothing is pushed to them."""
        return [False] * len(chunks)

    async def batched_remove(self, keys: Sequence[ChunkKey]) -> int:
        """What peers hold is theirs."""
        return 0

    async def clear(self, tenant: str | None = None) -> int:
        """What peers hold is theirs."""
        return 0

    def stats(self) -> dict[str, int]:
        """Figures of the pulls so far."""
        figures = self._figures
        return {
            "num_chunks": 0,
            "used_bytes": 0,
            "capacity_bytes": 0,
            "pulls": figures.pulls,
            "failed_pulls": figures.failed_pulls,
            "pulled_chunks": figures.pulled_chunks,
            "pulled_bytes": figures.pulled_bytes,
        }

    async def _holders(self, keys: Sequence[ChunkKey]) -> list[list[str]]:
        answer = await self._lookup.lookup([key.key.chunk_id() for key in keys], exclude=[self._instance])
        return [[holder.instance for holder in at if holder.kind == PEER_KIND] for at in answer.holders]

    async def _assignments(self, keys: Sequence[ChunkKey]) -> Sequence[Assignment]:
        holders = await self._holders(keys)
        wanted = [(key.key.chunk_id(), names) for key, names in zip(keys, holders, strict=False) if names]
        return await self._broker.transfers(self._instance, wanted) if wanted else ()

    async def _pull(
        self,
        assignment: Assignment,
        keys: Sequence[ChunkKey],
        places: dict[bytes, int],
        results: list[Result],
        allocate: Allocate,
        deadline: float | None,
    ) -> None:
        at = [places[chunk_id] for chunk_id in assignment.chunk_ids]
        self._figures.pulls += 1
        try:
            client = await self._peers.client(assignment.distributed_url)
            left_s = None if deadline is None else deadline - asyncio.get_running_loop().time()
            got = await client.get([keys[i] for i in at], allocate, ticket=assignment.ticket, timeout_s=left_s)
        except (UnavailableError, AuthenticationError, ProtocolError):
            self._figures.failed_pulls += 1
            got = [Miss(MissReason.UNAVAILABLE)] * len(at)
        for i, result in zip(at, got, strict=True):
            results[i] = result
            if isinstance(result, Chunk):
                self._figures.pulled_chunks += 1
                self._figures.pulled_bytes += result.num_bytes

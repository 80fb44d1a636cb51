"""The peer tier: chunks that other pods hold, located through lookup, assigned by the broker, and
pulled over lm://.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict

from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.errors import UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.lookup import LookupClient
from lmcache_core.names import MEMORY_TIER, PEER_TIER
from lmcache_core.p2p import Assignment, BrokerClient, HeldBy, parse_distributed_url
from lmcache_core.p2p.by_mover import MoverPulls
from lmcache_core.p2p.pool import PeerPool
from lmcache_core.p2p.pull import PeerPull, PulledBytes, PullParts
from lmcache_core.record import Allocate, Chunk, Miss, MissReason, Result
from lmcache_core.storage.base import StorageBackend, caller_limit
from lmcache_core.storage.expected import EXPECTED_FROM

PEER_KIND = "sidecar"
MAX_GOODBYES = 64
"""Concurrent reports to the broker that a pull has ended; beyond this the tickets just expire."""
GOODBYE_S = 0.2
LOCATED_S, MAX_LOCATED = 0.1, 64
"""How long, and for how many questions, a read may use what was found when its chunks were located:
lookup is then asked once for both.
"""
LISTED_S = 5.0
"""How long a list of the peers' names is used before the broker is asked for another one."""


class P2PBackend(StorageBackend):
    """Reads from peers; stores nothing itself.

    Args:
        instance: This instance, which is never asked.
        lookup: Client that finds the holders of a chunk; opened and closed by its owner.
        broker: Client that assigns the peer to pull from; opened and closed by its owner.
        peers: Connections; closed with this tier.
        mover: Another way to peers than lm://; closed with this tier.
    """

    name = PEER_TIER

    def __init__(
        self,
        instance: str,
        lookup: LookupClient,
        broker: BrokerClient,
        peers: PeerPool,
        mover: MoverPulls | None = None,
    ) -> None:
        self._instance = instance
        self._lookup = lookup
        self._peers = peers
        self._parts = PullParts(instance, broker, peers, mover)
        self._broker = broker
        self._located: OrderedDict[
            ChunkKey, tuple[float, tuple[ChunkKey, ...], list[list[HeldBy]]]
        ] = OrderedDict()
        self._names: dict[str, str] = {}
        self._listed_at = -LISTED_S
        self._tasks = TaskSupervisor("peers", MAX_GOODBYES)

    @property
    def pulled(self) -> PulledBytes:
        """Return the bytes pulled, by peer."""
        return self._parts.pulled

    async def open(self) -> None:
        """Do nothing: peers are connected to when needed."""

    async def close(self) -> None:
        """Close the connections to peers."""
        await self._tasks.close(GOODBYE_S)
        if self._parts.mover is not None:
            await self._parts.mover.close()
        await self._peers.close()

    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Return which chunks some peer holds, as far as lookup knows: the longest prefix of the
        keys.
        """
        holders = await self._holders(keys)
        if keys and holders:
            self._located[keys[0]] = asyncio.get_running_loop().time(), tuple(keys), holders
            if len(self._located) > MAX_LOCATED:
                self._located.popitem(last=False)
        return [bool(names) for names in holders] + [False] * (len(keys) - len(holders))

    async def batched_get(
        self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None
    ) -> list[Result]:
        """Pull the longest prefix of the keys that peers hold (see `PeerPull`); what no peer
        delivers is a miss.
        """
        limit_s = self._peers.timeout_s if timeout_s is None else timeout_s
        deadline = asyncio.get_running_loop().time() + limit_s
        pull: PeerPull | None = None
        assignments: Sequence[Assignment] = ()
        async with caller_limit(limit_s) as limit:
            holders = self._located_just_now(keys) or await self._holders(keys)
            pull = PeerPull(self._parts, keys, holders, allocate, deadline)
            assignments = await pull.assign()
        if pull is None or limit.expired():
            return [Miss(MissReason.DEADLINE)] * len(keys)
        try:
            return await pull.run(assignments)
        finally:
            self._tasks.start("done", self._report_done(pull.granted))

    async def batched_put(self, chunks: Sequence[Chunk]) -> list[bool]:
        """Store nothing: peers pull."""
        return [False] * len(chunks)

    async def batched_remove(self, keys: Sequence[ChunkKey]) -> int:
        """Remove nothing: peers own their chunks."""
        return 0

    async def clear(self, tenant: str | None = None) -> int:
        """Remove nothing: peers own their chunks."""
        return 0

    def stats(self) -> dict[str, int]:
        """Return figures of the pulls so far."""
        mover = self._parts.mover
        return {
            "num_chunks": 0,
            "used_bytes": 0,
            "capacity_bytes": 0,
            **asdict(self._parts.figures),
            **({} if mover is None else mover.stats()),
        }

    async def _report_done(self, pulls: Sequence[str]) -> None:
        with contextlib.suppress(UnavailableError):
            await self._parts.broker.done(self._instance, pulls)

    def _located_just_now(self, keys: Sequence[ChunkKey]) -> list[list[HeldBy]]:
        """Return the holders that `batched_contains` has just found of these keys, once; empty if
        it has not.
        """
        located = self._located.pop(keys[0], None) if keys else None
        if located is None:
            return []
        at, known, holders = located
        is_fresh = asyncio.get_running_loop().time() - at < LOCATED_S
        return holders[: len(keys)] if is_fresh and known[: len(keys)] == tuple(keys) else []

    async def _holders(self, keys: Sequence[ChunkKey]) -> list[list[HeldBy]]:
        """Return the peers that hold each chunk, of the longest prefix of which lookup knows any;
        all chunks that it does not know are expected from `EXPECTED_FROM`.
        """
        answer = await self._lookup.lookup(
            [key.key.chunk_id() for key in keys], exclude=[self._instance]
        )
        holders = [
            [HeldBy(holder.instance, holder.tier) for holder in at if holder.kind == PEER_KIND]
            for at in answer.holders
        ]
        source = EXPECTED_FROM.get()
        peer = await self._peer_named(source) if source else None
        if peer is None:
            return holders
        hint = [HeldBy(peer, MEMORY_TIER)]
        return [at or hint for at in holders] + [hint] * (len(keys) - len(holders))

    async def _peer_named(self, name: str) -> str | None:
        """Return the id of the peer with this id or host; None if the broker knows none in the
        tenant, or as far as the last list tells.

        Clients choose names: an unknown one costs no more than a list every `LISTED_S`, and no
        connection.
        """
        now = asyncio.get_running_loop().time()
        if name not in self._names and now - self._listed_at >= LISTED_S:
            self._listed_at = now
            with contextlib.suppress(UnavailableError):
                self._names = {
                    known: peer.id
                    for peer in await self._broker.peers()
                    if peer.kind == PEER_KIND and peer.id != self._instance
                    for known in (parse_distributed_url(peer.distributed_url).host, peer.id)
                }
        return self._names.get(name)

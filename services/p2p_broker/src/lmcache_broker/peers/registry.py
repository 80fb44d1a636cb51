"""The peers as all brokers know them. If brokers share a Redis, the state is there; otherwise it is
in this one's memory.

Questions are answered from memory, which is replaced by what Redis holds unless that was done a
moment ago. While Redis is unavailable, this broker answers from what it last read and from the
heartbeats that it receives. What Redis has lost, the next heartbeats bring back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Concatenate, Final, ParamSpec, TypeVar

from lmcache_core.errors import UnavailableError
from lmcache_core.p2p import CopyOrder, DrainReport, Lease, Peer, PeerFigures, PeerStatus
from lmcache_core.security import Principal, owner_of

from lmcache_broker.peers.directory import PeerDirectory
from lmcache_broker.peers.pulls import BookedPull, PullBook, Requester
from lmcache_broker.peers.record import PeerRecord, PlacedOrder, SharedPeer
from lmcache_broker.peers.redis_peers import RedisPeers

logger = logging.getLogger(__name__)

MAX_STALE_S: Final = 0.05
REFRESH_INTERVAL_S: Final = 1.0

P = ParamSpec("P")
T = TypeVar("T")
D = TypeVar("D")


class PeerRegistry:
    """Peers of all brokers. For one event loop.

    Args:
        clock: Seconds, monotonic; the directory's.

    Attributes:
        book: Pulls that this broker has granted.
        shares: Whether there is a shared store at all.
        is_shared: Whether the last call to it succeeded.
        num_failures: Failed calls to it.
    """

    def __init__(
        self,
        directory: PeerDirectory,
        shared: RedisPeers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.directory = directory
        self.book = PullBook()
        self._shared = shared
        self.shares = self.is_shared = shared is not None
        self._clock = clock
        self._lock = asyncio.Lock()
        self._fresh_until = float("-inf")
        self.num_failures = 0

    async def announce(
        self,
        principal: Principal,
        peer: Peer,
        *,
        load: float,
        ttl_ms: int,
        draining: bool,
        drain: DrainReport | None = None,
        figures: PeerFigures | None = None,
    ) -> Lease:
        """Register a peer or renew its lease (see `PeerDirectory.announce`).

        Raises:
            ConflictError: A newer incarnation is live.
        """
        await self.refresh()
        lease = self.directory.announce(
            principal,
            peer,
            load=load,
            ttl_ms=ttl_ms,
            draining=draining,
            drain=drain,
            figures=figures,
        )
        shared = SharedPeer(
            owner_of(principal), peer, load, lease.draining, lease.ttl_ms, 0, drain, figures
        )
        draining = await self._ask(RedisPeers.announce, lease.draining, shared)
        return Lease(lease.ttl_ms, draining)

    async def get(self, principal: Principal, peer_id: str) -> PeerStatus:
        """Return the public status of a live peer; raises `NotFoundError`."""
        await self.refresh()
        return self.directory.get(principal, peer_id)

    async def visible(self, principal: Principal) -> list[PeerStatus]:
        """Return all live peers visible to `principal`, by id."""
        await self.refresh()
        return self.directory.visible(principal)

    async def remove(self, principal: Principal, peer_id: str) -> None:
        """End a lease that `principal` could have taken, if there is one."""
        self.directory.remove(principal, peer_id)
        await self._ask(RedisPeers.remove, None, owner_of(principal), peer_id)

    async def drain(self, principal: Principal, peer_id: str) -> PeerStatus:
        """Stop new pulls from a peer.

        Raises:
            NotFoundError: There is no peer with that id.
            UnavailableError: The shared store is unavailable, so that the order could miss the
                peer: its next heartbeat may reach another broker.
        """
        await self.refresh()
        record = self.directory.require(principal, peer_id)
        if self._shared is not None:
            await self._shared.drain(record.owner, peer_id)
        return self.directory.drain(principal, peer_id)

    async def see_leaving(self, peer: Peer) -> None:
        """Stop new pulls from a peer that is about to end; its next heartbeat tells it to drain."""
        for record in self.directory.at(peer):
            if not record.draining:
                record.draining = True
                await self._ask(RedisPeers.drain, None, record.owner, peer.id)

    async def forget(self, peer: Peer) -> None:
        """Forget a peer that is gone, regardless of its lease."""
        for record in self.directory.at(peer):
            self.directory.forget(record)
            await self._ask(RedisPeers.remove, None, record.owner, peer.id)

    async def claim(
        self,
        requester: Requester,
        pulls: Sequence[tuple[PeerRecord, str]],
        max_pulls: int,
        ttl_s: float,
    ) -> list[bool]:
        """Count a requester's pulls against their peers; return those for which there was room.

        Args:
            pulls: Peer and new id of each; no peer twice.
            max_pulls: Bound per peer, for all brokers together while they share a store.
            ttl_s: When a pull that is neither ended nor renewed stops counting.
        """
        if not pulls:
            return []
        claims = [(record.life, pull_id) for record, pull_id in pulls]
        verdicts = await self._ask(
            RedisPeers.claim, None, str(requester), claims, max_pulls, round(ttl_s * 1000)
        )
        now_s = self._clock()
        if verdicts is None:
            granted = [record.num_pulls(now_s) < max_pulls for record, _ in pulls]
        else:
            granted = [is_granted for is_granted, _ in verdicts]
            for (record, _), (_, num_pulls) in zip(pulls, verdicts, strict=True):
                record.shared_pulls = num_pulls
        for (record, pull_id), is_granted in zip(pulls, granted, strict=True):
            if is_granted:
                self.book.add(BookedPull(pull_id, requester, record, now_s, now_s + ttl_s))
        return granted

    async def renew_pulls(
        self, requester: Requester, pull_ids: Sequence[str], ttl_s: float
    ) -> dict[str, str]:
        """Extend a requester's pulls to `ttl_s` from now, whichever broker granted them.

        Returns:
            The life of the peer by the id of each pull that is underway and has not lasted too
            long.
        """
        lives = await self._ask(
            RedisPeers.renew_pulls, None, str(requester), pull_ids, round(ttl_s * 1000)
        )
        found = {
            pull_id: life
            for pull_id, life in zip(pull_ids, lives or [None] * len(pull_ids), strict=True)
            if life is not None
        }
        now_s = self._clock()
        for pull_id in pull_ids:
            pull = self.book.renew(pull_id, requester, now_s, now_s + ttl_s)
            if pull is not None:  # unknown to a Redis that is unavailable, or has lost its data
                found.setdefault(pull_id, pull.record.life)
        return found

    async def end_pulls(self, requester: Requester, pull_ids: Sequence[str]) -> int:
        """End a requester's pulls before their tickets expire, whichever broker granted them;
        return how many there were.
        """
        ended = [self.book.end(pull_id, requester) is not None for pull_id in pull_ids]
        there = await self._ask(RedisPeers.end_pulls, None, str(requester), pull_ids)
        if there is not None:
            ended = [here or elsewhere for here, elsewhere in zip(ended, there, strict=True)]
            self._fresh_until = float("-inf")  # slots granted by other brokers are free now
        return sum(ended)

    async def order_copies(self, orders: Sequence[PlacedOrder], ttl_s: float) -> bool:
        """Pass orders to whichever broker receives the peers' next heartbeats; return False if only
        this one can deliver them.
        """
        asked = await self._ask(RedisPeers.order_copies, False, orders, round(ttl_s * 1000))
        return asked is not False

    async def take_orders(self, tenant: str, peer_id: str) -> list[CopyOrder]:
        """Return the copies that the peer should make, each once."""
        return await self._ask(RedisPeers.take_orders, [], tenant, peer_id)

    async def refresh(self, max_stale_s: float = MAX_STALE_S) -> None:
        """Update memory, unless that was done a moment ago. Never raises for an unavailable
        store.
        """
        if self._shared is None or self._clock() < self._fresh_until:
            return
        async with self._lock:  # another caller may have done it during the wait
            if self._clock() >= self._fresh_until:
                await self._refresh(self._shared)
                self._fresh_until = self._clock() + max_stale_s

    async def ping(self) -> str:
        """Return the state for readiness; raises `UnavailableError` while the shared store is
        unavailable.
        """
        assert self._shared is not None
        await self._shared.ping()
        return "shared with other brokers"

    async def close(self) -> None:
        """Close connections. Idempotent."""
        if self._shared is not None:
            await self._shared.close()

    async def _refresh(self, shared: RedisPeers) -> None:
        read_s = self._clock()
        try:
            peers = await shared.read()
        except UnavailableError as exc:
            self._note_away(exc)
            return
        self.directory.replace(peers, read_s)
        if not self.is_shared:
            self.is_shared = True
            logger.info("shared peer store available again")

    async def _ask(
        self,
        call: Callable[Concatenate[RedisPeers, P], Awaitable[T]],
        otherwise: D,
        *args: P.args,
        **options: P.kwargs,
    ) -> T | D:
        """Call the shared store; return `otherwise` if there is none, or it is unavailable."""
        if self._shared is None:
            return otherwise
        try:
            return await call(self._shared, *args, **options)
        except UnavailableError as exc:
            self._note_away(exc)
            return otherwise

    def _note_away(self, exc: UnavailableError) -> None:
        self.num_failures += 1
        if self.is_shared:
            self.is_shared = False
            self.directory.forget_shared_pulls()
            logger.warning(
                "shared peer store unavailable, answering from local registrations: error=%s", exc
            )

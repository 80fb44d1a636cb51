"""The peers as all brokers know them: this one's memory, kept in step with the others' through
`SharedPeers`.

What is asked is answered from memory. Where brokers share a memory it is brought up to date before,
unless that was done a moment ago; where it is away, what the heartbeats told this broker is the
answer, and when it is back, the others are told all of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

from lmcache_core.errors import UnavailableError
from lmcache_core.p2p import CopyOrder, DrainReport, Lease, Peer, PeerFigures, PeerStatus
from lmcache_core.security import Principal
from lmcache_servicekit.errors import ConflictError

from lmcache_broker.peers.directory import PeerDirectory, owner_of
from lmcache_broker.peers.pulls import BookedPull, PullBook, Requester
from lmcache_broker.peers.record import PeerRecord
from lmcache_broker.peers.shared import (
    PlacedOrder,
    PullClaim,
    PullUnderway,
    PullVerdict,
    SharedPeer,
    SharedPeers,
)

logger = logging.getLogger(__name__)

MAX_STALE_S: Final = 0.05
REFRESH_INTERVAL_S: Final = 1.0
PULLS_BELIEVED_S: Final = 5.0
"""So long what other brokers said of pulls counts when they cannot be heard any more."""


class PeerRegistry:
    """Peers of all brokers. On one event loop.

    Args:
        directory: This broker's memory.
        shared: What brokers share; None where this one is alone.
        clock: Monotonic seconds, the directory's.

    Attributes:
        directory: This broker's memory.
        book: Pulls that this broker has granted.
        shares: Whether there is a shared memory at all.
        num_failures: Calls to the shared memory that failed.
    """

    def __init__(
        self,
        directory: PeerDirectory,
        shared: SharedPeers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.directory = directory
        self.book = PullBook()
        self._shared = shared
        self.shares = shared is not None
        self._clock = clock
        self._lock = asyncio.Lock()
        self._fresh_until = float("-inf")
        self._is_shared = shared is not None
        self._has_told = False
        self.num_failures = 0

    @property
    def is_shared(self) -> bool:
        """Whether the last call to the shared memory succeeded."""
        return self._is_shared and self.shares

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
        """Register a peer or renew its lease (see `PeerDirectory.announce`)."""
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
        if self._shared is None:
            return lease
        told = SharedPeer(
            owner_of(principal),
            peer,
            load,
            lease.draining,
            lease.ttl_ms,
            drain=drain,
            figures=figures,
        )
        try:
            (state,) = await self._shared.announce([told])
        except UnavailableError as exc:
            self._note_away(exc)
            return lease
        if state is None:
            raise ConflictError(f"peer {peer.id}: a later incarnation is registered")
        if state:
            self.directory.note_drain(principal, peer.id)
        return Lease(lease.ttl_ms, state)

    async def get(self, principal: Principal, peer_id: str) -> PeerStatus:
        """Return a live peer as callers see it; raises `NotFoundError`."""
        await self.refresh()
        return self.directory.get(principal, peer_id)

    async def visible(self, principal: Principal) -> list[PeerStatus]:
        """Return all live peers that `principal` sees, by id."""
        await self.refresh()
        return self.directory.visible(principal)

    async def remove(self, principal: Principal, peer_id: str) -> None:
        """End a lease that `principal` could have taken; none is fine."""
        self.directory.remove(principal, peer_id)
        await self._tell(lambda shared: shared.remove(owner_of(principal), peer_id))

    async def drain(self, principal: Principal, peer_id: str) -> PeerStatus:
        """Give a peer no new pulls; raises `NotFoundError`."""
        await self.refresh()
        record = self.directory.require(principal, peer_id)
        status = self.directory.drain(principal, peer_id)
        await self._tell(partial(_drain, record))
        return status

    async def see_leaving(self, peer_id: str, distributed_url: str) -> None:
        """Give no new pulls to a peer that is about to end; its next heartbeat tells it."""
        for record in self.directory.at(peer_id, distributed_url):
            if record.draining:
                continue
            record.draining = True
            await self._tell(partial(_drain, record))

    async def forget(self, peer_id: str, distributed_url: str) -> None:
        """Forget a peer that is gone, whatever its lease says."""
        for record in self.directory.at(peer_id, distributed_url):
            self.directory.forget(record)
            await self._tell(partial(_remove, record))

    async def claim(
        self,
        requester: Requester,
        pulls: Sequence[tuple[PeerRecord, str]],
        max_pulls: int,
        ttl_s: float,
    ) -> list[bool]:
        """Count a requester's pulls against their peers; which of them there was room for.

        Args:
            requester: Who pulls.
            pulls: Peer and new id of each; no peer twice.
            max_pulls: Bound for each peer, by all brokers together while they share a memory.
            ttl_s: A pull is over after that, if it is neither ended before nor renewed.
        """
        verdicts: Sequence[PullVerdict] | None = None
        if self._shared is not None and pulls:
            claims = [PullClaim(record.life, pull_id) for record, pull_id in pulls]
            try:
                verdicts = await self._shared.claim(
                    str(requester), claims, max_pulls, round(ttl_s * 1000)
                )
            except UnavailableError as exc:
                self._note_away(exc)
        now_s = self._clock()
        granted = [record.num_pulls(now_s) < max_pulls for record, _ in pulls]
        if verdicts is not None:
            granted = [verdict.is_granted for verdict in verdicts]
            for (record, _), verdict in zip(pulls, verdicts, strict=True):
                record.share_pulls(verdict.num_pulls)
        for (record, pull_id), is_granted in zip(pulls, granted, strict=True):
            if is_granted:
                self.book.add(BookedPull(pull_id, requester, record, now_s, now_s + ttl_s))
        return granted

    async def renew_pulls(
        self, requester: Requester, pull_ids: Sequence[str], ttl_s: float
    ) -> dict[str, str]:
        """A requester's pulls go on for so long from now, whichever broker has granted them.

        Returns:
            The life of the peer by the id of each pull that is underway and has not lasted too
            long.
        """
        found: dict[str, str] = {}
        if self._shared is not None and pull_ids:
            try:
                lives = await self._shared.renew_pulls(
                    str(requester), pull_ids, round(ttl_s * 1000)
                )
                found = {
                    pull_id: life
                    for pull_id, life in zip(pull_ids, lives, strict=True)
                    if life is not None
                }
            except UnavailableError as exc:
                self._note_away(exc)
        now_s = self._clock()
        for pull_id in pull_ids:
            pull = self.book.renew(pull_id, requester, now_s, now_s + ttl_s)
            if pull is not None and not self.is_shared:
                found[pull_id] = pull.record.life
        return found

    async def end_pulls(self, requester: Requester, pull_ids: Sequence[str]) -> int:
        """A requester's pulls are over before their tickets are, whichever broker has granted
        them; how many there were.
        """
        ended = [self.book.end(pull_id, requester) is not None for pull_id in pull_ids]
        if self._shared is not None and pull_ids:
            try:
                there = await self._shared.end_pulls(str(requester), pull_ids)
                ended = [
                    was_here or was_there for was_here, was_there in zip(ended, there, strict=True)
                ]
                self._fresh_until = float("-inf")  # places are free that were granted elsewhere
            except UnavailableError as exc:
                self._note_away(exc)
        return sum(ended)

    async def order_copies(self, orders: Sequence[PlacedOrder], ttl_s: float) -> bool:
        """Let whichever broker hears of the peers next tell them; False where it has to be this
        one.
        """
        return await self._tell(lambda shared: shared.order_copies(orders, round(ttl_s * 1000)))

    async def take_orders(self, tenant: str, peer_id: str) -> list[CopyOrder]:
        """What brokers want that peer to copy; it is told once."""
        if self._shared is None:
            return []
        try:
            return await self._shared.take_orders(tenant, peer_id)
        except UnavailableError as exc:
            self._note_away(exc)
            return []

    async def refresh(self, max_stale_s: float = MAX_STALE_S) -> None:
        """Bring memory up to date, unless it was a moment ago. Never raises for a shared memory
        that is away.
        """
        if self._shared is None or self._clock() < self._fresh_until:
            return
        async with self._lock:  # callers that waited here find it done
            if self._clock() >= self._fresh_until:
                await self._refresh(self._shared)
                self._fresh_until = self._clock() + max_stale_s

    async def keep_fresh(self) -> None:
        """To be repeated: what is in memory when the shared one goes away is not old."""
        await self.refresh()

    async def ping(self) -> str:
        """For readiness.

        Raises:
            UnavailableError: The shared memory is away.
        """
        assert self._shared is not None
        await self._shared.ping()
        return "shared with other brokers"

    async def close(self) -> None:
        """End connections. Idempotent."""
        if self._shared is not None:
            await self._shared.close()

    async def _refresh(self, shared: SharedPeers) -> None:
        try:
            changes = await shared.changes()
            self.directory.adopt(changes.peers)
            if changes.is_anew or not self._has_told:
                await shared.announce(self.directory.told())
                await shared.restore_pulls(self._underway())
                self._has_told = True
        except UnavailableError as exc:
            self._note_away(exc)
            return
        if not self._is_shared:
            self._is_shared = True
            logger.info("shared peer store available again")

    async def _tell(self, call: Callable[[SharedPeers], Awaitable[None]]) -> bool:
        """Tell the other brokers; False where there are none, or where they cannot be told now."""
        if self._shared is None:
            return False
        try:
            await call(self._shared)
        except UnavailableError as exc:
            self._note_away(exc)
            return False
        return True

    def _underway(self) -> list[PullUnderway]:
        now_s = self._clock()
        self.book.expire(now_s)
        return [
            PullUnderway(
                str(pull.requester),
                PullClaim(pull.record.life, pull.pull_id),
                round((now_s - pull.began_s) * 1000),
                max(1, round((pull.ends_s - now_s) * 1000)),
            )
            for pull in self.book
        ]

    def _note_away(self, exc: UnavailableError) -> None:
        """Log changes only."""
        self.num_failures += 1
        self._has_told = False
        if self._is_shared:
            self._is_shared = False
            self.directory.doubt_pulls(self._clock() + PULLS_BELIEVED_S)
            logger.warning(
                "shared peer store unavailable, answering from local registrations: error=%s",
                exc,
            )


async def _drain(record: PeerRecord, shared: SharedPeers) -> None:
    await shared.drain(record.owner, record.peer.id)


async def _remove(record: PeerRecord, shared: SharedPeers) -> None:
    await shared.remove(record.owner, record.peer.id)
